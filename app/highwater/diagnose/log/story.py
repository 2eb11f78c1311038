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
        is_cut: What stands before the lines read may be the last words, too: it is not known to be old.
    """

    lines: int = 0
    understood: int = 0
    messages: tuple[LogMessage, ...] = ()
    failed: tuple[FailedAllocation, ...] = ()
    exception: QuotedException | None = None
    ended_in_order: bool = False
    problem: str | None = None
    is_cut: bool = False

    @property
    def was_understood(self) -> bool:
        """True if its silence means something."""
        return self.understood > 0 and not self.is_cut


NO_LOG: Final = LogStory()


class StoryTold:
    """The story of lines that come one after another; how many there are costs no memory.

    With ``of_start`` no client has spoken yet; ``words`` are those of the processes' ends until now.
    """

    def __init__(self, *, of_start: bool = False) -> None:
        self._of_start = of_start
        self._lines = self._understood = 0
        self._matches, self._failed, self.words = LogMatches(), FailedAllocations(), LastWords(of_start=of_start)
        self._begin = self._end = Moment()

    def add(self, text: str, lines: Iterable[RecognizedLine]) -> None:
        """Take the next line of the log, with the lines in it."""
        lines = tuple(map(self._believed, lines))
        self._lines += bool(text.strip())
        self._understood += any(found.line.is_form for found in lines)
        self._end = self._end.next(text, (found.line for found in lines))
        self._begin = self._begin if self._begin.time is not None else self._end
        for found in lines:
            self._matches.add(found.known, found.line)
            self._failed.add(found, self._end)
            self.words.add(found, self._end)

    def _believed(self, found: RecognizedLine) -> RecognizedLine:
        """Return a line without a message of a start that a serving API server did not write: it is a client's."""
        is_clients = found.known is not None and found.known.at_start and found.line.is_api_servers
        return found._replace(known=None) if is_clients and not self._of_start else found

    def story(self, problem: str | None = None, *, is_cut: bool = False) -> LogStory:
        """Return it until now; ``is_cut``: lines before the first one are missing."""
        return LogStory(
            lines=self._lines,
            understood=self._understood,
            messages=self._matches.messages(),
            failed=self._failed.near(self._end),
            exception=self.words.exception(self._end),
            ended_in_order=self.words.in_order,
            problem=problem,
            is_cut=is_cut and not self._begin.is_old(self._end),
        )


def story_of(
    texts: Iterable[str], problem: str | None = None, *, is_cut: bool = False, reader: Reader | None = None
) -> LogStory:
    """Return the story of the lines of one run, read as a reader of the same log has learned to."""
    told = StoryTold()
    for text, lines in recognized(texts, Reader(reader)):
        told.add(text, lines)
    return told.story(problem, is_cut=is_cut)
