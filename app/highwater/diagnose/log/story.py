"""A log's story: what the lines of one run of the engine say, and how much of them was understood. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from highwater.diagnose.log.failed_allocation import NEAR_SECONDS, FailedAllocation, FailedAllocations, Moment
from highwater.diagnose.log.last_words import LastWords, QuotedException
from highwater.diagnose.log.messages import (
    KnownMessage,
    LogMessage,
    LogText,
    RecognizedLine,
    in_order,
    may_be_of_memory,
    quoted,
    recognized,
)
from highwater.diagnose.log.reader import Reader
from highwater.diagnose.log.record import MAX_LINE_LENGTH, LogLine
from highwater.process.untrusted import plain

# Of one message: the first ones, which are nearest to the cause, and the last one.
FIRST_LINES = 2
_GIVES_POOL: Final = re.compile(r"non-default args: .*'kv_cache_memory_bytes': (?!None)")
_ONE_OF: Final = 10  # lines of an understood log is a record of vLLM's, requests and tracebacks aside


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStory:
    """A log as far as it is of one run of the engine.

    Attributes:
        lines: The number of lines read; ``understood``: vLLM's own records; ``foreign``: those of nobody knows whom.
        doubtful: Those without a known message whose words may be of memory, in a form that is not vLLM's.
        messages: The known messages, causes before consequences; ``older``: those that the engine lived on with.
        failed: Each process's last failed allocation, near the log's end.
        ended_in_order: The engine logged an orderly shutdown.
        problem: Why the log was not read, in one sentence.
        is_cut: What stands before the lines read may be the last words, too: it is not known to be old.
        gives_pool: The engine was started with ``--kv-cache-memory-bytes``.
    """

    lines: int = 0
    understood: int = 0
    foreign: int = 0
    doubtful: int = 0
    messages: tuple[LogMessage, ...] = ()
    older: tuple[LogMessage, ...] = ()
    failed: tuple[FailedAllocation, ...] = ()
    exception: QuotedException | None = None
    ended_in_order: bool = False
    problem: str | None = None
    is_cut: bool = False
    gives_pool: bool = False

    @property
    def was_understood(self) -> bool:
        """True if its silence means something."""
        is_vllms = 0 < self.understood + self.foreign <= self.understood * _ONE_OF
        return is_vllms and self.doubtful == 0 and self.problem is None and not self.is_cut


NO_LOG: Final = LogStory()


def unheard(log: LogStory) -> str:
    if log.was_understood:
        return ""
    if log.is_cut:
        return f"only the last {log.lines:,} lines of the engine's log were read, all of its last minute"
    if log.problem is not None or log.lines == 0:
        return f"what the engine's log says is not known{'' if log.problem else ': it has no line of this run'}"
    known, doubts = log.understood or "none", f", {log.doubtful} of another may be of memory" if log.doubtful else ""
    wholly = " wholly" if log.understood else ""
    return f"the engine's log was not{wholly} understood: {log.lines:,} lines, {known} of vLLM's form{doubts}"


class LogMatches:
    def __init__(self) -> None:
        self._seen: dict[str, LogMessage] = {}
        self._last: dict[str, Moment] = {}  # when each was written last, if not the end of a process
        self._is_untimed = False

    def add(self, known: KnownMessage | None, line: LogLine, at: Moment) -> None:
        if self._is_untimed and at.is_timed:
            self._last = {name: was.settled(at) for name, was in self._last.items()}
            self._is_untimed = False
        if known is None:
            return
        if known.part != "end":
            self._last[known.name], self._is_untimed = at, self._is_untimed or not at.is_timed
        text = plain(line.text, MAX_LINE_LENGTH)
        new = LogMessage(
            name=known.name, title=known.title, meaning=known.meaning, count=0, lines=(), advice=known.advice
        )
        seen = self._seen.get(known.name, new)
        if seen.count and quoted(line) is not None:
            return
        self._seen[known.name] = replace(seen, count=seen.count + line.count, lines=(*seen.lines[:FIRST_LINES], text))

    def messages(self, end: Moment, within: float) -> tuple[tuple[LogMessage, ...], tuple[LogMessage, ...]]:
        """Return what was found, causes before consequences; and apart what the engine lived on with for longer."""
        old = {name: at.before(end) for name, at in self._last.items() if at.is_old(end, within)}
        older = (
            replace(message, title=f"{message.title}, {old[message.name]} before the log's end", advice=())
            for message in in_order(self._seen)
            if message.name in old
        )
        return tuple(message for message in in_order(self._seen) if message.name not in old), tuple(older)


class StoryTold:
    """The story of lines that come one after another; how many there are costs no memory.

    With ``of_start`` no client has spoken yet; ``words`` are those of the processes' ends until now.
    """

    def __init__(self, *, of_start: bool = False) -> None:
        self._of_start = of_start
        self._lines = self._understood = self._foreign = self._doubtful = 0
        self._matches, self._failed, self.words = LogMatches(), FailedAllocations(), LastWords(of_start=of_start)
        self._begin = self._end = Moment()
        self._gives_pool = False

    def add(self, text: str, lines: Iterable[RecognizedLine]) -> None:
        # A message of a start that a serving API server writes is a client's.
        lines = tuple(
            found._replace(known=None)
            if found.known is not None and found.known.at_start and found.line.is_api_servers and not self._of_start
            else found
            for found in lines
        )
        self._lines += bool(text.strip())
        loose = [found for found in lines if found.line.is_loose]
        is_record = any(line.file or (line.process and not line.is_api_servers) for line, _ in lines)
        self._understood += is_record
        self._foreign += bool(loose) and not is_record
        self._doubtful += any(known is None and may_be_of_memory(line.message) for line, known in loose)
        self._end = self._end.next(text, (found.line for found in lines))
        self._begin = self._begin if self._begin.time is not None else self._end
        for found in lines:
            self._gives_pool |= _GIVES_POOL.match(found.line.message) is not None
            self._matches.add(found.known, found.line, self._end)
            self._failed.add(found, self._end)
            self.words.add(found, self._end)

    def story(self, problem: str | None = None, *, is_cut: bool = False, within: float = inf) -> LogStory:
        """Return it until now.

        ``is_cut``: lines before the first one are missing. A message counts for so many seconds (``within``).
        """
        messages, older = self._matches.messages(self._end, within)
        return LogStory(
            lines=self._lines,
            understood=self._understood,
            foreign=self._foreign,
            doubtful=self._doubtful,
            messages=messages,
            older=older,
            failed=self._failed.near(self._end),
            exception=self.words.exception(self._end),
            ended_in_order=self.words.stop is not None and not self.words.stop.is_old(self._end),
            problem=problem,
            is_cut=is_cut and not self._begin.is_old(self._end, within),
            gives_pool=self._gives_pool,
        )


def story_of(
    texts: Iterable[str],
    problem: str | None = None,
    *,
    is_cut: bool = False,
    within: float = NEAR_SECONDS,
    reader: Reader | None = None,
) -> LogStory:
    return told_by(recognized(texts, Reader(reader))).story(problem, is_cut=is_cut, within=within)


def told_by(lines: Iterable[LogText]) -> StoryTold:
    told = StoryTold()
    for text, found in lines:
        told.add(text, found)
    return told
