"""A sleep, and a wake-up that failed: what it needs, what is free, and what others took meanwhile. Pure.

A sleeping engine has no claim on what it gave back to the device. It lives on when it cannot take it again, so that no
incident opens: this becomes an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from highwater.diagnose.case import NOTABLE_BYTES
from highwater.diagnose.finding import Finding, finding
from highwater.diagnose.log.messages import KNOWN, LogMessage
from highwater.diagnose.log.story import LogStory
from highwater.diagnose.rules.words import names_memory
from highwater.readings.rank import RankReading


class _Need(NamedTuple):
    rank: str
    bytes: int
    free_bytes: int
    taken_bytes: int | None  # by others, since the engine fell asleep


@dataclass(slots=True)
class Sleep:
    """The readings around the last time that the engine fell asleep: the last one before, and the first one after."""

    before: tuple[RankReading, ...] = ()
    after: tuple[RankReading, ...] = ()

    def note(self, ranks: tuple[RankReading, ...]) -> None:
        if not any(rank.asleep_tags for rank in ranks):
            self.before, self.after = ranks, ()
        elif not self.after:
            self.after = ranks


def wake_up_failed(messages: Iterable[LogMessage], now: Sequence[RankReading], sleep: Sleep) -> Finding | None:
    heard = LogStory(messages=tuple(messages))
    is_short = names_memory(heard, "device")
    if not is_short and all(message.name != "wake_up_failed" for message in heard.messages):
        return None
    needs = [need for rank in now if (need := _need(rank, sleep)) is not None]
    worst = max(needs, key=lambda need: need.bytes - need.free_bytes, default=None)
    said = next(known.title for known in KNOWN if known.name == "wake_up_failed")
    return finding("wake_up_failed", is_short=is_short, worst=worst, said=said)


def _need(rank: RankReading, sleep: Sleep) -> _Need | None:
    """Return what a rank's wake-up needs: what the sleep gave back, by its readings before and after."""
    was, fell = (
        next((one for one in ranks if (one.key, one.pid) == (rank.key, rank.pid)), None)
        for ranks in (sleep.before, sleep.after)
    )
    before, after = (None if one is None else one.used_bytes for one in (was, fell))
    if before is None or after is None or rank.used_bytes is None or rank.free_bytes is None:
        return None
    taken = rank.used_bytes - after
    return _Need(rank.name, before - after, rank.free_bytes, taken if taken > NOTABLE_BYTES else None)
