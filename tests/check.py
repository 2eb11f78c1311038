"""Runs every test, in lanes side by side: `python -m tests.check`, which `make test` and `.ci/run` call.

A lane is a process with a log of its own in `build/check`. A lane that fails fails the check, and so does a test that
no lane ran. Long tests run for the topics whose files differ from what their long tests last passed with on this
machine (`tests/topics.py`); `--long` names topics instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from highwater.demo.environment import cache_dir
from tests.topics import ASKED_FOR, ROOT, TOPICS, digests

LOGS = ROOT / "build" / "check"
PASSED = "long-tests-passed.json"
ELSEWHERE = {"tests/compat": "make test-compat"}
"""Folders that no lane runs, and what does."""
PROGRESS_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_BIN = Path(sys.executable).parent
# The engine's tests are the longest lane: what runs beside them gives way.
_GIVES_WAY = ("nice", "-n", "5")
# Where the kernel shares cores by session first, a process's own nice value counts within its session alone.
# Without CAP_SYS_ADMIN the kernel takes one such wish in a tenth of a second, from all processes together.
_SESSION_GIVES_WAY = (
    "for _ in 1 2 3 4 5 6 7 8; do "
    "[ -w /proc/self/autogroup ] && ! { echo 5 > /proc/self/autogroup; } 2> /dev/null && sleep 0.15 || break; done; "
)
# promtool, Prometheus, Helm and kubectl are Go's and short-lived: with more room they collect less garbage, for a sixth
# less processor time.
_OF_LANES = {"GOGC": "400"}
_DURATIONS = ("--durations=12", "--durations-min=3")


@dataclass(frozen=True)
class Lane:
    """Commands that run one after the other, as long as each succeeds."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    folders: tuple[str, ...] = ()
    """Those whose tests it runs."""
    after: tuple[str, ...] = ()
    """Lanes that must have passed before it."""
    not_beside: tuple[str, ...] = ()
    """Lanes that do not run while it does."""
    session_gives_way: bool = False
    """Whether it leaves the cores to lanes that start servers, which others wait for."""

    @property
    def log(self) -> Path:
        """The file that it writes to."""
        return LOGS / f"{self.name}.log"

    @property
    def seen(self) -> Path:
        """The file in which its tests are listed."""
        return LOGS / f"{self.name}.json"


def program(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a program of this environment."""
    return (*_GIVES_WAY, str(_BIN / name), *arguments)


def pytest_lane(name: str, *folders: str, coverage: bool = False, processes: int = 0) -> Lane:
    """Return the lane that runs the tests of some folders, all in its own process or a test each in several."""
    run = ("coverage", "run", "-m", "pytest") if coverage else ("pytest",)
    plugins = ("-p", "tests.cheaper", "-p", "tests.seen", "--seen", str(LOGS / f"{name}.json"))
    arguments = ("-q", *plugins, *_DURATIONS, *(("--numprocesses", str(processes)) if processes else ()), *folders)
    return Lane(name, (program("python", "-m", *run, *arguments),), folders)


def engine_lane(name: str, *folders: str, processes: int = 0) -> Lane:
    """Return the lane that runs tests of real engines, once vLLM is installed; no other goes before it."""
    tests = pytest_lane(name, *folders, processes=processes)
    prepared = (str(_BIN / "highwater"), "demo", "--prepare")
    return Lane(name, (prepared, *(command[len(_GIVES_WAY) :] for command in tests.commands)), tests.folders)


def all_lanes(*, traced: bool = False) -> list[Lane]:
    """Return the lanes that run tests, the longest first: they are begun in this order.

    Args:
        traced: Unit and HTTP tests run under coverage, which a lane after them judges.
    """
    combined = program("coverage", "combine", "--quiet")
    return [
        engine_lane("engine", "tests/engine"),
        engine_lane("own-engine", "tests/own_engine"),
        # Its figures are of a whole machine's processes and of /dev/shm, which engines beside it would share. Its own
        # tests are kept apart by their names, and rest for most of their time.
        replace(engine_lane("growth", "tests/growth", processes=3), not_beside=("engine", "own-engine")),
        pytest_lane("http", "tests/http", coverage=traced),
        replace(pytest_lane("unit", "tests/unit", coverage=traced), session_gives_way=True),
        pytest_lane("faithful", "tests/faithful", "tests/security"),
        pytest_lane("pages", "tests/browser", "tests/docker"),
        replace(pytest_lane("helm", "tests/helm", "tests/install", "tests/observability"), session_gives_way=True),
        pytest_lane("situations", "tests/situations"),
        pytest_lane("release", "tests/release"),
        *([Lane("coverage", (combined, program("coverage", "report")), after=("unit", "http"))] if traced else []),
    ]


def other_lanes() -> list[Lane]:
    """Return the lanes of the whole check that run no tests."""
    lint = (
        program("ruff", "check", "."),
        program("ruff", "format", "--check", "."),
        program("mypy"),
        program("lint-imports", "--no-logo"),
    )
    return [Lane("lint", lint), Lane("sbom", ((*_GIVES_WAY, "make", "--no-print-directory", "sbom"),))]


# --- running them ---


@dataclass
class Running:
    """A lane under way, or what came of it."""

    lane: Lane
    process: subprocess.Popen[bytes]
    began: float
    status: int | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @classmethod
    def start(cls, lane: Lane) -> Running:
        """Start its commands, in a session of their own."""
        script = " && ".join(shlex.join(command) for command in lane.commands)
        if lane.session_gives_way:
            script = _SESSION_GIVES_WAY + script
        environ = _OF_LANES | os.environ | {"PYTHONUNBUFFERED": "1"}
        with lane.log.open("wb") as log:
            process = subprocess.Popen(
                ["sh", "-c", script],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(lane, process, time.monotonic())

    def has_ended(self) -> bool:
        """Say whether it has; then its status and what it cost are known."""
        if self.status is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.status = self.process.returncode = os.waitstatus_to_exitcode(status)
                self.seconds = time.monotonic() - self.began
                self.cpu_seconds = usage.ru_utime + usage.ru_stime
        return self.status is not None

    def end(self) -> None:
        """Interrupt it; the servers that its tests started go with it."""
        if self.status is None:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait()

    def progress(self) -> str:
        """Return how far it is by pytest's count; before that, or without, the last line of its log."""
        text = self.lane.log.read_bytes()[-4000:].decode(errors="replace")
        if found := re.findall(r"\[ *(\d+)%\]", text):
            return f"{self.lane.name} {found[-1]} %"
        said = [line for line in text.splitlines() if re.search(r"\w{3}", line)]
        return f"{self.lane.name} ({said[-1].strip()[:80]})" if said else self.lane.name

    def report(self) -> str:
        """Return its whole log where it failed, else only the end."""
        text = self.lane.log.read_text(errors="replace").strip()
        if self.status:
            return text
        summary = re.search(r"^=+ (slowest|short test summary|\d+ )", text, re.MULTILINE)
        return text[summary.start() :] if summary else "\n".join(text.splitlines()[-3:])


def run(lanes: Iterable[Lane], slots: int) -> tuple[list[Running], list[Lane]]:
    """Run lanes side by side.

    Returns:
        Those that ran, and those that did not as one before them had failed.
    """
    waiting, under_way, ended = list(lanes), list[Running](), list[Running]()
    began = said = time.monotonic()
    try:
        while under_way or any(_may_start(lane, ended) for lane in waiting):
            for lane in [lane for lane in waiting if _may_start(lane, ended)]:
                if len(under_way) < slots and not any(_apart(lane, one.lane) for one in under_way):
                    waiting.remove(lane)
                    under_way.append(Running.start(lane))
            for one in [one for one in under_way if one.has_ended()]:
                under_way.remove(one)
                ended.append(one)
                _report_end(one, time.monotonic() - began)
            if time.monotonic() - said >= PROGRESS_SECONDS:
                said = time.monotonic()
                after = f"; to come: {', '.join(lane.name for lane in waiting)}" if waiting else ""
                _say(f"{_clock(said - began)} {', '.join(one.progress() for one in under_way)}{after}")
            time.sleep(_LOOK_SECONDS)
    finally:
        for one in under_way:
            one.end()
    return ended, waiting


def _may_start(lane: Lane, ended: list[Running]) -> bool:
    return set(lane.after) <= {one.lane.name for one in ended if one.status == 0}


def _apart(one: Lane, other: Lane) -> bool:
    return one.name in other.not_beside or other.name in one.not_beside


def _report_end(one: Running, seconds: float) -> None:
    came = "passed" if one.status == 0 else f"FAILED with status {one.status}"
    _say(f"\n{_clock(seconds)} {one.lane.name} {came}")
    _say("\n".join(f"  {line}" for line in one.report().splitlines()) + "\n")


def _clock(seconds: float) -> str:
    return f"[{int(seconds) // 60:2}:{int(seconds) % 60:02}]"


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - what it is for


# --- nothing left out ---


def files_in_no_lane(lanes: Iterable[Lane], root: Path = ROOT) -> list[str]:
    """Return the test files that no lane's folders contain, or that two lanes' do."""
    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = str(path.relative_to(root))
        folders = [*ELSEWHERE, *(folder for lane in lanes for folder in lane.folders)]
        if sum(name.startswith(f"{folder}/") for folder in folders) != 1:
            found.append(name)
    return found


def seen_by(lane: Lane) -> dict[str, list[str]] | None:
    """Return what a lane wrote down; None where it did not come to that."""
    try:
        found = json.loads(lane.seen.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def not_run(lane: Lane, root: Path = ROOT) -> list[str]:
    """Return what a lane should have run and did not: tests that it collected, and files in which it found none."""
    if not lane.folders:
        return []
    seen = seen_by(lane)
    if seen is None:
        return [f"{lane.name}: it did not write down what it ran"]
    files = {name.partition("::")[0] for name in (*seen["collected"], *seen["left_out"])}
    own = {str(path.relative_to(root)) for folder in lane.folders for path in (root / folder).rglob("test_*.py")}
    return [*sorted(set(seen["collected"]) - set(seen["ran"])), *(f"{name}: no test in it" for name in own - files)]


# --- which long tests run ---


def changed(topic: str, passed: Mapping[str, Mapping[str, object]]) -> str | None:
    """Return why a topic's long tests are to run; None where they passed with just these files."""
    if topic not in passed:
        return "they have not passed on this machine yet"
    now, then = digests(topic), passed[topic].get("files")
    then = then if isinstance(then, dict) else {}
    names = sorted(name for name in {*now, *then} if now.get(name) != then.get(name))
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} changed since they passed on this machine on {passed[topic].get('when')}"


def read_passed(path: Path) -> dict[str, dict[str, object]]:
    """Return what long tests passed with; empty if the file cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep_passed(path: Path, ran_with: Mapping[str, Mapping[str, str]]) -> None:
    """Write down what each topic's long tests passed with just now."""
    when = datetime.now(UTC).isoformat(timespec="minutes")
    now = {topic: {"when": when, "files": files} for topic, files in ran_with.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(read_passed(path) | now, indent=1))
    draft.replace(path)


def long_topics(named: str | None, passed: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return the topics whose long tests run, and say of each why it does or does not."""
    reasons = {topic: changed(topic, passed) for topic in TOPICS}
    if named is not None:
        chosen = {"all": list(TOPICS), "none": []}.get(named, named.split(","))
        reasons = {topic: "it was asked for" if topic in chosen else None for topic in TOPICS}
        if unknown := [topic for topic in chosen if topic not in TOPICS]:
            raise SystemExit(f"--long {named}: no topic is called {unknown[0]}; there are {', '.join(TOPICS)}")
    for topic, reason in reasons.items():
        because = "it was not asked for" if named is not None else "nothing that it is about changed since it passed"
        ran = f"run: {reason}" if reason else f"do not run: {because}"
        _say(f"The long tests of {topic} ({TOPICS[topic].what}) {ran}")
    return [topic for topic, reason in reasons.items() if reason]


# --- the command ---


def table(ended: list[Running], seconds: float) -> str:
    """Return what each lane cost, and how many tests it ran and left out."""
    lines = [f"{'lane':12} {'seconds':>8} {'of CPU':>8} {'tests':>8} {'long, left out':>15}"]
    total_ran = total_left_out = 0
    for one in ended:
        line = f"{one.lane.name:12} {one.seconds:8.0f} {one.cpu_seconds:8.0f}"
        if one.lane.folders:
            seen = seen_by(one.lane) or {"ran": [], "left_out": []}
            ran, left_out = len(seen["ran"]), len(seen["left_out"])
            line += f" {ran:8} {left_out:15}"
            total_ran, total_left_out = total_ran + ran, total_left_out + left_out
        lines.append(line)
    cpu_seconds = sum(one.cpu_seconds for one in ended)
    return "\n".join([*lines, f"{'together':12} {seconds:8.0f} {cpu_seconds:8.0f} {total_ran:8} {total_left_out:15}"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.check", description="Every test, in lanes side by side.")
    parser.add_argument("--whole", action="store_true", help="lint, types and the SBOM too, as in .ci/run")
    parser.add_argument("--long", metavar="TOPICS", help=f"all, none, or some of {','.join(TOPICS)}")
    # Two more than cores: the lanes of engines wait for most of their time.
    parser.add_argument("--slots", type=int, default=(os.cpu_count() or 1) + 2, help="how many lanes at a time")
    return parser.parse_args()


def main() -> int:
    """Run the check, and return its exit status."""
    asked = _arguments()
    LOGS.mkdir(parents=True, exist_ok=True)
    for old in (*LOGS.glob("*.json"), *LOGS.glob(".coverage*")):
        old.unlink()
    record = cache_dir() / PASSED
    topics = long_topics(asked.long, read_passed(record))
    ran_with = {topic: digests(topic) for topic in topics}
    os.environ[ASKED_FOR] = ",".join(topics) or "none"
    # Lanes start hundreds of Python processes: to compile the same modules in each is a large part of their work.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    tests = all_lanes(traced="coverage" in topics)
    lanes = [*tests, *(other_lanes() if asked.whole else [])]
    began = time.monotonic()
    ended, never_begun = run(lanes, max(asked.slots, 1))
    seconds = time.monotonic() - began
    problems = [f"{one.lane.name} failed with status {one.status}" for one in ended if one.status]
    problems += [f"{lane.name} was not begun: {' or '.join(lane.after)} had failed" for lane in never_begun]
    problems += [f"{name} is in no lane, or in two" for name in files_in_no_lane(tests)]
    problems += [f"not run: {name}" for lane in tests for name in not_run(lane)]
    _say(table(ended, seconds))
    _say("\n".join(problems) or "All lanes passed, and every test ran that was collected.")
    if not problems and topics:
        keep_passed(record, ran_with)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
