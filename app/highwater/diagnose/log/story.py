"""A log's story: what the lines of one run of the engine say, and how much of them was understood. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from highwater.diagnose.log.failed_allocation import FailedAllocation, FailedAllocations, Moment
from highwater.diagnose.log.last_words import LastWords, QuotedException
from highwater.diagnose.log.lines import LogMatches, RecognizedLine, recognized
from highwater.diagnose.log.messages import LogMessage, may_be_of_memory
from highwater.diagnose.log.reader import Reader

_ONE_OF: Final = 10  # lines of an understood log is a record of vLLM's, requests and tracebacks aside


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStory:
    """A log as far as it is of one run of the engine.

    Attributes:
        lines: The number of lines read; ``understood``: vLLM's own records; ``foreign``: those of nobody knows whom.
        doubtful: Those without a known message whose words may be of memory, in a form that is not vLLM's.
        messages: The known messages, causes before consequences.
        failed: Each process's last failed allocation, near the log's end.
        ended_in_order: The engine logged an orderly shutdown.
        problem: Why the log was not read, in one sentence.
    """

    lines: int = 0
    understood: int = 0
    foreign: int = 0
    doubtful: int = 0
    messages: tuple[LogMessage, ...] = ()
    failed: tuple[FailedAllocation, ...] = ()
    exception: QuotedException | None = None
    ended_in_order: bool = False
    problem: str | None = None

    @property
    def was_understood(self) -> bool:
        """True if its silence means something."""
        is_vllms = 0 < self.understood + self.foreign <= self.understood * _ONE_OF
        return is_vllms and self.doubtful == 0 and self.problem is None


NO_LOG: Final = LogStory()


class StoryTold:
    """The story of lines that come one after another; how many there are costs no memory.

    With ``of_start`` no client has spoken yet; ``words`` are those of the processes' ends until now.
    """

    def __init__(self, *, of_start: bool = False) -> None:
        self._of_start = of_start
        self._lines = self._understood = self._foreign = self._doubtful = 0
        self._matches, self._failed, self.words = LogMatches(), FailedAllocations(), LastWords(of_start=of_start)
        self._end = Moment()

    def add(self, text: str, lines: Iterable[RecognizedLine]) -> None:
        """Take the next line of the log, with the lines in it."""
        lines = tuple(map(self._believed, lines))
        self._lines += bool(text.strip())
        loose = [found for found in lines if found.line.is_loose]
        is_record = any(line.file or (line.process and not line.is_api_servers) for line, _ in lines)
        self._understood += is_record
        self._foreign += bool(loose) and not is_record
        self._doubtful += any(known is None and may_be_of_memory(line.message) for line, known in loose)
        self._end = self._end.next(text, (found.line for found in lines))
        for found in lines:
            self._matches.add(found.known, found.line)
            self._failed.add(found, self._end)
            self.words.add(found, self._end)

    def _believed(self, found: RecognizedLine) -> RecognizedLine:
        """Return a line without a message of a start that a serving API server did not write: it is a client's."""
        is_clients = found.known is not None and found.known.at_start and found.line.is_api_servers
        return found._replace(known=None) if is_clients and not self._of_start else found

    def story(self, problem: str | None = None) -> LogStory:
        """Return it until now."""
        return LogStory(
            lines=self._lines,
            understood=self._understood,
            foreign=self._foreign,
            doubtful=self._doubtful,
            messages=self._matches.messages(),
            failed=self._failed.near(self._end),
            exception=self.words.exception(self._end),
            ended_in_order=self.words.in_order,
            problem=problem,
        )


def story_of(texts: Iterable[str], problem: str | None = None, *, reader: Reader | None = None) -> LogStory:
    """Return the story of the lines of one run, read as a reader of the same log has learned to."""
    told = StoryTold()
    for text, lines in recognized(texts, Reader(reader)):
        told.add(text, lines)
    return told.story(problem)
