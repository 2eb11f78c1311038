"""Admission: who passes, who waits, who is shed; and that nobody is lost or counted twice."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.gate import REOPEN_SECONDS, STEP_SECONDS, Gate, Shed


async def settle() -> None:
    """Let everybody run who can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_open_gate_only_counts():
    """In, out, and the moment of the last one's end."""
    now = [100.0]
    gate = Gate(clock=lambda: now[0])
    await gate.enter()
    await gate.enter()
    gate.leave()
    now[0] = 105.0
    gate.leave()
    assert (gate.in_flight, gate.held, gate.is_open, gate.idle_since) == (0, 0, True, 105.0)


async def test_a_closed_gate_holds_and_then_lets_through():
    """Those inside go on; those outside wait, and all pass when it opens."""
    gate = Gate()
    await gate.enter()
    async with gate.closed(10):
        waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
        await settle()
        assert (gate.in_flight, gate.held) == (1, 3)
        gate.leave()
        await gate.drained()
        assert not any(task.done() for task in waiting)
    await asyncio.gather(*waiting)
    assert (gate.in_flight, gate.held) == (3, 0)


async def test_those_let_through_count_before_they_run():
    """A gate that closes again at once must wait for them, though not one of them has moved yet."""
    gate = Gate()
    async with gate.closed(10):
        waiting = asyncio.create_task(gate.enter())
        await settle()
    async with gate.closed(10):
        assert gate.in_flight == 1
        drained = asyncio.create_task(gate.drained())
        await settle()
        assert waiting.done()
        assert not drained.done()
        gate.leave()
        await drained


async def test_too_many_are_shed_with_the_time_to_come_back():
    """The rest of the time that the gate was closed for, at least a second."""
    now = [0.0]
    gate = Gate(max_held=1, clock=lambda: now[0])
    async with gate.closed(7.5):
        held = asyncio.create_task(gate.enter())
        await settle()
        now[0] = 2.0
        with pytest.raises(Shed) as caught:
            await gate.enter()
        assert (caught.value.reason, caught.value.retry_after) == ("gate_full", 6)
        now[0] = 60.0
        with pytest.raises(Shed) as caught:
            await gate.enter()
        assert caught.value.retry_after == 1
    await held
    assert gate.in_flight == 1


async def test_whoever_waits_too_long_is_shed_and_not_counted():
    """Its place is free for another."""
    gate = Gate(hold_seconds=0.001, max_held=1)
    async with gate.closed(10):
        with pytest.raises(Shed, match=r"held for 0.001 s") as caught:
            await gate.enter()
        assert (caught.value.reason, gate.held) == ("held_too_long", 0)
    assert gate.in_flight == 0
    await gate.drained()


async def test_whoever_gives_up_while_held_is_not_counted():
    """The client left, the server stops."""
    gate = Gate()
    async with gate.closed(10):
        waiting = asyncio.create_task(gate.enter())
        await settle()
        waiting.cancel()
        await settle()
        assert gate.held == 0
    assert gate.in_flight == 0


async def test_whoever_gives_up_in_the_moment_of_opening_is_not_counted():
    """Let through and cancelled before it could run: its count is taken back."""
    gate = Gate()
    async with gate.closed(10):
        waiting = asyncio.create_task(gate.enter())
        await settle()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (waiting.cancelled(), gate.in_flight) == (True, 0)
    await gate.drained()


@pytest.mark.parametrize("waiting", [3, 250])
async def test_it_can_reopen_one_after_the_other(waiting):
    """In the order in which they came; many of them several at a step, so that it does not take for ever."""
    steps: list[int] = []

    async def step(seconds: float) -> None:
        await settle()
        steps.append(gate.in_flight)

    gate = Gate(sleep=step)
    async with gate.closed(10, reopen_gradually=True):
        tasks = [asyncio.create_task(gate.enter()) for _ in range(waiting)]
        await settle()
    await asyncio.gather(*tasks)
    assert steps[:3] == ([1, 2, 3] if waiting == 3 else [3, 6, 9])
    assert (steps[-1], gate.held, gate.is_open) == (waiting, 0, True)
    assert len(steps) <= REOPEN_SECONDS / STEP_SECONDS


async def test_who_comes_while_it_reopens_joins_the_end():
    """Nobody overtakes those who have waited."""
    gate = Gate()
    late: list[asyncio.Task[None]] = []
    async with gate.closed(10, reopen_gradually=True):
        early = asyncio.create_task(gate.enter())
        await settle()
        asyncio.get_running_loop().call_soon(lambda: late.append(asyncio.create_task(gate.enter())))
    assert early.done()
    await late[0]
    assert (gate.in_flight, gate.held) == (2, 0)


async def test_whoever_is_cancelled_while_it_reopens_lets_all_through():
    """The server stops: nobody stays held."""
    gate = Gate()
    inside = asyncio.Event()

    async def reset() -> None:
        async with gate.closed(10, reopen_gradually=True):
            await inside.wait()

    task = asyncio.create_task(reset())
    await settle()
    waiting = [asyncio.create_task(gate.enter()) for _ in range(5)]
    await settle()
    inside.set()
    await settle()
    task.cancel()
    await asyncio.gather(*waiting)
    assert (gate.in_flight, gate.is_open) == (5, True)


async def test_an_error_inside_opens_the_gate():
    """Whatever happens to the reset."""
    gate = Gate()
    with pytest.raises(RuntimeError):
        async with gate.closed(10):
            raise RuntimeError
    assert gate.is_open


class Crowd(RuleBasedStateMachine):
    """Any order of coming, going, giving up, closing and opening, against a plain count."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.gate = Gate(max_held=4)
        self.closing = None
        self.inside = 0
        self.held: list[asyncio.Task[None]] = []

    def run(self, coroutine) -> None:
        self.loop.run_until_complete(coroutine)

    @rule()
    def come(self) -> None:
        async def come() -> None:
            task = asyncio.create_task(self.gate.enter())
            await settle()
            if task.done() and task.exception() is None:
                self.inside += 1
            elif not task.done():
                self.held.append(task)

        self.run(come())

    @precondition(lambda self: self.inside)
    @rule()
    def go(self) -> None:
        self.gate.leave()
        self.inside -= 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_up(self, data) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1))).cancel()
        self.run(settle())

    @precondition(lambda self: self.closing is None)
    @rule()
    def close(self) -> None:
        self.closing = self.gate.closed(10)
        self.run(self.closing.__aenter__())

    @precondition(lambda self: self.closing is not None)
    @rule(cancelled=st.booleans())
    def open(self, cancelled) -> None:
        async def reopen() -> None:
            await self.closing.__aexit__(None, None, None)
            if cancelled and self.held:
                self.held.pop().cancel()  # let through already, and gone before it could run
            await settle()

        self.run(reopen())
        self.closing = None
        self.inside += len(self.held)
        self.held.clear()

    @invariant()
    def everybody_is_counted_once(self) -> None:
        assert (self.gate.in_flight, self.gate.held) == (self.inside, len(self.held))

    def teardown(self) -> None:
        for task in self.held:
            task.cancel()
        self.run(settle())
        self.loop.close()


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
