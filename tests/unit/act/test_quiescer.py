"""Requests are held for a remedy, or that is refused; and none is held afterwards, whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from highwater.act.quiescer import (
    BYPASS_SECONDS,
    CALL_SECONDS,
    COUNTS_LAG_SECONDS,
    DRAINED_SECONDS,
    GATE_MARGIN_SECONDS,
    CannotQuiesce,
    States,
)
from highwater.process.errors import EngineUnreachable
from highwater.watch.sources import read_load
from tests.fakes.engine import Core, core_on


@pytest.fixture
async def core() -> Core:
    made = core_on("0.32.0")
    await made.tick()
    return made


def quiet(core: Core, states: States | None = None, *, then_pace: bool = False):
    return core.quiescer.quiet(states or States(), then_pace=then_pace)


async def refused(core: Core, why: str | None = None) -> CannotQuiesce:
    """Requests are not held, for that reason, and none is held afterwards."""
    with pytest.raises(CannotQuiesce, match=why) as caught:
        async with quiet(core):
            pytest.fail("nothing was refused")
    assert core.gate.is_open
    return caught.value


async def test_the_gate_waits_for_requests_under_way(core):
    inside = await core.gate.enter()
    core.fake.running = 1

    async def end() -> None:
        core.fake.running = 0
        core.gate.leave(inside)

    task = asyncio.create_task(end())
    async with quiet(core) as quiesced:
        assert (quiesced.by, core.gate.is_open, core.gate.in_flight) == ("gate", False, 0)
    assert core.gate.is_open
    assert quiesced.held_seconds == 0  # on a clock that stands
    await task


async def test_requests_that_do_not_end_are_left_alone(core):
    await core.gate.enter()
    refusal = await refused(core, r"1 request had not ended after 0\.05 s \(gate\.drain_seconds\)")
    assert core.gate.in_flight == 1
    assert refusal.held_seconds == 0  # in vain, on a clock that stands


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
async def test_nobody_is_held_for_what_will_not_end_in_time(core, monkeypatch, is_open_ended, seconds, reason):
    (await core.gate.enter()).is_open_ended = is_open_ended
    core.fake.running = 1
    await core.tick(seconds)
    monkeypatch.setattr(core.gate, "closed", lambda *_, **__: pytest.fail("requests were held"))
    refusal = await refused(core)
    assert str(refusal).startswith(reason)
    assert refusal.held_seconds is None
    assert core.quiescer.refusal() == str(refusal)


async def test_where_no_request_passes_none_can_be_held(core):
    core.quiescer.impossible = "no request passes here"
    assert str(await refused(core)) == "no request passes here"
    assert core.quiescer.refusal() == "no request passes here"


async def test_requests_that_never_passed_the_gate_forbid_it(core, monkeypatch):
    """Holding ours would prove nothing; said with the numbers."""
    monkeypatch.setattr("highwater.act.quiescer.COUNTS_LAG_SECONDS", 0.0)
    core.fake.running, core.fake.waiting = 2, 1
    await refused(core, "2 requests running and 1 waiting that did not pass through this sidecar")


async def test_what_was_seen_to_bypass_the_gate_is_remembered(core):
    """An engine that is idle right now proves nothing a second after somebody else's request."""
    core.fake.running = 1
    await core.tick(COUNTS_LAG_SECONDS + 1)
    core.fake.running = 0
    await core.tick()
    refusal = await refused(core, "1 s ago the engine had requests that did not pass through this sidecar")
    assert core.quiescer.refusal() == str(refusal)
    await core.tick(BYPASS_SECONDS)
    async with quiet(core) as quiesced:
        assert quiesced.by == "gate"


async def test_the_engines_counts_may_lag_behind_ours(core):
    """A request of ours that has just ended is not somebody else's."""
    inside = await core.gate.enter()
    core.fake.running = 1
    await core.tick(60)
    core.gate.leave(inside)
    await core.tick(COUNTS_LAG_SECONDS / 2)
    core.fake.running = 0
    async with quiet(core) as quiesced:
        assert quiesced.by == "gate"


async def test_an_engine_that_does_not_tell_its_requests_is_not_trusted(core):
    core.fake.mute = True
    await refused(core, "--disable-log-stats")


async def test_an_engine_that_goes_while_requests_are_held_opens_the_gate(core):
    core.fake.down = True
    with pytest.raises(EngineUnreachable):
        async with quiet(core):
            pytest.fail("nothing was refused")
    assert core.gate.is_open


async def test_an_error_inside_opens_the_gate(core):
    with pytest.raises(RuntimeError):
        async with quiet(core):
            raise RuntimeError
    assert core.gate.is_open


async def test_an_engine_that_does_not_tell_in_time_opens_the_gate(core, monkeypatch):
    monkeypatch.setattr("highwater.act.quiescer.DRAINED_SECONDS", 0.01)
    monkeypatch.setattr("highwater.act.quiescer.read_load", lambda _: asyncio.Event().wait())
    await refused(core, "did not report within 0.01 s whether requests run")


async def test_the_states_are_told_one_after_the_other(core, monkeypatch):
    states, seen = States(), []
    inside = await core.gate.enter()
    asyncio.get_running_loop().call_soon(lambda: (seen.append(states.now), core.gate.leave(inside)))

    async def look(engine):
        seen.append(states.now)
        return await read_load(engine)

    monkeypatch.setattr("highwater.act.quiescer.read_load", look)
    async with quiet(core, states):
        seen.append(states.now)
    assert seen == ["closing", "drained", "drained"]


async def test_the_gates_own_deadline_comes_after_those_of_the_states(core, monkeypatch):
    """So that a state that takes too long says so, and the gate's is the last resort."""
    deadlines = []
    closed = core.gate.closed

    def noted(seconds, **options):
        deadlines.append(seconds)
        return closed(seconds, **options)

    monkeypatch.setattr(core.gate, "closed", noted)
    async with quiet(core):
        pass
    assert deadlines == [pytest.approx(0.05 + DRAINED_SECONDS + CALL_SECONDS + GATE_MARGIN_SECONDS)]
