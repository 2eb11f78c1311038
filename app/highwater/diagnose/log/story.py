"""A log's story: what the lines of one run of the engine say, and how much of them was understood. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from highwater.diagnose.log.failed_allocation import FailedAllocation, failed_allocations
from highwater.diagnose.log.lines import messages_in, recognized
from highwater.diagnose.log.messages import LogMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotedException:
    """The last exception of a worker or of EngineCore, known or not; ``text`` is its line, cut.

    ``process`` is as the log names it, such as ``Worker_TP0 pid=1037``.
    """

    process: str
    text: str
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStory:
    """A log as far as it is of one run of the engine.

    Attributes:
        lines: The number of lines read; ``understood``: those of vLLM's own form.
        messages: The known messages, causes before consequences.
        failed: Each process's last failed allocation, near the log's end.
        ended_in_order: The engine logged an orderly shutdown.
        problem: Why the log was not read, in one sentence.
    """

    lines: int = 0
    understood: int = 0
    messages: tuple[LogMessage, ...] = ()
    failed: tuple[FailedAllocation, ...] = ()
    exception: QuotedException | None = None
    ended_in_order: bool = False
    problem: str | None = None

    @property
    def was_understood(self) -> bool:
        """True if its silence means something."""
        return self.understood > 0


NO_LOG: Final = LogStory()


def story_of(texts: Iterable[str], problem: str | None = None) -> LogStory:
    """Return the story of the lines of one run."""
    lines = recognized(texts)
    return LogStory(
        lines=len(lines),
        messages=messages_in(lines),
        failed=tuple(failed_allocations(lines)),
        problem=problem,
    )
