"""A log's story: what the lines of one run of the engine say, and how much of them was understood. Pure.

Its last words are the exception nearest to the cause, and an orderly end. Once it listens, exceptions of the API server
are never among them: clients' words stand there. Those that only follow from another process's are shown where there is
nothing else, and so is one that is announced and then missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from highwater.diagnose.log.messages import (
    FailedAllocation,
    FailedAllocations,
    LogMatches,
    LogMessage,
    LogText,
    RecognizedLine,
    WhichMemory,
    may_be_of_memory,
    quoted,
    recognized,
)
from highwater.diagnose.log.reader import Reader
from highwater.diagnose.log.record import API_SERVER, MAX_LINE_LENGTH, NEAR_LINES, NEAR_SECONDS, LogLine, Moment
from highwater.process.untrusted import plain

# --- the last words of the engine's processes ---

_MAX_PROCESSES: Final = 64
_TRACEBACK: Final = re.compile(r"(?:.{0,200}: )?Traceback \(most recent call last\):\s*$")
_CHAINED: Final = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_NAMED: Final = re.compile(
    r"(?:\w{1,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception|Failure|Timeout|Abort|Died)(?:\(\w{1,80}\))?(?::\s|\(['\"]|$)"
)
_ANY_NAME: Final = re.compile(r"(?:\w{1,80}\.){0,8}[A-Za-z_]\w{0,80}(?::\s|$)")
_ENDS: Final = re.compile(r"(?:SystemExit|KeyboardInterrupt|(?:\w+\.)*CancelledError)\b")
_OF_ENGINE: Final = re.compile(r"(?i).{0,40}(?:worker|engine|core)")
# Python's name of a process, before the traceback that ended it (multiprocessing/process.py).
_PROCESS: Final = re.compile(r"Process (\S{1,60}):\s*$")
_API_SERVERS_FRAME: Final = re.compile(
    r'\s*File ".{0,400}(?:/vllm/entrypoints/|/uvicorn/|/starlette/|/fastapi/|/async_llm\.py|/core_client\.py)'
)
# The first frame of a traceback that nothing caught: a script's (not a library's, which may print what it caught as it
# is imported), runpy's, or that of a process that Python started.
_OUTERMOST: Final = re.compile(
    r'\s*File "(?:(?!.{0,300}(?:site|dist)-packages/(?!vllm/entrypoints/)).{0,400}", line \d{1,9}, in <module>'
    r'|.{0,400}", line \d{1,9}, in (?:_run_module_as_main|_bootstrap))\s*$'
)
# How C++, Python's faulthandler, shells and UCX say that a process was aborted, each a line of its own.
_ABORTS: Final = re.compile(
    r"(?:terminate called (?:after throwing|without an active)|Fatal Python error: |!{3,9} Segfault encountered"
    r"|(?:\S{1,80}: (?:line \d{1,6}: +\d{1,9} )?)?(?:Segmentation fault|Aborted) {1,20}\(core dumped\)"
    r"|Segmentation fault\b|\[\S{1,80}\] Caught signal \d{1,2} )"
)
_WHAT: Final = re.compile(r"\s*what\(\): +(?=\S)")
# Before an exception in the same process: vLLM 0.32.0 v1/executor/multiproc_executor.py:953 and 1063,
# v1/engine/core.py:1510; up to 0.10 worker_base.py.
_ANNOUNCES: Final = re.compile(
    r"WorkerProc (?:hit an exception|failed)|EngineCore (?:encountered a fatal error|failed to start|hit an exception)"
    r"|Error executing method "
)
# They follow from another process's end.
_FOLLOWS: Final = re.compile(
    r"[\w.]*(?:EngineDeadError|ActorDiedError|RayActorError|RayTaskError|BrokenPipeError|EOFError|ConnectionResetError)\b"
    r"|[\w.]+: .{0,200}(?:remote process exited or there was a network error|ncclRemoteError|Connection closed by peer)"
    r"|\w+: (?:Engine core initialization failed|WorkerProc (?:initialization failed|failed to start)|Executor failed"
    r"|cancelled|Worker failed with error|Engine process failed to start|Worker \d+ failed to initialize)"
)
_QUOTE_ENDS: Final = re.compile(r"""['"]?, please check the stack trace above.*""")

# By SIGTERM, Ctrl-C or a planned stop. vLLM 0.32.0 entrypoints/launchers/launcher.py:254, v1/engine/core.py:1455 and
# 1636, entrypoints/launchers/grpc_server.py:151, dp_supervisor.py:390; up to 0.2x
# launcher.py's "Shutting down FastAPI HTTP server."; uvicorn 0.3x server.py, lifespan/on.py.
_STOPS_FILE: Final = re.compile(r"(?:launcher|core|grpc_server|dp_supervisor|utils|serve|api_server)\.py")
_STOPS: Final = re.compile(
    r"\[shutdown\] (?:API server|EngineCore): |Shutting down (?:FastAPI HTTP|vLLM gRPC) server"
    r"|Received (?:shutdown signal|KeyboardInterrupt, shutting)|Shutdown complete\b|DPSupervisor received \w+, shutting"
    r"|Waiting up to \d+ seconds for processes to exit"
)
_UVICORN_STOPS: Final = re.compile(
    r"(?:Shutting down|Application shutdown complete\.|Finished server process \[\d+\])\s*$"
)


# The server closes and accepts no more requests: launcher.py's line of all versions, and uvicorn's.
_CLOSES: Final = re.compile(
    r"(?:\[shutdown\] API server: s|S)hutting down (?:FastAPI HTTP|vLLM gRPC) server|Shutting down\s*$"
)
_ACCESS: Final = re.compile(r'\S{1,80} - "[A-Z]{3,8} ')


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotedException:
    """The exception of a process of the engine that is nearest to the cause, known or not."""

    process: str  # as the log names it, such as `Worker_TP0 pid=1037`; empty where it does not
    text: str  # its line, cut; empty where the log does not show it
    pid: int | None = None
    follows: bool = False  # it only follows from another process's end
    before: str = ""  # how long before the log's end; empty where it stands near it


def says_stop(line: LogLine) -> bool:
    if line.file is None:
        return line.level == "INFO" and line.is_api_servers and _UVICORN_STOPS.match(line.message) is not None
    is_its = _STOPS_FILE.fullmatch(line.file.rpartition("/")[2]) and line.opening is None
    return bool(is_its and _STOPS.match(line.message))


def says_serving(line: LogLine) -> bool:
    if line.file is None:
        return line.level == "INFO" and line.is_api_servers and _ACCESS.match(line.message) is not None
    return line.file.endswith("loggers.py") and line.message.startswith("Engine ")


class LastWords:
    """The exceptions among lines that come one after another, and whether the end was orderly.

    With ``of_start`` the lines are of an API server that does not listen yet: no client's words are in its exceptions.
    """

    def __init__(self, *, of_start: bool = False) -> None:
        self._of_start = of_start
        # By process: the exception's line is to come. Whether nothing caught it; ``None`` until the first frame.
        self._tracebacks: dict[str, bool | None] = {}
        # A traceback without a process: whose it is, and whether the next one is chained to it.
        self._bare, self._is_servers, self._goes_on = "", False, False
        self._found: dict[str, QuotedException] = {}
        self._announced: dict[str, QuotedException] = {}
        self._following: QuotedException | None = None
        self._last = Moment()
        self._cause: Moment | None = None
        self._has_failed = self._has_raised = False
        # Whether it fails, and whether a stop came first: the API server then reports the engine's end as a failure.
        self._is_failing = self._was_told = False
        self._closed = -NEAR_LINES  # the number of the line at which the server closed
        # When it was last told to end in order; requests served afterwards cancel it, except those still in flight when
        # the server closed.
        self.stop: Moment | None = None
        self.is_uncaught = False  # a process ended with an exception that nothing caught
        self.is_last = False  # an exception that no record printed is the last word; perhaps nothing caught it

    def exception(self, end: Moment) -> QuotedException | None:
        """Return the last exception of the process that failed first, as it stands in a log that ends there."""
        others = [*self._announced.values(), *filter(None, [self._following])]
        others.sort(key=lambda one: one.follows or not one.text)  # what it quotes comes first
        found = next(iter([*self._found.values(), *others]), None)
        return found if found is None or self._last.is_near(end) else replace(found, before=self._last.before(end))

    def add(self, found: RecognizedLine, at: Moment) -> None:
        line, self._last = found.line, self._last.settled(at)
        part = None if found.known is None else found.known.part
        self._has_failed, self._cause = self._has_failed or part == "end", at if part == "cause" else self._cause
        has_failed = self._has_failed or (self._has_raised and self._last.is_near(at))
        has_failed = has_failed or (self._cause is not None and not self._cause.is_old(at))
        if has_failed and not self._is_failing:
            self._was_told = self.stop is not None and not self.stop.is_old(at)
        self._is_failing = has_failed
        if says_stop(line):
            if self._was_told or not self._is_failing:
                # A client's words may be printed as uvicorn's line is; not as a record of vLLM's before it, too.
                if _CLOSES.match(line.message) and (self.stop is not None or line.file is not None):
                    self._closed = at.number
                self.stop = at
        elif says_serving(line) and (line.file is not None or at.number - self._closed >= NEAR_LINES):
            self.stop, self._closed = None, -NEAR_LINES
        self.is_last = self.is_last and not (line.file or line.level)
        process = self._process_of(line)
        if process is None:
            return
        if _ANNOUNCES.match(line.message) and line.level == "ERROR":
            self._begin(at)
            self._has_failed = True
            if len(self._announced) < _MAX_PROCESSES:
                self._announced[process] = QuotedException(process=self._writer(line), text="", pid=line.pid)
        elif _ABORTS.match(line.message) or _WHAT.match(line.message) or self._is_exception(process, line):
            self._note(process, line, at)

    def _process_of(self, line: LogLine) -> str | None:
        """Return whose exception a line may be: nobody's where it is a serving API server's, or is no error."""
        is_starting = self._of_start and line.is_api_servers
        if (
            line.is_clients
            or (line.is_api_servers and not is_starting)
            or line.level not in (None, "ERROR", "CRITICAL")
        ):
            return None
        if line.process is not None:
            return line.process if is_starting or _OF_ENGINE.match(line.process) else None
        if line.file is not None:
            return line.file
        # A traceback without a process: the API server's, by its frames.
        if named := _PROCESS.match(line.message):
            self._bare, self._is_servers, self._goes_on = named[1], named[1].startswith("Api"), True
        elif _TRACEBACK.match(line.message):
            if not self._goes_on:
                self._bare, self._is_servers = "", False
            self._goes_on = False
        elif _API_SERVERS_FRAME.match(line.message):
            self._is_servers = True
        elif _CHAINED.match(line.message):
            self._goes_on = True
        return self._bare

    def _writer(self, line: LogLine) -> str:
        return line.process or ("" if line.file else API_SERVER if self._is_servers else self._bare)

    def _is_exception(self, process: str, line: LogLine) -> bool:
        message = line.message
        if _TRACEBACK.match(message):
            if len(self._tracebacks) < _MAX_PROCESSES:
                self._tracebacks[process] = None
            return False
        if not message or message[0].isspace() or _CHAINED.match(message):
            if message and self._tracebacks.get(process, False) is None:
                self._tracebacks[process] = line.file is None and _OUTERMOST.match(message) is not None
            return False
        is_awaited = process in self._tracebacks
        is_uncaught = bool(self._tracebacks.pop(process, False))
        if not (is_awaited or line.is_form):
            return False
        if _ENDS.match(message):
            if self._of_start and is_uncaught and not (self._has_failed or self._cause):
                self.stop = self._last
            return False
        self.is_uncaught = self.is_uncaught or is_uncaught
        if not line.is_form and self._is_servers:  # the API server's own end takes EngineCore's with it
            self.stop, self._has_failed, self._was_told = None, True, False
            return self._of_start
        return (_ANY_NAME if is_awaited else _NAMED).match(message) is not None or quoted(line) is not None

    def _note(self, process: str, line: LogLine, at: Moment) -> None:
        inner = quoted(line)
        text = _WHAT.sub("", line.message, 1) if inner is None else _QUOTE_ENDS.sub("", inner)
        follows = _FOLLOWS.match(line.message) is not None and (inner is None or _FOLLOWS.match(inner) is not None)
        exception = QuotedException(
            process=self._writer(line), text=plain(text, MAX_LINE_LENGTH), pid=line.pid, follows=follows
        )
        self._begin(at)
        self._announced.pop(process, None)
        self._has_raised, self.is_last = True, line.file is None
        if _FOLLOWS.match(line.message):
            if self._following is None or not follows:
                self._following = exception
        elif process in self._found or len(self._found) < _MAX_PROCESSES:
            self._found[process] = exception

    def _begin(self, at: Moment) -> None:
        """Note when an exception was written. One that its process survived is not among the last words."""
        if not self._last.is_near(at):
            self._found, self._announced, self._following = {}, {}, None
        self._last = at


# --- the whole story ---

_GIVES_POOL: Final = re.compile(r"non-default args: .*'kv_cache_memory_bytes': (?!None)")
_ONE_OF: Final = 10  # lines of an understood log is a record of vLLM's, requests and tracebacks aside


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStory:
    """A log as far as it is of one run of the engine."""

    lines: int = 0  # the number of lines read; `understood`: vLLM's own records; `foreign`: those of nobody knows whom
    understood: int = 0
    foreign: int = 0
    doubtful: int = 0  # those without a known message whose words may be of memory, in a form that is not vLLM's
    # The known messages, causes before consequences; `older`: those that the engine lived on with.
    messages: tuple[LogMessage, ...] = ()
    older: tuple[LogMessage, ...] = ()
    failed: tuple[FailedAllocation, ...] = ()  # each process's last failed allocation, near the log's end
    exception: QuotedException | None = None
    ended_in_order: bool = False  # the engine logged an orderly shutdown
    problem: str | None = None  # why the log was not read, in one sentence
    is_cut: bool = False  # what stands before the lines read may be the last words, too: it is not known to be old
    gives_pool: bool = False  # the engine was started with `--kv-cache-memory-bytes`

    @property
    def was_understood(self) -> bool:
        """True if its silence means something."""
        is_vllms = 0 < self.understood + self.foreign <= self.understood * _ONE_OF
        return is_vllms and self.doubtful == 0 and self.problem is None and not self.is_cut

    @property
    def is_silent(self) -> bool:
        """True if it was read and understood, and has no word, nor lacks one, that may be of memory."""
        raised = "nothing" if self.exception is None else self.exception.text
        is_heard = self.was_understood and raised != "" and not may_be_of_memory(raised)
        return is_heard and not self.names_memory() and not self.failed

    @property
    def unheard(self) -> str:
        """Why its silence means nothing; empty where it does."""
        if self.was_understood:
            return ""
        if self.is_cut:
            return f"only the last {self.lines:,} lines of the engine's log were read, all of its last minute"
        if self.problem is not None or self.lines == 0:
            return f"what the engine's log says is not known{'' if self.problem else ': it has no line of this run'}"
        known, wholly = self.understood or "none", " wholly" if self.understood else ""
        doubts = f", {self.doubtful} of another may be of memory" if self.doubtful else ""
        return f"the engine's log was not{wholly} understood: {self.lines:,} lines, {known} of vLLM's form{doubts}"

    @property
    def cause(self) -> LogMessage | None:
        return next((message for message in self.messages if message.part == "cause"), None)

    def names_memory(self, which: WhichMemory | None = None) -> bool:
        found = {message.known.of_memory for message in self.messages if message.known is not None} - {None}
        return which in found if which is not None else bool(found)


NO_LOG: Final = LogStory()


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
