"""Tests have no limit that a busy machine uses up: ten lanes share two cores, and each may stand still for seconds.

ruff refuses `asyncio.wait_for`, `asyncio.timeout` and their kin in tests (TID251, `banned-api` in pyproject.toml); this
file refuses the shapes that need their numbers read. A short limit has its reason on its line, behind ruff's own mark
or behind ``# by the clock:``, and must not decide what the test finds.

It reads one file at a time and computes nothing. It does not see:

- a limit that stands elsewhere: in a constant, a variable, a sum, a dict of options, or a parameter's default
- a function under another name (`from httpx import get`), and one that is not in the lists below
- a limit by its position in a long list of arguments (`queue.get(True, 5)`, `urlopen(url, None, 5)`)
- a time gone by that is compared outside of an assert, or went through a function first (`assert max(times) < 1`)
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import patience
from tests.patience import patiently, until, wait_until

TESTS = Path(__file__).resolve().parents[1]
REASON = re.compile(r"# by the clock: \S")
MIN_SECONDS = 30.0
MIN_TEST_SECONDS = 600.0
WAITS = {"patience", "wait", "join", "result", "settimeout", "Timeout", "ClientTimeout"}
CLOCKS = {"monotonic", "perf_counter", "time"}
FUNCTIONS = {"delete", "get", "head", "options", "patch", "post", "put", "request", "stream"}
HTTPX = {f"httpx.{name}" for name in FUNCTIONS | {"AsyncClient", "Client"}}


def is_below(least: float, node: ast.expr | None) -> bool:
    """Return True for a number in the source between 0, which does not wait, and the least."""
    return isinstance(node, ast.Constant) and type(node.value) in {int, float} and 0 < node.value < least


def is_call_of(names: set[str], node: ast.AST) -> bool:
    """Return True for a call of a function or a method of such a name, whatever it belongs to."""
    match node:
        case ast.Call(ast.Name(name) | ast.Attribute(_, name)):
            return name in names
        case _:
            return False


def is_time_gone_by(node: ast.AST) -> bool:
    """Return True for `time.monotonic() - began`."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and is_call_of(CLOCKS, node.left)


def short_limits_of_call(call: ast.Call) -> Iterator[tuple[int, str]]:
    """Yield the line and the message of each limit in a call that is too short."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    every = [*call.args, *named.values()]
    if ast.unparse(call.func) == "pytest.mark.timeout":
        yield from ((each.lineno, "a short limit of a test") for each in every if is_below(MIN_TEST_SECONDS, each))
        return
    if ast.unparse(call.func) in HTTPX and not {"timeout", "transport", None} & named.keys():
        yield call.lineno, "httpx gives up after 5 s: pass timeout=LIMIT_SECONDS"
    limits = every if is_call_of(WAITS, call) else [named.get("timeout")]
    yield from ((each.lineno, "a short limit") for each in limits if is_below(MIN_SECONDS, each))


def compared(test: ast.expr) -> set[str]:
    """Return the variables that an assert compares with something."""
    compares = [node for node in ast.walk(test) if isinstance(node, ast.Compare)]
    return {side.id for node in compares for side in (node.left, *node.comparators) if isinstance(side, ast.Name)}


def short_limits_of_tree(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the message of each limit that is too short."""
    nodes = list(ast.walk(tree))
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and is_time_gone_by(node.value)]
    times = {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}
    for node in nodes:
        match node:
            case ast.Call():
                yield from short_limits_of_call(node)
            case ast.BinOp(left, ast.Add(), right) if is_call_of(CLOCKS, left) and is_below(MIN_SECONDS, right):
                yield node.lineno, "a short deadline"
            case ast.Assert(test) if any(map(is_time_gone_by, ast.walk(test))) or times & compared(test):
                yield node.lineno, "a time gone by is the machine's too: count, or take the best of many"
            case ast.Assign([target], value) | ast.AnnAssign(target, _, value):
                if "PATIENCE" in ast.unparse(target) and is_below(patience.LIMIT_SECONDS, value):
                    yield node.lineno, "a shorter patience than LIMIT_SECONDS"


def short_limits(source: str) -> list[str]:
    """Return `LINE: MESSAGE` for each limit that is too short and has no reason on its line."""
    lines = source.splitlines()
    found = short_limits_of_tree(ast.parse(source))
    return [f"{at}: {message}" for at, message in found if not REASON.search(lines[at - 1])]


def sources(tests: Path) -> list[Path]:
    """Return all tests, fakes and what else is in their folders, but tests/compat: it is not in the check."""
    return [path for path in sorted(tests.rglob("*.py")) if tests / "compat" not in path.parents]


def findings(files: list[Path]) -> list[str]:
    """Return `PATH:LINE: MESSAGE` for each limit that is too short."""
    return [f"{path}:{limit}" for path in files for limit in short_limits(path.read_text("utf-8"))]


def test_no_test_has_a_limit_that_a_busy_machine_uses_up():
    tests = Path(patience.__file__).parent
    files = sources(TESTS)
    assert {*files} == {*tests.rglob("*.py")} - {*(tests / "compat").rglob("*.py")}
    found = findings(files)
    assert found == [], "\n".join(found)


def test_a_finding_names_its_file_and_compat_is_left_out(tmp_path):
    for name in ("compat/test_far.py", "conftest.py", "http/compat/test_near.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import time\nthread.join(5)\n", "utf-8")
    assert findings(sources(tmp_path)) == [
        f"{tmp_path}/conftest.py:2: a short limit",
        f"{tmp_path}/http/compat/test_near.py:2: a short limit",
    ]


TOOK = "took = time.monotonic() - began; "


@pytest.mark.parametrize(
    ("refused", "allowed"),
    [
        ("patience(5)", "patience(60)"),
        ("patience(seconds=5)", "patience(seconds=60)"),
        ("process.wait(10)", "process.wait(60)"),
        ("threading.Event().wait(timeout=0.5)", "threading.Event().wait()"),
        ("thread.join(29.9)", "thread.join(30)"),
        ("future.result(5)", "future.result(SECONDS)"),
        ("sock.settimeout(5)", "sock.settimeout(0)"),
        ("httpx.Timeout(5)", "httpx.Timeout(60)"),
        ("httpx.Timeout(60, connect=5)", "httpx.Timeout(60, connect=None)"),
        ("aiohttp.ClientTimeout(total=5)", "aiohttp.ClientTimeout(total=60)"),
        ("subprocess.run(command, timeout=5)", "subprocess.run(command, timeout=60)"),
        ("queue.get(timeout=5)", "queue.get('timeout', 5)"),
        ("run(timeout=5)", "run(timeout_seconds=5)"),  # a setting of what is tested
        *(
            (f"httpx.{name}(url)", f"httpx.{name}(url, timeout=60)")
            for name in ("delete", "get", "head", "options", "patch", "post", "put", "request", "stream")
        ),
        ("httpx.AsyncClient(base_url=url)", "httpx.AsyncClient(base_url=url, **options)"),
        ("httpx.Client()", "httpx.Client(transport=app)"),
        ("httpx.get(url, timeout=5)", "httpx.get(url, timeout=None)"),
        ("deadline = time.monotonic() + 10.0", "deadline = time.monotonic() + 60"),
        ("deadline = monotonic() + 10", "deadline = monotonic() + SECONDS"),
        ("deadline = time.perf_counter() + 10", "later = now + 10"),
        ("deadline = time.time() + 10", "earlier = time.time() - 10"),
        ("assert time.monotonic() - began < 60", "assert time.monotonic() < deadline"),
        ("assert (time.perf_counter() - began) / count < 60", "assert time.process_time() - began < 60"),
        (f"{TOOK}assert took < 1", f"{TOOK}assert used < 0.6 * took"),
        (f"{TOOK}assert ready and 1 > took", f"{TOOK}assert ready, took"),
        ("PATIENCE_SECONDS = 20.0", "PATIENCE_SECONDS = 60.0"),
        ("PATIENCE_SECONDS: float = 59", "POLL_SECONDS: float = 59"),
        ("pytest.mark.timeout(60)", "pytest.mark.timeout(600)"),
        ("pytest.mark.timeout(timeout=599)", "pytest.mark.timeout(timeout=SECONDS, func_only=True)"),
    ],
)
def test_a_short_limit_is_refused_unless_its_line_says_why(refused, allowed):
    assert [finding.partition(":")[0] for finding in short_limits(f"{allowed}\n{refused}\n")] == ["2"]
    assert short_limits(f"{refused}  # by the clock: how often it looks") == []
    for line in ("\n", "  # by the clock:\n", "  # by the clock: \n", "\n# by the clock: as above\n"):
        assert len(short_limits(f"# by the clock: why\n{refused}{line}")) == 1


def test_the_reason_stands_beside_the_number():
    assert short_limits("run(  # by the clock: why\n    timeout=5,\n)") == ["2: a short limit"]
    assert short_limits("run(\n    timeout=5,  # by the clock: why\n)") == []


@pytest.mark.parametrize(
    "banned_name", ["asyncio.wait_for", "asyncio.timeout", "asyncio.timeout_at", "socket.setdefaulttimeout"]
)
def test_ruff_refuses_other_limits_in_tests_only(banned_name):
    module, _, short = banned_name.partition(".")
    both = f"import {module}\nfrom {module} import {short}\n\n{banned_name}(60)\n{short}(60)\n"
    for name in ("tests/patience.py", "tests/unit/host/test_trace.py", "tests/http/test_proxy.py"):
        assert banned(both, name) == 2, name
    for name in ("app/highwater/main.py", "worker_ext/highwater_worker/x.py", "tests/compat/clients.py"):
        assert banned(both, name) == 0, name


def banned(source: str, name: str) -> int:
    """Return how many uses of a banned name ruff finds in the source of such a file."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format=json", f"--stdin-filename={TESTS.parent / name}"]
    done = subprocess.run([*command, "-"], input=source, capture_output=True, text=True, check=False)
    return sum(each["code"] == "TID251" for each in json.loads(done.stdout))


async def test_patience_counts_turns_of_the_loop(monkeypatch):
    monkeypatch.setattr(patience, "LIMIT_SECONDS", 0.2)
    arrived = asyncio.Event()
    asyncio.get_running_loop().call_later(0.03, lambda: (time.sleep(0.4), arrived.set()))
    await patiently(arrived.wait())
    with pytest.raises(TimeoutError):
        await patiently(asyncio.Event().wait())
    with pytest.raises(TimeoutError):
        await until(lambda: False)


def test_without_a_loop_looks_are_counted(monkeypatch):
    monkeypatch.setattr(patience, "LIMIT_SECONDS", 0.03)
    looks = iter([False, True])
    wait_until(lambda: time.sleep(0.05) or next(looks))
    never_comes = []
    with pytest.raises(TimeoutError, match=r"not true for 0\.03 s: wait_until\(lambda: never_comes\)"):
        wait_until(lambda: never_comes)
    with pytest.raises(TimeoutError, match=r"not true for 0\.03 s: <built-in method "):
        wait_until("".isdigit)
