"""Events of a situation's script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.situations.device import MIB
from tests.situations.engine import Traffic
from tests.situations.situation import Event, Stage


def traffic(**how: Any) -> Event:
    wanted = Traffic(**how)

    def event(stage: Stage) -> None:
        stage.engine.traffic = wanted

    return event


def no_traffic(stage: Stage) -> None:
    stage.engine.traffic = None


def neighbours(nbytes: int, rank: int = 0) -> Event:
    """Other processes hold so much of a rank's card from now on, or what is left of it."""

    def event(stage: Stage) -> None:
        card = stage.engine.cards[rank]
        card.neighbours = min(nbytes, card.neighbours + max(0, card.free - MIB))

    return event


def clients(*sides: int, number: int, every: float = 1.0) -> Event:
    """So many clients send images of these sides through the sidecar from now on, and another one texts."""

    def event(stage: Stage) -> None:
        assert stage.clients is not None
        stage.clients.send(sides, clients=number, every=every)
        stage.clients.write()

    return event


def end_engine(stage: Stage) -> None:
    stage.engine.end()


def sleep(stage: Stage) -> None:
    stage.engine.sleep()


def wake_up(*tags: str) -> Event:
    """These pools are mapped again; none named: all."""

    def event(stage: Stage) -> None:
        stage.engine.wake_up(list(tags) or None)

    return event


def silence(rank: int, *, is_silent: bool) -> Event:
    def event(stage: Stage) -> None:
        stage.engine.workers[rank].is_silent = is_silent

    return event


def set_clock(seconds: float) -> Event:
    def event(stage: Stage) -> None:
        stage.set_wall_clock(seconds)

    return event


def long_step(seconds: float) -> Event:
    """A step that takes so long: no worker answers meanwhile."""

    def event(stage: Stage) -> None:
        stage.engine.stuck_until = stage.engine.clock() + seconds

    return event


def quirk(**how: Any) -> Event:
    """The engine is odd from now on."""

    def event(stage: Stage) -> None:
        for name, value in how.items():
            setattr(stage.engine.quirks, name, value)

    return event


def no_snapshot(stage: Stage) -> None:
    """Take the segments' statistics away from this torch."""
    setattr(stage.engine.torch.device_module, "memory_snapshot", None)  # noqa: B010 - a method of the class


def claims(op: str, key: str, value: object) -> Callable[[str, dict[str, Any]], None]:
    """A worker that says this, whatever is true."""

    def tamper(asked: str, answer: dict[str, Any]) -> None:
        if asked == op:
            answer[key] = value

    return tamper
