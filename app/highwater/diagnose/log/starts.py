"""The engine's starts, read from its log: where one begins, whether it got ready, with what it failed.

A start begins with the lines that vLLM writes first, and is over when it logs where it listens. Where the log has
neither (a higher log level, another format), the messages that only a start writes are enough; where vLLM cannot be
imported, an exception that nothing catches.

::

    header ──► under way ──┬── it listens ─────────────────► over, whatever follows is of an engine that ran
                           ├── a known message, and then an end of a process, the next header, or silence ──► failed
                           ├── an exception that nothing catches, or that long silence follows ──► failed
                           └── the next header ────────────► ended without a word, unless it was told to end
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from highwater.diagnose.log.messages import LogText, RecognizedLine, recognized
from highwater.diagnose.log.reader import FollowedLog, LogPosition, Reader, position_of_end, problem_of, read_tail
from highwater.diagnose.log.record import NEAR_SECONDS, LogLine, Moment
from highwater.diagnose.log.story import NO_LOG, LogStory, StoryTold, says_serving, story_of, told_by

# After the message of a process's end the others write theirs; without such a message silence means an end.
LAST_WORDS_SECONDS, SILENCE_SECONDS = 5.0, 30.0
# An exception that was printed and perhaps caught: a start that goes on may be silent for long while it loads.
LONG_SILENCE_SECONDS = 600.0

# What vLLM 0.12 to 0.33 write first, in this order; the logo is the API server's from 0.20 on. The engine core's line
# comes once from each data-parallel engine. The files keep a client's words from being taken for them. From
# 0.33 on it is startup.py (vllm 0.33.0 entrypoints/common/startup.py:18, vllm 0.33.0 entrypoints/common/startup.py:96).
_ENGINE_CORE: Final = 3
_API_SERVER_FILES: Final = re.compile(r"(?:api_server|api_utils|utils|startup)\.py")
_HEADERS: Final = (
    (1, _API_SERVER_FILES, re.compile(r"vLLM (?:API )?server version |.{0,40}█  version ")),
    (2, _API_SERVER_FILES, re.compile(r"non-default args: ")),
    (_ENGINE_CORE, re.compile(r"(?:core|llm_engine)\.py"), re.compile(r"Initializing an? (?:V\d )?LLM engine \(v")),
)
_LOGO: Final = re.compile(r"[\s▀▄█]*$")  # other lines of the logo's record, never of another's, begin a start
_READY_FILE: Final = re.compile(r"(?:api_server|entry|launcher)\.py")
_READY: Final = re.compile(r"Starting vLLM (?:API )?server (?:\d+ )?on ")
_UVICORN_READY: Final = "Application startup complete."
_TRACEBACK: Final = "Traceback (most recent call last):"


def header_of(line: LogLine) -> int | None:
    """Return the number of this line among those that begin a start, counted from 1; ``None`` for other lines."""
    if line.level not in {None, "INFO"} or not _LOGO.match(line.opening or ""):
        return None
    name = (line.file or "").rpartition("/")[2]
    return next((number for number, file, text in _HEADERS if file.fullmatch(name) and text.match(line.message)), None)


def says_ready(line: LogLine) -> bool:
    if line.file is None:
        return line.level == "INFO" and line.message.startswith(_UVICORN_READY)
    is_its = _READY_FILE.fullmatch(line.file.rpartition("/")[2]) and line.opening is None
    return bool(is_its and _READY.match(line.message))


@dataclass(slots=True)
class _Start:
    title: str
    number: int
    header: int
    told: StoryTold
    is_failing: bool = False
    ended_at: float | None = None
    last_at: float = 0.0
    is_reported: bool = False

    @property
    def is_untold(self) -> bool:
        return not self.is_reported and (self.is_failing or (self.header > 0 and self.told.words.stop is None))

    def add(self, text: str, lines: Sequence[RecognizedLine], now: float) -> None:
        self.told.add(text, lines)
        has_ended, self.last_at = self.told.words.is_uncaught, now
        for line, known in lines:
            # Others tell what the start lives on with.
            if known is not None and line.level in {None, "ERROR", "CRITICAL"}:
                self.is_failing = self.is_failing or known.part in {"cause", "end"}
                has_ended = has_ended or known.part == "end"
        if has_ended and self.ended_at is None:
            self.is_failing, self.ended_at = True, now

    def is_over(self, now: float, *, at_once: bool) -> bool:
        if not self.is_failing:  # by a known message, or an exception that nothing caught
            is_last = self.told.words.is_last and self.header > 0
            return is_last and (at_once or now - self.last_at >= LONG_SILENCE_SECONDS)
        has_ended = self.ended_at is not None and now - self.ended_at >= LAST_WORDS_SECONDS
        return at_once or has_ended or now - self.last_at >= SILENCE_SECONDS

    def failed(self) -> FailedStart:
        begin = self.title if Moment().next(self.title).time else f"{self.number} {self.title}"
        digest = hashlib.sha256(begin.encode("utf-8", "replace")).hexdigest()
        return FailedStart(id=digest[:16], story=self.told.story())


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """A start of the engine that failed; its id differs from start to start. ``story`` is of this start alone."""

    id: str
    story: LogStory = NO_LOG


class Starts:
    """Follows starts through the lines of a log. Pure: the time is handed in."""

    def __init__(self, *, may_serve: bool = False, number: int = 0) -> None:
        self.may_serve = may_serve  # the lines may be of an engine that was ready: an exception alone begins no start
        self.number = number  # how many starts began: the first lines of some are alike
        self._open: _Start | None = None
        self._over: list[_Start] = []

    def read(self, text: str, lines: Sequence[RecognizedLine], now: float) -> bool:
        """Take the next line of the log, with the lines in it; return whether a start begins with it."""
        begins = False
        for line, _ in lines:
            header = header_of(line)
            if header is not None and self._is_begun_by(header):
                self._begin(text, header, of_start=header < _ENGINE_CORE)
                begins = True
            elif header is not None and self._open is not None:
                self._open.header = header
            elif says_ready(line):
                self._open, self.may_serve = None, True
            elif self._may_be_first(line, now):
                self._begin(text, 0, of_start=True)
        of_start = any(
            known is not None and known.at_start and not (self.may_serve and line.is_api_servers)
            for line, known in lines
        )
        if self._open is None and of_start:  # what else is known may be of an engine that ran
            self._begin(text, 0, of_start=not self.may_serve)
        if self._open is not None:
            self._open.add(text, lines, now)
        return begins

    def failed(self, now: float, *, at_once: bool = False, only_last: bool = False) -> tuple[FailedStart, ...]:
        """Return the starts that are known to have failed, each once; ``now`` is by the clock of the lines.

        With ``at_once`` what may come after an end is not awaited; with ``only_last`` earlier starts are left out.
        """
        failed, self._over = [] if only_last else self._over, []
        last = self._open
        if last is not None and not last.is_reported and last.is_over(now, at_once=at_once):
            last.is_reported, last.last_at = True, now
            failed.append(last)
        return tuple(start.failed() for start in failed)

    def _begin(self, text: str, header: int, *, of_start: bool) -> None:
        if self._open is not None and self._open.is_untold:
            self._over.append(self._open)
        self.number += 1
        self._open = _Start(text, self.number, header, StoryTold(of_start=of_start))

    def _is_begun_by(self, header: int) -> bool:
        last = self._open
        if last is None or last.header == 0 or last.ended_at is not None or header < last.header:
            return True
        return header == last.header and header != _ENGINE_CORE

    def _may_be_first(self, line: LogLine, now: float) -> bool:
        if self.may_serve or line.file is not None or not line.message.startswith(_TRACEBACK):
            return False
        last = self._open
        return last is None or (last.ended_at is not None and now - last.last_at >= SILENCE_SECONDS)


class EngineLog:
    """The engine's log: starts that failed, and what the engine that ran wrote. Every method may block on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._followed = FollowedLog(path)
        self._starts = Starts()
        self._reader = Reader()
        self._has_looked = False
        self._absent_since: float | None = None
        self.since: LogPosition | None = None  # its end when the engine became ready; earlier lines are of another life

    @property
    def problem(self) -> str | None:
        return problem_of(self._path)

    def begin_life(self) -> None:
        """Forget the log until now: it is of no failed start, and not of this life of the engine."""
        self.since = position_of_end(self._path)
        self._reader.read(self._followed.skip())
        self._starts = Starts(may_serve=True, number=self._starts.number)
        self._has_looked, self._absent_since = True, None

    def look(self, now: float, *, at_once: bool = False) -> tuple[FailedStart, ...]:
        """Return the starts that failed since the last call, while no engine responds; at first only the last one.

        With ``at_once`` lines after an end are not awaited.
        """
        is_first, self._has_looked = not self._has_looked, True
        texts = self._followed.new_lines()
        self._absent_since = now if self._absent_since is None else self._absent_since
        if is_first and texts:  # the end of an engine that this sidecar has not seen, perhaps
            self._starts.may_serve = True
        elif now - self._absent_since >= SILENCE_SECONDS:
            self._starts.may_serve = False
        for text, lines in recognized(texts, self._reader):
            self._starts.read(text, lines, now)
        return self._starts.failed(now, at_once=at_once, only_last=is_first)

    def heard(self, now: float) -> LogStory:
        self._absent_since = None
        lines = list(recognized(self._followed.new_lines(), self._reader))
        for text, found in lines:
            self._starts.read(text, found, now)
        return told_by(lines).story()

    def end(self) -> LogPosition | None:
        return position_of_end(self._path)

    def story(
        self, since: LogPosition | None, until: LogPosition | None = None, *, within: float = NEAR_SECONDS
    ) -> LogStory:
        texts, problem, is_cut = read_tail(self._path, since, until)
        lines = list(recognized(texts, Reader(self._reader)))
        run = of_one_run(lines, begins_ready=since is not None)
        if len(run) < len(lines):  # what the lines of other runs have taught is not of this one
            return story_of((text for text, _ in run), problem, is_cut=is_cut, within=within, reader=self._reader)
        return told_by(run).story(problem, is_cut=is_cut, within=within)

    def close(self) -> None:
        self._followed.close()


def of_one_run(texts: list[LogText], *, begins_ready: bool) -> list[LogText]:
    """Return only the lines of the engine that ran: not of a start after it, nor of an engine before it.

    With ``begins_ready`` the first line was written when the engine was ready.
    """
    starts = Starts()
    runs: list[list[LogText]] = [[]]
    ran = runs[0] if begins_ready else texts  # the last run that got ready; where none is known to, all of them
    for text, lines in texts:
        if starts.read(text, lines, 0.0):
            runs.append([])
        is_ready = any(says_ready(line) for line, _ in lines)
        if is_ready and begins_ready and len(runs) > 1:
            break
        if is_ready:
            ran = runs[-1]
        elif len(runs) > 1 and any(says_serving(line) for line, _ in lines) and begins_ready:
            ran += [each for run in runs[1:] for each in run]  # a client's words: the same engine goes on to serve
            runs = [ran]
        runs[-1].append((text, lines))
    return ran
