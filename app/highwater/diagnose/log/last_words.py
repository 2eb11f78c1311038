"""The last words of the engine's processes: the exception nearest to the cause, and an orderly end. Pure.

Exceptions of the API server are never among them: clients' words stand there. Those that only follow from another
process's are shown where there is nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from highwater.diagnose.log.failed_allocation import Moment
from highwater.diagnose.log.lines import RecognizedLine, quoted
from highwater.diagnose.log.record import MAX_LINE_LENGTH, LogLine
from highwater.text.printable import plain

_MOST_PROCESSES: Final = 64
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
# They follow from another process's end.
_FOLLOWS: Final = re.compile(
    r"[\w.]*(?:EngineDeadError|ActorDiedError|RayActorError|RayTaskError|BrokenPipeError|EOFError|ConnectionResetError)\b"
    r"|\w+: (?:Engine core initialization failed|WorkerProc (?:initialization failed|failed to start)|Executor failed"
    r"|cancelled|Worker failed with error|Engine process failed to start|Worker \d+ failed to initialize)"
)
_QUOTE_ENDS: Final = re.compile(r"""['"]?, please check the stack trace above.*""")

# By SIGTERM, Ctrl-C or a planned stop. vLLM 0.32.0 entrypoints/launchers/launcher.py:254, v1/engine/core.py:1455 and
# 1636, v1/engine/core_client.py:770, entrypoints/launchers/grpc_server.py:151, dp_supervisor.py:390; up to 0.2x
# launcher.py's "Shutting down FastAPI HTTP server."; uvicorn 0.3x server.py, lifespan/on.py.
_STOPS_FILE: Final = re.compile(r"(?:launcher|core(?:_client)?|grpc_server|dp_supervisor|utils|serve|api_server)\.py")
_STOPS: Final = re.compile(
    r"\[shutdown\] (?:API server|EngineCore|MPClient): |Shutting down (?:FastAPI HTTP|vLLM gRPC) server"
    r"|Received (?:shutdown signal|KeyboardInterrupt, shutting)|Shutdown complete\b|DPSupervisor received \w+, shutting"
    r"|Waiting up to \d+ seconds for processes to exit"
)
_UVICORN_STOPS: Final = re.compile(
    r"(?:Shutting down|Application shutdown complete\.|Finished server process \[\d+\])\s*$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotedException:
    """The exception of a worker or of EngineCore that is nearest to the cause, known or not; ``text`` is its line, cut.

    ``process`` is as the log names it, such as ``Worker_TP0 pid=1037``; it is empty where the log does not.
    """

    process: str
    text: str
    pid: int | None = None


def says_stop(line: LogLine) -> bool:
    """Return whether the API server or EngineCore logs that it was told to end."""
    if line.file is None:
        return line.level == "INFO" and line.is_api_servers and _UVICORN_STOPS.match(line.message) is not None
    return bool(_STOPS_FILE.fullmatch(line.file.rpartition("/")[2]) and _STOPS.match(line.message))


class LastWords:
    """The exceptions among lines that come one after another, and whether the end was orderly."""

    def __init__(self) -> None:
        self._tracebacks: dict[str, bool] = {}  # by process: the exception's line is to come
        # A traceback without a process: whose it is, and whether the next one is chained to it.
        self._bare, self._is_servers, self._goes_on = "", False, False
        self._found: dict[str, QuotedException] = {}
        self._following: QuotedException | None = None
        self._last: Moment | None = None
        self._has_failed = False
        self.in_order = False

    @property
    def exception(self) -> QuotedException | None:
        """The last exception of the process that failed first."""
        return next(iter(self._found.values()), self._following)

    def add(self, found: RecognizedLine, at: Moment) -> None:
        """Take the next line."""
        line = found.line
        self._has_failed = self._has_failed or (found.known is not None and found.known.part in {"cause", "end"})
        self.in_order = self.in_order or (not self._has_failed and says_stop(line))
        process = self._process_of(line)
        if process is not None and self._is_exception(process, line):
            self._note(process, line, at)

    def _process_of(self, line: LogLine) -> str | None:
        """Return whose exception a line may be: nobody's where it is the API server's, or is no error."""
        if line.is_api_servers or line.level not in (None, "ERROR", "CRITICAL"):
            return None
        if line.process is not None:
            return line.process if _OF_ENGINE.match(line.process) else None
        if line.file is not None:
            return line.file
        self._read_bare(line.message)
        return self._bare

    def _read_bare(self, message: str) -> None:
        """Note whose a traceback without a process is: the API server's, by its frames."""
        if named := _PROCESS.match(message):
            self._bare, self._is_servers, self._goes_on = named[1], named[1].startswith("Api"), True
        elif _TRACEBACK.match(message):
            if not self._goes_on:
                self._bare, self._is_servers = "", False
            self._goes_on = False
        elif _API_SERVERS_FRAME.match(message):
            self._is_servers = True
        elif _CHAINED.match(message):
            self._goes_on = True

    def _is_exception(self, process: str, line: LogLine) -> bool:
        message = line.message
        if _TRACEBACK.match(message):
            if len(self._tracebacks) < _MOST_PROCESSES:
                self._tracebacks[process] = True
            return False
        if not message or message[0].isspace() or _CHAINED.match(message):
            return False
        is_awaited = self._tracebacks.pop(process, False)
        if _ENDS.match(message) or not (is_awaited or line.is_form):
            return False
        if not line.is_form and self._is_servers:  # the API server's own end takes EngineCore's with it
            self.in_order, self._has_failed = False, True
            return False
        return (_ANY_NAME if is_awaited else _NAMED).match(message) is not None or quoted(line) is not None

    def _note(self, process: str, line: LogLine, at: Moment) -> None:
        inner = quoted(line)
        text = line.message if inner is None else _QUOTE_ENDS.sub("", inner)
        exception = QuotedException(process=process, text=plain(text, MAX_LINE_LENGTH), pid=line.pid)
        if self._last is not None and not self._last.is_near(at):
            self._found, self._following = {}, None
        self._last, self._has_failed = at, True
        if _FOLLOWS.match(line.message):
            quotes_more = inner is not None and not _FOLLOWS.match(inner)
            self._following = exception if quotes_more or self._following is None else self._following
        elif process in self._found or len(self._found) < _MOST_PROCESSES:
            self._found[process] = exception
