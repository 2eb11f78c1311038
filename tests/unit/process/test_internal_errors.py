"""Every broad `except`, and every use of `contained`, raises again or moves a counter that a scrape shows."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from highwater.diagnose.incidents import diagnosis as diagnosing
from highwater.diagnose.rules import book
from highwater.model.report import Report
from highwater.process.errors import InternalErrors
from highwater.server.main import create_app
from highwater.server.settings import Settings
from highwater.server.sidecar import Sidecar
from highwater.watch.shared_devices import SharedDevices
from tests.fakes.engine import FakeEngine
from tests.fakes.incident import evidence

APP = Path(__file__).parents[3] / "app"

# Broad, not raised again and not counted: the reason why that is right.
NOT_COUNTED: dict[tuple[str, str], str] = {
    ("gated_proxy/door.py", "take"): "it moves door_faults_total, as tests/unit/gated_proxy/test_door.py has it",
}


# --- where they are ---


def is_broad(kind: ast.expr | None) -> bool:
    """Whether a handler of this kind catches what nobody expected."""
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(each, ast.Name) and each.id in {"Exception", "BaseException"} for each in kinds)


def counts(body: list[ast.stmt]) -> bool:
    """Whether it calls what counts."""
    calls = (node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(called(call).lstrip("_") == "internal_error" for call in calls)


def called(call: ast.Call) -> str:
    """The last name of what is called: `f` and `a.b.f` are both `f`."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def broad_ones(source: str) -> Iterator[tuple[str, bool, bool]]:
    """The function around each, whether it raises again whatever happens, and whether it counts."""

    def walk(node: ast.AST, within: str) -> Iterator[tuple[str, bool, bool]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            within = node.name
            if any(is_broad(argument) for each in node.decorator_list for argument in handled(each)):
                yield within, False, counts(node.body)
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type):
            last = node.body[-1]
            yield within, isinstance(last, ast.Raise) and last.exc is None, counts(node.body)
        if isinstance(node, ast.Call) and called(node) == "suppress" and any(map(is_broad, node.args)):
            yield within, False, False
        if isinstance(node, ast.Call) and called(node) == "contained":
            yield within, False, True
        for child in ast.iter_child_nodes(node):
            yield from walk(child, within)

    yield from walk(ast.parse(source), "")


def handled(decorator: ast.expr) -> list[ast.expr]:
    """What a route's `exception_handler` catches."""
    is_one = isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("exception_handler")
    return decorator.args if is_one and isinstance(decorator, ast.Call) else []


# To parse every file takes most of a second of each process that collects tests: only those that may have one.
MAY_HAVE_ONE = re.compile(r"\b(?:Base)?Exception\b|\bexcept\s*:|\bcontained\(")

FOUND = {
    (path.relative_to(APP).as_posix().removeprefix("highwater/"), within): is_counted
    for package in ("highwater", "gated_proxy")
    for path in sorted((APP / package).rglob("*.py"))
    if MAY_HAVE_ONE.search(source := path.read_text())
    for within, raises, is_counted in broad_ones(source)
    if not raises
}


@pytest.mark.parametrize("where", sorted(FOUND.keys() | NOT_COUNTED.keys()), ids=":".join)
def test_a_broad_except_counts_and_is_proven(where):
    assert where in FOUND, f"{where} is gone: take it out of NOT_COUNTED"
    assert FOUND[where] != (where in NOT_COUNTED), f"{where} neither counts nor has a reason, or has both"
    assert where in PROVEN or where in NOT_COUNTED, f"{where} counts, and no test here brings that about"


# --- each brought about ---


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


async def broken_later(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


async def in_order(*_: Any, **__: Any) -> None:
    """What is not on trial."""


async def run_for_a_moment(loop: Callable[[], Awaitable[None]]) -> None:
    """One round of a loop that runs until cancelled."""
    task = asyncio.ensure_future(loop())
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})


async def poller(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar.services.poller, "poll", broken_later)
    await run_for_a_moment(sidecar.services.poller.run)


async def listener(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is the caller's all the same, and the other listeners'."""
    others: list[Report] = []
    monkeypatch.setattr(sidecar.services.poller.reports, "listeners", [broken, others.append])
    assert [await sidecar.services.poller.poll()] == others


async def pace(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar.services.poller, "poll", in_order)
    await run_for_a_moment(partial(sidecar.services.poller.run, broken))


async def policy(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar.services.governor, "consider", broken_later)
    sidecar.services.governor.notice(sidecar.services.poller.current())
    await run_for_a_moment(sidecar.services.governor.run)


async def shared_devices(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch
    counter = sidecar.services.exporter.counters.internal_errors.counter("shared_devices")
    history = sidecar.services.history
    await run_for_a_moment(SharedDevices(broken, history, recorders=None, nvml=None, internal_error=counter).run)


async def growth(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    watch: Any = sidecar.services.growth
    monkeypatch.setattr(watch, "look", broken_later)
    watch.notice(sidecar.services.report())
    await run_for_a_moment(watch.run)


async def host(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar.services.host, "read", broken_later)
    await run_for_a_moment(sidecar.services.host.run)


def incident_box(sidecar: Sidecar) -> Any:
    owners = (getattr(listener, "__self__", None) for listener in sidecar.services.poller.reports.listeners)
    return next(owner for owner in owners if type(owner).__name__ == "IncidentWatcher")


async def incident_watcher(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    box = incident_box(sidecar)
    monkeypatch.setattr(box._incidents, "close_all", broken_later)
    box._put(box._end_all)
    await run_for_a_moment(box.run)


async def host_of_incident(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    box = incident_box(sidecar)
    monkeypatch.setattr(box, "_read_host", broken_later)
    assert (await box._with_host(evidence("died"))).host is None


async def diagnosis(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosing, "diagnose", broken)
    await sidecar.services.incidents.open_incident(evidence("died"))


async def rule(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "RULES", (book.Rule(broken, frozenset({"incident"})),))
    await sidecar.services.incidents.open_incident(evidence("died"))


async def host_listener(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar.services.host, "listeners", [broken])
    await sidecar.services.host.read()


async def last_minutes(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    box = incident_box(sidecar)
    monkeypatch.setattr(box, "_recorders", SimpleNamespace(last_minutes=broken))
    await box._write(evidence("died"), "instance")


async def proxy(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        unread_bytes = 0
        tick = staticmethod(broken)

    made: Any = sidecar.protocol
    one = made.args[0]
    await one.start()
    one.clients.add(broken_client := Broken())
    one._tick()
    one.clients.discard(broken_client)
    await one.aclose()


async def http(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar.services.incidents, "headlines", broken_later)
    transport = httpx.ASGITransport(sidecar.control, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001") as client:
        assert (await client.get("/memory/incidents")).status_code == 500


# By file and function: the part whose counter moves, and what brings it about.
PROVEN: dict[tuple[str, str], tuple[str, Callable[[Sidecar, pytest.MonkeyPatch], Awaitable[None]]]] = {
    ("process/errors.py", "contained"): ("poller", poller),
    ("watch/poller.py", "_guarded"): ("poller", poller),
    ("watch/poller.py", "_next_read"): ("poller", pace),
    ("watch/poller.py", "publish"): ("poller", listener),
    ("act/governor.py", "run"): ("policy", policy),
    ("watch/shared_devices.py", "run"): ("shared_devices", shared_devices),
    ("growth/watch.py", "run"): ("growth", growth),
    ("host/watch.py", "run"): ("host", host),
    ("host/watch.py", "_read"): ("host", host_listener),
    ("diagnose/rules/book.py", "judged"): ("diagnosis", rule),
    ("diagnose/incidents/watcher.py", "_write"): ("incidents", last_minutes),
    ("diagnose/incidents/watcher.py", "run"): ("incidents", incident_watcher),
    ("diagnose/incidents/watcher.py", "_with_host"): ("incidents", host_of_incident),
    ("diagnose/incidents/diagnosis.py", "concluded"): ("diagnosis", diagnosis),
    ("gated_proxy/proxy.py", "_tick"): ("proxy", proxy),
    ("http/problems.py", "unexpected"): ("http", http),
}


def shown(sidecar: Sidecar) -> dict[str, float]:
    """What a scrape shows, by part."""
    lines = sidecar.services.exporter.page().decode().splitlines()
    prefix = 'highwater_internal_errors_total{part="'
    found = [line.removeprefix(prefix).split('"} ') for line in lines if line.startswith(prefix)]
    return {part: float(value) for part, value in found}


@pytest.mark.parametrize("where", PROVEN, ids=":".join)
async def test_a_fault_moves_its_counter(where, monkeypatch):
    part, bring_about = PROVEN[where]
    sidecar = create_app(Settings(admin_token="s3cret-of-a-test"), transport=FakeEngine().transport())
    before = shown(sidecar)
    assert before == dict.fromkeys(InternalErrors().counts, 0.0)
    await bring_about(sidecar, monkeypatch)
    assert shown(sidecar) == before | {part: 1.0}
