"""Admission: who passes, who waits, who is shed; and that nobody is lost or counted twice."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gated_proxy.failures import Refused
from gated_proxy.gate import ALONE_SECONDS, PACE_SECONDS, STEP_SECONDS, Admission, Gate


async def settle() -> None:
    """Let everybody run who can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_open_gate_only_counts():
    now = [100.0]
    gate = Gate(clock=lambda: now[0])
    first, second = await gate.enter(), await gate.enter()
    gate.leave(first)
    now[0] = 105.0
    gate.leave(second)
    assert (gate.in_flight, gate.held, gate.is_open, gate.idle_since) == (0, 0, True, 105.0)


async def test_who_does_not_want_to_wait_is_told():
    gate = Gate()
    assert gate.try_enter()
    with gate.closed(10):
        assert not gate.try_enter()
    assert (gate.in_flight, gate.held) == (1, 0)


async def test_a_closed_gate_holds_and_then_lets_through():
    gate = Gate()
    inside = await gate.enter()
    with gate.closed(10):
        waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
        await settle()
        assert (gate.in_flight, gate.held) == (1, 3)
        gate.leave(inside)
        await gate.drained()
        assert not any(task.done() for task in waiting)
    await asyncio.gather(*waiting)
    assert (gate.in_flight, gate.held) == (3, 0)


async def test_those_let_through_count_before_they_run():
    """A gate that closes again at once must wait for them, though not one of them has moved yet."""
    gate = Gate()
    with gate.closed(10):
        waiting = asyncio.create_task(gate.enter())
        await settle()
    with gate.closed(10):
        assert gate.in_flight == 1
        drained = asyncio.create_task(gate.drained())
        await settle()
        assert waiting.done()
        assert not drained.done()
        gate.leave(waiting.result())
        await drained


async def test_too_many_are_shed_with_the_time_to_come_back():
    now = [0.0]
    gate = Gate(max_held=1, clock=lambda: now[0])
    with gate.closed(7.5):
        held = asyncio.create_task(gate.enter())
        await settle()
        now[0] = 2.0
        with pytest.raises(Refused) as caught:
            await gate.enter()
        assert (caught.value.failure.reason, caught.value.failure.retry_after) == ("gate_full", 6)
        now[0] = 60.0
        with pytest.raises(Refused) as caught:
            await gate.enter()
        assert caught.value.failure.retry_after == 1
    await held
    assert gate.in_flight == 1


async def test_a_request_that_waits_too_long_is_shed_and_not_counted():
    gate = Gate(hold_seconds=0.001, max_held=1)
    with gate.closed(10):
        with pytest.raises(Refused, match=r"held for 0.001 s") as caught:
            await gate.enter()
        assert (caught.value.failure.reason, gate.held) == ("held_too_long", 0)
    assert gate.in_flight == 0
    await gate.drained()


async def test_a_client_that_gives_up_while_held_is_not_counted():
    gate = Gate()
    with gate.closed(10):
        waiting = asyncio.create_task(gate.enter())
        await settle()
        waiting.cancel()
        await settle()
        assert gate.held == 0
    assert gate.in_flight == 0


async def test_a_client_that_gives_up_as_the_gate_opens_is_not_counted():
    gate = Gate()
    with gate.closed(10):
        waiting = asyncio.create_task(gate.enter())
        await settle()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (waiting.cancelled(), gate.in_flight) == (True, 0)
    await gate.drained()


async def test_a_client_that_gave_up_costs_nothing_any_more():
    """However many came and left while it is closed: their number is what each new one would have to look through."""
    gate = Gate()
    with gate.closed(10):
        for _ in range(100):
            waiting = asyncio.create_task(gate.enter())
            await settle()
            waiting.cancel()
            await asyncio.wait({waiting})
        stays = asyncio.create_task(gate.enter())
        await settle()
        assert (gate.held, len(gate._waiting)) == (1, 1)
    await stays


async def test_the_oldest_under_way_is_known_with_its_age():
    now = [100.0]
    gate = Gate(clock=lambda: now[0])
    assert gate.oldest_seconds() is None
    first = await gate.enter()
    now[0] = 101.0
    second = gate.try_enter()
    second.is_open_ended = True
    now[0] = 105.0
    assert (gate.oldest_seconds(), gate.open_ended) == (5.0, 1)
    gate.leave(first)
    assert gate.oldest_seconds() == 4.0
    gate.leave(second)
    assert gate.open_ended == 0


async def test_what_the_engine_has_already_counts_though_the_gate_is_closed():
    gate = Gate()
    with gate.closed(10):
        admission = gate.admit()
        assert (gate.in_flight, gate.held) == (1, 0)
        gate.leave(admission)
        await gate.drained()


class Overdue:
    """What the gate has called when it was closed for as long as it may."""

    def __init__(self, seconds, call) -> None:
        self.seconds, self.call = seconds, call

    def cancel(self) -> None:
        self.call = None


class Paces:
    """Time, and the gate's next step in it, that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.next = None
        self.overdue = None
        self.gate = Gate(clock=lambda: self.now, later=self._later)

    def _later(self, seconds, call):
        if seconds != STEP_SECONDS:
            self.overdue = Overdue(seconds, call)
            return self.overdue
        self.next = call
        return self

    def cancel(self) -> None:
        self.next = None

    async def step(self) -> int:
        """One step on; who is inside then."""
        self.now += STEP_SECONDS
        call, self.next = self.next, None
        call()
        await settle()
        return self.gate.in_flight


@pytest.mark.parametrize(("waiting", "inside"), [(40, [1, 2, 3]), (1000, [3, 6, 9])])
async def test_it_can_pace_requests_after_a_closing(waiting, inside):
    """In the order in which they came; many of them several at a step, so that it does not take forever."""
    paces = Paces()
    with paces.gate.closed(10, then_pace=True):
        tasks = [asyncio.create_task(paces.gate.enter()) for _ in range(waiting)]
        await settle()
    assert [paces.gate.in_flight, await paces.step(), await paces.step()] == inside
    while paces.gate.held:
        await paces.step()
    await asyncio.gather(*tasks)
    assert (paces.gate.in_flight, paces.gate.is_open) == (waiting, True)
    assert paces.now <= PACE_SECONDS


async def test_after_a_closing_that_failed_nobody_is_paced():
    gate = Gate()
    with pytest.raises(ValueError, match="refused"), gate.closed(10, then_pace=True):
        raise ValueError("refused")
    assert gate.passes_at_once


async def paced(paces, waiting):
    """So many requests at a gate that has just opened, the first of them admitted."""
    with paces.gate.closed(10, then_pace=True):
        entering = [asyncio.create_task(paces.gate.enter()) for _ in range(waiting)]
        await settle()
    await settle()
    assert paces.gate.in_flight == 1
    return entering


async def test_a_paced_request_waits_until_the_engine_responds_to_the_one_before():
    """Else it could overtake it in the engine's front-end."""
    paces = Paces()
    first, second, third = await paced(paces, 3)
    assert [await paces.step() for _ in range(5)] == [1] * 5
    first.result().has_response = True
    assert [await paces.step() for _ in range(5)] == [2] * 5
    assert (second.done(), third.done()) == (True, False)
    paces.gate.leave(second.result())  # also one that ends without a response
    assert await paces.step() == 2
    assert third.done()


async def test_a_paced_request_does_not_wait_for_ever():
    paces = Paces()
    _, second = await paced(paces, 2)
    while not second.done():
        await paces.step()
    assert paces.now == pytest.approx(ALONE_SECONDS, abs=1.5 * STEP_SECONDS)


async def test_who_comes_while_requests_are_paced_waits_for_a_step():
    paces = Paces()
    with paces.gate.closed(10, then_pace=True):
        pass
    late = asyncio.create_task(paces.gate.enter())
    await settle()
    assert (paces.gate.held, late.done()) == (1, False)
    assert await paces.step() == 1
    while paces.next is not None:
        await paces.step()
    assert paces.now >= PACE_SECONDS
    await paces.gate.enter()
    assert (paces.gate.in_flight, paces.gate.held) == (2, 0)


@pytest.mark.parametrize("max_held", [0, 2])
async def test_nobody_is_turned_away_while_requests_are_paced(max_held):
    paces = Paces()
    paces.gate = Gate(max_held=max_held, clock=lambda: paces.now, later=paces._later)
    with paces.gate.closed(10, then_pace=True):
        pass
    entering = [asyncio.create_task(paces.gate.enter()) for _ in range(5)]
    await settle()
    assert (paces.gate.held, paces.gate.in_flight) == (max_held, 5 - max_held)
    assert [task.done() for task in entering] == [True] * (5 - max_held) + [False] * max_held
    while paces.gate.held:
        await paces.step()
    await asyncio.gather(*entering)


async def test_a_gate_that_closes_while_requests_are_paced_holds_the_rest():
    """And paces them when it opens again, though nobody asks for it then."""
    paces = Paces()
    with paces.gate.closed(10, then_pace=True):
        tasks = [asyncio.create_task(paces.gate.enter()) for _ in range(3)]
        await settle()
    await settle()
    assert paces.gate.in_flight == 1
    tasks[0].result().has_response = True
    with paces.gate.closed(10):
        assert await paces.step() == 1
    await settle()
    assert paces.gate.in_flight == 2
    tasks[1].result().has_response = True
    assert await paces.step() == 3
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("then_pace", [False, True])
async def test_a_gate_that_is_closed_for_too_long_opens_by_itself(then_pace, caplog):
    paces = Paces()
    with paces.gate.closed(10, then_pace=then_pace):
        held = [asyncio.create_task(paces.gate.enter()) for _ in range(2)]
        await settle()
        assert (paces.overdue.seconds, paces.gate.held) == (10, 2)
        paces.overdue.call()
        while paces.next is not None:
            await paces.step()
        await asyncio.gather(*held)
        assert (paces.gate.is_open, paces.gate.passes_at_once, paces.gate.held) == (True, True, 0)
    assert paces.gate.passes_at_once
    assert "requests were held for 10 s, the most that was allowed" in caplog.text


async def test_a_gate_that_opens_in_time_does_not_open_once_more():
    paces = Paces()
    with paces.gate.closed(10):
        assert paces.overdue.call is not None
    assert paces.overdue.call is None


async def test_an_error_inside_opens_the_gate():
    gate = Gate()
    with pytest.raises(RuntimeError), gate.closed(10, then_pace=True):
        raise RuntimeError
    assert gate.is_open


class Crowd(RuleBasedStateMachine):
    """Any order of coming, going, giving up, closing and opening, against a plain count."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.gate = Gate(max_held=4)
        self.closing = None
        self.inside: list[Admission] = []
        self.held: list[asyncio.Task[None]] = []

    def run(self, coroutine) -> None:
        self.loop.run_until_complete(coroutine)

    @rule()
    def come(self) -> None:
        async def come() -> None:
            task = asyncio.create_task(self.gate.enter())
            await settle()
            if task.done() and task.exception() is None:
                self.inside.append(task.result())
            elif not task.done():
                self.held.append(task)

        self.run(come())

    @precondition(lambda self: self.inside)
    @rule()
    def go(self) -> None:
        self.gate.leave(self.inside.pop())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_up(self, data) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1))).cancel()
        self.run(settle())

    @precondition(lambda self: self.closing is None)
    @rule()
    def close(self) -> None:
        async def close() -> None:
            self.closing = self.gate.closed(10)
            self.closing.__enter__()

        self.run(close())

    @precondition(lambda self: self.closing is not None)
    @rule(cancelled=st.booleans())
    def open(self, cancelled) -> None:
        async def reopen() -> None:
            self.closing.__exit__(None, None, None)
            if cancelled and self.held:
                self.held.pop().cancel()  # let through already, and gone before it could run
            await settle()

        self.run(reopen())
        self.closing = None
        self.inside += [task.result() for task in self.held]
        self.held.clear()

    @invariant()
    def everybody_is_counted_once(self) -> None:
        assert (self.gate.in_flight, self.gate.held) == (len(self.inside), len(self.held))

    def teardown(self) -> None:
        for task in self.held:
            task.cancel()
        self.run(settle())
        self.loop.close()


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=30, deadline=None)
