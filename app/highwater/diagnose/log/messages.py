"""The log messages that engines are known to write (messages.toml), which lines have one, and its figures.

A message counts only at the beginning of a log record or an exception, and of the API server's lines only in those
without a client's text: it logs prompts and errors with clients' words, and anybody can send `CUDA out of memory`. Only
lines with a known message are kept.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from highwater.diagnose.finding import Advice, advices
from highwater.diagnose.log.reader import Reader
from highwater.diagnose.log.record import MAX_LINE_LENGTH, LogLine, Moment
from highwater.model.rank import RankReading
from highwater.model.units import GIB, KIB, MIB
from highwater.process.untrusted import plain

WhichMemory: TypeAlias = Literal["device", "host", "shm", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMessage:
    """A row of messages.toml, whose head says what each field means."""

    name: str
    pattern: re.Pattern[str]
    title: str
    meaning: str
    advice: tuple[Advice, ...]
    source: str
    by_api_server: bool = False
    part: Literal["cause", "end", "wait", "event"] = "cause"
    at_start: bool = False
    of_memory: WhichMemory | None = None


# Words that may be of a shortage, and such words of none: options, what libraries write of their work or at any end.
_MAY_BE_MEMORY: Final = re.compile(r"(?i)memor|alloc|resource|no space|out of|\boom")
_IS_NO_SHORTAGE: Final = re.compile(
    r"(?i)(?:illegal|invalid) memory access|memory access fault|\bout of (?:range|bounds)|\bresource_tracker\b.*"
    r"|\bleak resources\b|gpu.memory.utilization|\w*ALLOC_CONF|\bNCCL INFO .*|^(?:Extension modules:|frame #\d+:).*"
)


def may_be_of_memory(text: str) -> bool:
    """Return whether words that nobody knows may say that memory was short."""
    return _MAY_BE_MEMORY.search(_IS_NO_SHORTAGE.sub("", text)) is not None


def _compiled(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[KnownMessage]:
    prefixes = rows["prefixes"]
    for name, row in rows.items():
        if name != "prefixes":
            pattern = re.sub(r"<(\w+)>", lambda found: prefixes[found[1]], row["pattern"])
            compiled = re.compile(pattern, re.IGNORECASE)
            yield KnownMessage(name=name, **{**row, "pattern": compiled, "advice": advices(row["advice"])})


# Causes before consequences; a line belongs to the first that fits it.
KNOWN: Final = tuple(_compiled(tomllib.loads(Path(__file__).with_name("messages.toml").read_text("utf-8"))))
BY_NAME: Final = {known.name: known for known in KNOWN}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMessage:
    """A known message in the engine's log: its row in messages.toml, how many lines have it, and some of them."""

    name: str
    title: str
    meaning: str
    count: int
    lines: tuple[str, ...]
    advice: tuple[Advice, ...] = ()

    @property
    def known(self) -> KnownMessage | None:
        """``None`` of one that another version knew."""
        return BY_NAME.get(self.name)

    @property
    def part(self) -> str:
        return "cause" if self.known is None else self.known.part


# --- lines ---

# How an exit by a signal is written: by Python and vLLM as -9, by shells and container runtimes as 137 or in words.
_EXIT = re.compile(
    r"exit (?:code|status):? ?(?P<code>-?\d+)\b|proc\(s\): \{[^}]*?: (?P<failed>-\d+)|\bsignal (?P<signal>\d+)\b"
    r"|(?P<killed>\bKilled\b)"
)
# Of a traceback's lines; those of a group of exceptions have a bar.
_INDENTS: Final = " \t|+"
_SHELLS_OFFSET, _SIGNALS, _SIGKILL = 128, 65, 9

# What a process writes of another one's exception: vLLM 0.12 to 0.33, v1/executor/multiproc_executor.py (0.32.0:443);
# Ray's name of it, python/ray/exceptions.py.
_QUOTES: Final = re.compile(
    r"(?:[\w.]{0,80}(?:Error|Exception): )?Worker failed with error:? ['\"]?"
    r"|[\w.]{0,40}RayTaskError\((?=[A-Z]\w{0,60}\): )"
)


def quoted(line: LogLine) -> str | None:
    found = None if line.is_api_servers else _QUOTES.match(line.message)
    if found is None:
        return None
    rest = line.message[found.end() :]
    return rest.replace("): ", ": ", 1) if found[0].endswith("(") else rest


def in_order(messages: Mapping[str, LogMessage]) -> tuple[LogMessage, ...]:
    """Return messages, given by their names, causes before consequences."""
    return tuple(messages[name] for name in BY_NAME if name in messages)


class RecognizedLine(NamedTuple):
    line: LogLine
    known: KnownMessage | None


# A line of the log as it stands there, and the lines in it: JSON may hold several.
LogText: TypeAlias = tuple[str, list[RecognizedLine]]


def recognized(texts: Iterable[str], reader: Reader) -> Iterator[LogText]:
    for text, lines in reader.read(texts):
        yield text, [RecognizedLine(line, None if line.is_clients else known_message(line)) for line in lines]


def merged(before: tuple[LogMessage, ...], after: tuple[LogMessage, ...]) -> tuple[LogMessage, ...]:
    return in_order({message.name: message for message in (*after, *before)})


def ended_by_signal(messages: Iterable[LogMessage]) -> int | None:
    for message in messages:
        for line in message.lines:
            found = _EXIT.search(line)
            if found is None:
                continue
            if found["killed"]:
                return _SIGKILL
            number = int(found["code"] or found["failed"] or found["signal"])
            number = -number if number < 0 else number - (0 if found["signal"] else _SHELLS_OFFSET)
            if 0 < number < _SIGNALS:
                return number
    return None


def known_message(line: LogLine) -> KnownMessage | None:
    """Return the known message that a line has: what it quotes says more than that it does."""
    is_api_servers = line.is_api_servers
    for message in (quoted(line), line.message):
        if message is None:
            continue
        said = message.lstrip(_INDENTS)
        for known in KNOWN:
            if (known.by_api_server or not is_api_servers) and known.pattern.match(said):
                return known
    return None


# Of one message: the first ones, which are nearest to the cause, and the last one.
FIRST_LINES = 2


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


# --- the figures in the message of a failed allocation ---

# They are those of that very moment, and so newer than every reading: an engine can fill, or fragment, its device
# within one step. PyTorch writes the message after it has given its unused blocks back to the device and tried once
# more: what it still holds unallocated lies beside live tensors or belongs to captured graphs. An engine may live
# through such a failure: one counts only if it is its process's last and stands near the log's end.

_SAME_DEVICE: Final = 0.01
"""The part of its size by which a device's two figures may differ: the message's has two decimals."""
_UNITS: Final = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
_SIZE: Final = r"(?<![\d.])(\d{1,15}(?:\.\d{1,2})?) (bytes|[KMGT]iB)"
# torch 2.11 c10/cuda/CUDACachingAllocator.cpp, and c10/xpu/XPUCachingAllocator.cpp without what processes have in use.
# torch_npu 2.7 to 2.14, csrc/core/npu/NPUCachingAllocator.cpp and NPUWorkspaceAllocator.cpp, write what PyTorch wrote
# before 2.1; the workspaces' message has no figures of PyTorch's. Then c10/core/impl/alloc_cpu.cpp, NumPy, and vllm
# 0.32.0 distributed/device_communicators/shm_broadcast.py:254.
_TRIED: Final = re.compile(rf"[Tt]ried to (?:allocate|mmap) {_SIZE}|Unable to allocate {_SIZE}|: {_SIZE} required, ")
_TOTAL: Final = re.compile(rf"total capaci?ty of {_SIZE}|; {_SIZE} total capacity[;)]")
_FREE: Final = re.compile(rf"of which {_SIZE} is free|; {_SIZE} free[;)]|required, {_SIZE} free")
_ALLOCATED: Final = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch|; {_SIZE} already allocated;")
_UNALLOCATED: Final = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED: Final = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_IN_USE: Final = re.compile(rf"this process has {_SIZE} memory in use")
_DEVICE: Final = re.compile(r"\b(CUDA|HIP|XPU|NPU)(?:WorkspaceAllocator)?\b")
# Ray's figures are in its own GB: "Memory on the node ... was 2152.43GB / 2265.25GB", and then its list of processes.
_OF_NODE: Final = re.compile(r"\bwas (\d{1,9}\.\d{1,2})GB / (\d{1,9}\.\d{1,2})GB\b")
_OF_PROCESS: Final = re.compile(r"\s*(\d{1,9})\s{1,40}(\d{1,9}\.\d{1,2})\s{1,40}(\S.*)")
_LIST_LINES: Final = 16
_MAX_PROCESSES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestProcess:
    """The process with the most host memory on a node, by Ray's list; ``size_gb`` is in Ray's GB."""

    pid: int
    name: str
    size_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAllocation:
    """Sizes in bytes, as exact as the message's two decimals; what it does not say is ``None``."""

    memory: WhichMemory = "device"
    platform: str | None = None  # `cuda`, `hip`, `xpu` or `npu`, as the message calls the device
    tried_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    # What its process had of the device, PyTorch's and not, where the driver could say that.
    in_use_bytes: int | None = None
    # Of host memory that Ray watches, what was in use and what there is, in Ray's GB.
    node_gb: tuple[float, float] | None = None
    largest: LargestProcess | None = None
    pid: int | None = None  # the process that wrote it, where the line's prefix names it

    def may_be_of(self, pid: int | None, total_bytes: int | None) -> bool:
        total = self.total_bytes
        if total is None or self.free_bytes is None:
            return False
        is_its_size = total_bytes is None or abs(total_bytes - total) <= _SAME_DEVICE * total
        return is_its_size and (self.pid is None or pid is None or self.pid == pid)

    def reading(self, before: RankReading, at: float) -> RankReading:
        """Return the rank's last reading as it stood at the failure; the components are those before it."""
        total, free, torch = before.total_bytes or self.total_bytes or 0, self.free_bytes or 0, before.torch
        releasable = before.releasable_bytes
        if self.reserved_bytes is not None and self.allocated_bytes is not None:
            releasable = 0
            torch = replace(
                torch,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                inactive_split_bytes=self.reserved_bytes - self.allocated_bytes,
            )
        used = max(total - free, 0)
        return replace(
            before,
            taken_at=at,
            total_bytes=total,
            free_bytes=free,
            used_bytes=used,
            used_ratio=used / total if total else None,
            torch=torch,
            releasable_bytes=releasable,
        )


class FailedAllocations:
    """Each process's last failure among lines that come one after another.

    A message that is cut or written in another way says nothing, and then an earlier one of its process counts no more.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[WhichMemory, int | None], tuple[Moment, FailedAllocation | None]] = {}
        self._is_untimed = False
        self._node: tuple[tuple[WhichMemory, int | None], int] | None = None  # Ray's list of processes is to come

    def add(self, found: RecognizedLine, at: Moment) -> None:
        line, known = found
        if self._is_untimed and at.is_timed:
            self._found = {key: (was.settled(at), failed) for key, (was, failed) in self._found.items()}
            self._is_untimed = False
        if known is None or known.of_memory in (None, "unclear"):
            # The first row of Ray's list, which begins with the largest.
            if self._node is not None and (row := _OF_PROCESS.match(line.message)) is not None:
                (key, number), self._node = self._node, None
                _, failed = self._found[key]
                if failed is not None and at.number - number <= _LIST_LINES:
                    largest = LargestProcess(pid=int(row[1]), name=plain(row[3], 80), size_gb=float(row[2]))
                    self._found[key] = at, replace(failed, largest=largest)
        elif any(pattern.search(line.message) for pattern in (_TRIED, _OF_NODE)):  # else another one has the figures
            # What a process quotes is another one's.
            key = known.of_memory, line.pid if quoted(line) is None else None
            if key in self._found or len(self._found) < _MAX_PROCESSES:
                failed = _parsed(line.message, key[1], known.of_memory)
                self._found[key] = at, failed
                self._is_untimed = self._is_untimed or not at.is_timed
                self._node = (key, at.number) if failed is not None and failed.node_gb is not None else self._node

    def near(self, end: Moment) -> tuple[FailedAllocation, ...]:
        """Return the failures that stand near the end of an engine's life; a quoted one only where it is not there."""
        near = [failed for at, failed in self._found.values() if failed is not None and at.is_near(end)]
        known = {replace(failed, pid=None) for failed in near if failed.pid is not None}
        return tuple(failed for failed in near if failed not in known)


def _parsed(line: str, pid: int | None, memory: WhichMemory) -> FailedAllocation | None:
    tried, total, free, allocated = (_size(pattern, line) for pattern in (_TRIED, _TOTAL, _FREE, _ALLOCATED))
    unallocated, reserved, node = _size(_UNALLOCATED, line), _size(_RESERVED, line), _OF_NODE.search(line)
    if memory != "device":
        if tried is None and node is None:
            return None
        of_node = None if node is None else (float(node[1]), float(node[2]))
        return FailedAllocation(memory=memory, tried_bytes=tried, free_bytes=free, node_gb=of_node, pid=pid)
    if reserved is None and unallocated is not None and allocated is not None:
        reserved = allocated + unallocated
    is_workspaces = "Workspace" in line[:200]
    if tried is None or total is None or (not is_workspaces and (allocated is None or reserved is None)):
        return None
    if reserved is not None and reserved < (allocated or 0):
        return None
    device = _DEVICE.search(line)
    return FailedAllocation(
        platform=None if device is None else device[1].lower(),
        tried_bytes=tried,
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        in_use_bytes=_size(_IN_USE, line),
        pid=pid,
    )


def _size(pattern: re.Pattern[str], line: str) -> int | None:
    found = pattern.search(line)
    if found is None:
        return None
    number, unit = (part for part in found.groups() if part is not None)
    return int(float(number) * _UNITS[unit])
