"""A log's story: what the lines of one run of the engine say, and how much of them was understood. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from highwater.diagnose.log.failed_allocation import FailedAllocation, FailedAllocations, Moment
from highwater.diagnose.log.last_words import LastWords, QuotedException
from highwater.diagnose.log.lines import LogMatches, RecognizedLine, recognized
from highwater.diagnose.log.messages import LogMessage
from highwater.diagnose.log.reader import Reader


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


class StoryTold:
    """The story of lines that come one after another; how many there are costs no memory."""

    def __init__(self) -> None:
        self._lines = self._understood = 0
        self._matches, self._failed, self._words = LogMatches(), FailedAllocations(), LastWords()
        self._end = Moment()

    def add(self, text: str, lines: Iterable[RecognizedLine]) -> None:
        """Take the next line of the log, with the lines in it."""
        lines = tuple(lines)
        self._lines += bool(text.strip())
        self._understood += any(found.line.is_form for found in lines)
        self._end = self._end.next(text)
        for found in lines:
            self._matches.add(found.known, found.line)
            self._failed.add(found, self._end)
            self._words.add(found, self._end)

    def story(self, problem: str | None = None) -> LogStory:
        """Return it until now."""
        return LogStory(
            lines=self._lines,
            understood=self._understood,
            messages=self._matches.messages(),
            failed=self._failed.near(self._end),
            exception=self._words.exception,
            ended_in_order=self._words.in_order,
            problem=problem,
        )


def story_of(texts: Iterable[str], problem: str | None = None, *, reader: Reader | None = None) -> LogStory:
    """Return the story of the lines of one run, read as a reader of the same log has learned to."""
    told = StoryTold()
    for text, lines in recognized(texts, reader):
        told.add(text, lines)
    return told.story(problem)
