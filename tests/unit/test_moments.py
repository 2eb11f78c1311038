"""Moments: made, refused, and ended whatever happens."""

from __future__ import annotations

import asyncio
import json

import pytest

from app.errors import EngineUnreachable
from app.moments import BYPASS_SECONDS, SETTLE_SECONDS, Moments, NoMoment
from app.pause import Pause
from app.state_file import StateFile
from tests.fakes.engine import Core, core_on


@pytest.fixture
def state_file(tmp_path):
    return tmp_path / "state.json"


async def core_with(version: str = "0.32.0", **knobs) -> tuple[Core, Moments]:
    core = core_on(version, **knobs)
    await core.tick()
    return core, core.relief._moments


def when(core: Core, moments: Moments, need="idle path"):
    return moments.when(need, core.poller.capabilities)


async def test_nothing_needed_is_no_moment_at_all():
    """The gate stays open, the engine is not asked."""
    core, moments = await core_with()
    asked = len(core.fake.calls)
    async with when(core, moments, "nothing") as made:
        assert (made.kind, core.gate.is_open, len(core.fake.calls)) == ("any", True, asked)
    assert made.held_seconds is None


async def test_the_gate_waits_for_requests_under_way():
    """They end by themselves; then the engine's own counts are asked."""
    core, moments = await core_with()
    inside = await core.gate.enter()
    core.fake.running = 1

    async def end() -> None:
        core.fake.running = 0
        core.gate.leave(inside)

    task = asyncio.create_task(end())
    async with when(core, moments) as made:
        assert (made.kind, core.gate.is_open, core.gate.in_flight) == ("gate", False, 0)
    assert core.gate.is_open
    assert made.held_seconds == 0  # on a clock that stands
    await task


async def test_requests_that_do_not_end_are_left_alone():
    """Refused with their number, open again."""
    core, moments = await core_with()
    await core.gate.enter()
    with pytest.raises(NoMoment, match=r"1 requests were still under way after 0\.05 s \(gate\.drain_seconds\)"):
        async with when(core, moments):
            pytest.fail("there is no moment")
    assert (core.gate.is_open, core.gate.in_flight) == (True, 1)


@pytest.mark.parametrize(
    ("is_open_ended", "seconds", "reason"),
    [
        (
            False,
            42,
            "a request has been under way for 42 s, longer than requests are given to finish (gate.drain_seconds",
        ),
        (True, 0, "1 WebSocket is open, which ends when the client wants"),
    ],
)
async def test_nobody_is_held_for_what_will_not_end_in_time(monkeypatch, is_open_ended, seconds, reason):
    """Refused at once, with what it is and what helps; a session that was opened just now is no better."""
    core, moments = await core_with()
    (await core.gate.enter()).is_open_ended = is_open_ended
    core.fake.running = 1
    await core.tick(seconds)
    monkeypatch.setattr(core.gate, "closed", lambda *_, **__: pytest.fail("requests were held"))
    with pytest.raises(NoMoment) as caught:
        async with when(core, moments):
            pytest.fail("there is no moment")
    assert str(caught.value).startswith(reason)
    assert caught.value.held_seconds is None
    assert f"would be refused now: {reason}" in moments.plan("idle path", core.poller.capabilities)


async def test_a_hold_in_vain_is_told_with_its_length():
    """For the refusal: requests waited, though nothing was done."""
    core, moments = await core_with()
    await core.gate.enter()
    with pytest.raises(NoMoment) as caught:
        async with when(core, moments):
            pytest.fail("there is no moment")
    assert caught.value.held_seconds == 0  # on a clock that stands


async def test_requests_that_never_passed_the_gate_forbid_it(monkeypatch):
    """Holding ours would prove nothing; said with the numbers."""
    monkeypatch.setattr("app.moments.SETTLE_SECONDS", 0.0)
    core, moments = await core_with()
    core.fake.running, core.fake.waiting = 2, 1
    with pytest.raises(NoMoment, match="2 requests running and 1 waiting that are none of this sidecar's"):
        async with when(core, moments):
            pytest.fail("there is no moment")
    assert core.gate.is_open


async def test_what_was_seen_to_bypass_the_gate_is_remembered():
    """An engine that is idle right now proves nothing a second after somebody else's request."""
    core, moments = await core_with()
    core.fake.running = 1
    await core.tick(SETTLE_SECONDS + 1)
    core.fake.running = 0
    await core.tick()
    with pytest.raises(NoMoment, match="1 s ago the engine had requests that are none of this sidecar's"):
        async with when(core, moments):
            pytest.fail("there is no moment")
    await core.tick(BYPASS_SECONDS)
    async with when(core, moments) as made:
        assert made.kind == "gate"


async def test_the_engines_counts_may_lag_behind_ours():
    """A request of ours that has just ended is not somebody else's."""
    core, moments = await core_with()
    inside = await core.gate.enter()
    core.fake.running = 1
    await core.tick(60)
    core.gate.leave(inside)
    await core.tick(SETTLE_SECONDS / 2)
    core.fake.running = 0
    async with when(core, moments) as made:
        assert made.kind == "gate"


async def test_an_engine_that_does_not_tell_its_requests_is_not_trusted():
    """Started with --disable-log-stats: no counts."""
    core, moments = await core_with()
    core.fake.mute = True
    with pytest.raises(NoMoment, match="--disable-log-stats"):
        async with when(core, moments):
            pytest.fail("there is no moment")
    assert core.gate.is_open


async def test_an_engine_that_goes_while_requests_are_held_opens_the_gate():
    """The error is told as it is."""
    core, moments = await core_with()
    core.fake.down = True
    with pytest.raises(EngineUnreachable):
        async with when(core, moments):
            pytest.fail("there is no moment")
    assert core.gate.is_open


async def test_an_error_inside_opens_the_gate():
    """Whatever the reset met."""
    core, moments = await core_with()
    with pytest.raises(RuntimeError):
        async with when(core, moments):
            raise RuntimeError
    assert core.gate.is_open


# --- pausing ---


@pytest.mark.parametrize("version", ["0.12.0", "0.16.0", "0.23.0", "0.32.0"])
async def test_the_engine_is_paused_in_its_dialect_and_resumed(version, state_file):
    """Never a request aborted, never a cache cleared; written down and guarded meanwhile."""
    core, moments = await core_with(version, state_file=state_file)
    async with when(core, moments, "idle engine") as made:
        assert (made.kind, core.fake.paused, core.gate.is_open) == ("pause", True, True)
        assert json.loads(state_file.read_text())["pause"]["engine_url"] == "http://engine:8000"
        assert core.fake.guards[0].armed
    (asked,) = core.fake.asked("/pause")
    assert asked.query == "mode=wait&wait_for_inflight_requests=true&clear_cache=false"
    assert (core.fake.paused, core.fake.aborted, core.fake.guards[0].armed) == (False, 0, False)
    assert "pause" not in json.loads(state_file.read_text())
    assert made.held_seconds is not None


async def test_a_pause_that_takes_too_long_is_undone(state_file):
    """Its requests were still running: refused, and the engine goes on."""
    core, moments = await core_with(state_file=state_file)
    core.fake.running = 1
    with pytest.raises(NoMoment, match=r"still running after 0\.05 s .* the engine was resumed"):
        async with when(core, moments, "idle engine"):
            pytest.fail("there is no moment")
    assert (core.fake.paused, core.fake.aborted, core.fake.running) == (False, 0, 1)
    assert not core.fake.guards[0].armed


async def test_an_engine_that_will_not_pause_is_had_at_the_gate(state_file):
    """It answered with an error: nothing happened."""
    core, moments = await core_with(state_file=state_file)
    core.fake.failing = {"/pause": 500}
    async with when(core, moments, "idle engine") as made:
        assert (made.kind, core.gate.is_open) == ("gate", False)
    assert core.fake.paused is False


async def test_a_pause_that_cannot_be_written_down_is_not_made(state_file, monkeypatch):
    """The disk is full: requests are held here instead."""
    core, moments = await core_with(state_file=state_file)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    async with when(core, moments, "idle engine") as made:
        assert made.kind == "gate"
    assert core.fake.asked("/pause") == []


async def test_a_pause_without_a_guard_is_not_made(state_file):
    """Nor does it stay written down."""
    core, moments = await core_with(state_file=state_file)

    async def no_guard(url: str, seconds: float):
        raise OSError(11, "Resource temporarily unavailable")

    core.pause._arm = no_guard
    async with when(core, moments, "idle engine") as made:
        assert made.kind == "gate"
    assert core.fake.asked("/pause") == []
    assert StateFile(state_file).read("pause") is None


async def test_whoever_is_cancelled_in_a_pause_resumes_first(state_file):
    """The server stops in the middle of a reset."""
    core, moments = await core_with(state_file=state_file)
    inside = asyncio.Event()

    async def reset() -> None:
        async with when(core, moments, "idle engine"):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(reset())
    await inside.wait()
    task.cancel()
    await asyncio.wait({task})
    assert (core.fake.paused, core.fake.guards[0].armed) == (False, False)


@pytest.mark.parametrize("how", ["refused", "gone"])
async def test_an_engine_that_cannot_be_resumed_stays_written_down_and_guarded(state_file, monkeypatch, how):
    """The guard and the next start have the last word; an event says so. One that is gone is not waited for."""
    monkeypatch.setattr("app.pause.RESUME_SECONDS", 0.0 if how == "refused" else 3600.0)
    core, moments = await core_with(state_file=state_file)
    async with when(core, moments, "idle engine"):
        core.fake.failing, core.fake.down = {"/resume": 500}, how == "gone"
    assert (core.fake.guards[0].armed, core.fake.guards[0].took_over) == (True, True)
    assert StateFile(state_file).read("pause") is not None
    assert "may still be paused" in core.summaries("recovery")[0]


async def test_what_an_earlier_sidecar_left_paused_is_resumed_at_start(state_file):
    """An event tells; afterwards there is nothing to do."""
    core, _ = await core_with(state_file=state_file)
    core.fake.paused = True
    StateFile(state_file).write("pause", {"engine_url": core.engine.url, "at": 0})
    successor = Pause(core.engine, StateFile(state_file), core.history, arm=core.fake.arm)
    await successor.recover()
    assert core.fake.paused is False
    assert core.summaries("recovery") == ["resumed the engine: an earlier sidecar ended while it held it paused"]
    await successor.recover()
    assert len(core.fake.asked("/resume")) == 1


async def test_an_engine_that_will_not_resume_is_told_and_not_asked_for_ever(state_file):
    """Another was started in its place, without development mode: it was never paused."""
    core, _ = await core_with(state_file=state_file)
    core.fake.failing = {"/resume": 404}
    StateFile(state_file).write("pause", {"engine_url": core.engine.url, "at": 0})
    await Pause(core.engine, StateFile(state_file), core.history).recover()
    assert "it will not resume: POST /resume answered 404" in core.summaries("recovery")[0]
    assert StateFile(state_file).read("pause") is None


async def test_while_an_earlier_pause_is_undone_requests_are_held_instead(state_file):
    """Nobody waits for an engine that may be long in coming."""
    core, moments = await core_with(state_file=state_file)
    async with core.pause._turn, when(core, moments, "idle engine") as made:
        assert made.kind == "gate"


async def test_another_engines_pause_is_forgotten(state_file):
    """The state file came along to another engine: not ours to resume."""
    core, _ = await core_with(state_file=state_file)
    StateFile(state_file).write("pause", {"engine_url": "http://elsewhere:8000", "at": 0})
    await Pause(core.engine, StateFile(state_file), core.history).recover()
    assert core.fake.asked("/resume") == []
    assert "a pause of another engine (http://elsewhere:8000) was forgotten" in core.summaries("recovery")[0]


async def test_without_a_state_file_nothing_is_paused():
    """Requests are held here."""
    core, moments = await core_with()
    async with when(core, moments, "idle engine") as made:
        assert made.kind == "gate"
    assert core.fake.asked("/pause") == []
