"""No test has a limit that a busy machine uses up: ten lanes on two cores stop anybody for seconds.

Whoever needs a short one says why on its line, behind ``by the clock:``, and it must not decide what the test finds.
"""

from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import patience
from tests.patience import patiently, until, wait_until

TESTS = Path(__file__).resolve().parents[1]
REASON = "by the clock:"
NOT_IN_THE_CHECK = TESTS / "compat"
LEAST_SECONDS = 30.0
LIMIT = patience.LIMIT_SECONDS
LEAST_TEST_SECONDS = 600.0
HTTPX = {"AsyncClient", "Client", "get", "post", "put", "request", "stream"}
CLOCKS = {"monotonic", "perf_counter"}


def number(node: ast.expr | None) -> float | None:
    """A number as it stands in the source."""
    return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None


def is_short(node: ast.expr | None, least: float = LEAST_SECONDS) -> bool:
    value = number(node)
    return value is not None and 0 < value < least


def reads_a_clock(node: ast.AST) -> bool:
    """Whether a time that has gone by is computed in it."""
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    reads = any(isinstance(each, ast.Attribute) and each.attr in CLOCKS for each in called)
    return reads and any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub) for each in ast.walk(node))


def of_call(call: ast.Call) -> str | None:
    """What is wrong with one call."""
    name = ast.unparse(call.func)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    last = call.args[-1] if call.args else None
    if name in {"asyncio.wait_for", "asyncio.timeout"}:
        return f"{name} counts seconds in which the loop did not turn: use tests.patience"
    if name == "pytest.mark.timeout" and is_short(last, LEAST_TEST_SECONDS):
        return f"a test may take {LEAST_TEST_SECONDS:g} s"
    is_over_http = name.startswith("httpx.") and name.removeprefix("httpx.") in HTTPX
    if is_over_http and not {"timeout", "transport", None} & {*given}:
        return "httpx gives up after 5 s: say timeout=LIMIT_SECONDS"
    if is_short(given.get("timeout")):
        return f"timeout={ast.unparse(given['timeout'])}"
    waits = {"patience", "patiently", "until"} if isinstance(call.func, ast.Name) else {"wait", "join"}
    if name.rpartition(".")[2] in waits and is_short(last):
        return f"{name} for {ast.unparse(last)} s" if last else None
    return None


def of_tree(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where what is wrong stands, and what."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (wrong := of_call(node)):
            yield node.lineno, wrong
        if isinstance(node, ast.BinOp) and ast.unparse(node.left) == "time.monotonic()" and is_short(node.right):
            yield node.lineno, f"a deadline in {ast.unparse(node.right)} s"
        if isinstance(node, ast.Assert) and reads_a_clock(node.test):
            yield node.lineno, "a time that has gone by is the machine's too: count, or take the best of many"
        if isinstance(node, ast.Assign) and "PATIENCE" in ast.unparse(node.targets[0]) and is_short(node.value, LIMIT):
            yield node.lineno, ast.unparse(node)


def impatient(source: str) -> list[str]:
    """Every limit that is too short, with its line, without those that have a reason."""
    lines = source.splitlines()
    return [f"{at}: {wrong}" for at, wrong in of_tree(ast.parse(source)) if REASON not in lines[at - 1]]


def test_no_test_has_a_limit_that_a_busy_machine_uses_up():
    """Tests, fakes and what else is in their folders."""
    here = {TESTS / "patience.py", Path(__file__).resolve()}
    files = [path for path in sorted(TESTS.rglob("*.py")) if NOT_IN_THE_CHECK not in path.parents and path not in here]
    assert len(files) > 100
    found = [f"{path.relative_to(TESTS)}:{wrong}" for path in files for wrong in impatient(path.read_text("utf-8"))]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "await asyncio.wait_for(event.wait(), 60)",
        "with asyncio.timeout(60): pass",
        "await patiently(event.wait(), 5)",
        "process.wait(10)",
        "subprocess.run(command, timeout=5)",
        "httpx.get(url)",
        "httpx.AsyncClient(base_url=url)",
        "deadline = time.monotonic() + 10.0",
        "assert time.monotonic() - began < 60",
        "PATIENCE_SECONDS = 20.0",
        "pytest.mark.timeout(60)",
    ],
)
def test_each_kind_of_limit_is_found(line):
    """And none that says why."""
    source = f"async def wait():\n    {line}"
    assert len(impatient(source)) == 1
    assert impatient(f"{source}  # by the clock: why") == []


async def test_patience_counts_turns_of_the_loop(monkeypatch):
    """A loop that stood still for longer than the limit goes on waiting; one that turns in vain does not."""
    monkeypatch.setattr(patience, "LIMIT_SECONDS", 0.2)
    arrived = asyncio.Event()
    asyncio.get_running_loop().call_later(0.03, lambda: (time.sleep(0.4), arrived.set()))
    await patiently(arrived.wait())
    with pytest.raises(TimeoutError):
        await patiently(asyncio.Event().wait())
    with pytest.raises(TimeoutError):
        await until(lambda: False)


def test_without_a_loop_looks_are_counted(monkeypatch):
    """A look that took long is one."""
    monkeypatch.setattr(patience, "LIMIT_SECONDS", 0.03)
    looks = iter([False, True])
    wait_until(lambda: time.sleep(0.05) or next(looks))
    with pytest.raises(TimeoutError):
        wait_until(lambda: False)
