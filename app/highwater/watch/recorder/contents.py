"""The contents of a recorder file: its writer, its entries, its progress.

Another process wrote them: a value that is not as the contract has it (docs/recorder-file.md) counts as unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import islice
from typing import Annotated, Any, Final, Literal, TypeAlias, TypedDict

from pydantic import Field, TypeAdapter, ValidationError

from highwater.model.engine_budget import EngineBudget
from highwater.model.rank import MAX_NUMBER, Budget, Device, Note, Ranked, StartPhase
from highwater.process.untrusted import flaw, parse_json, printable
from highwater_worker.wire import HEAD_LENGTH, ROW, ring_name

_MAX_TEXT = 200


class RingUnusable(Exception):
    """A recorder file that cannot be used.

    ``reason`` begins with one of: truncated, foreign, version, corrupt header, corrupt identity, not a regular file,
    too large, unreadable.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def json_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(str(text, "ascii"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def is_within_bounds(value: object) -> bool:
    """Return whether every number in a value of ``model`` can be counted with: finite, not negative, of 63 bits."""
    if isinstance(value, int | float):
        return 0 <= value <= MAX_NUMBER
    parts = fields(value) if is_dataclass(value) else ()
    return all(is_within_bounds(getattr(value, part.name)) for part in parts)


def count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_NUMBER else None


def number(value: object) -> float | None:
    """Return a finite number that is not negative. JSON's true is a Python integer, and no number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_NUMBER else None


def short_text(value: object) -> str | None:
    """Return text that a terminal and UTF-8 can take: JSON may hold control characters and halves of characters."""
    return printable(value[:_MAX_TEXT], instead="?") if isinstance(value, str) else None


# --- the writer ---

MAX_RANKS: Final = 4096  # more ranks than any engine has: files may say anything
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Ranks: TypeAlias = Annotated[int, Field(ge=0, le=MAX_RANKS)]
# Names come into logs and sentences for operators: no control characters.
_Word: TypeAlias = Annotated[str, Field(max_length=255, pattern=r"^[ -~]*$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity(Ranked):
    """The writer of a recorder file; names and meanings are those of the worker's responses (worker_ext/README.md)."""

    # The name of one life of the engine; the sidecar chose it, or the worker.
    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    rank: Count | None = None
    local_rank: Count | None = None
    dp_rank: Count | None = None
    tp_rank: Count | None = None
    pp_rank: Count | None = None
    host: _Word | None = None
    pid: Annotated[int, Field(ge=1, le=2**31 - 1)]  # as the writer's own PID namespace numbers it
    pid_started: Count | None = None  # in ticks since boot: distinguishes a process from a later one with its number
    boot_id: _Word | None = None
    pid_namespace: Count | None = None  # the inode of the writer's PID namespace; `None` from older worker packages
    device: Device
    started_at: Seconds  # Unix seconds
    rate: Annotated[float, Field(gt=0, le=10_000)]  # samples in a second
    seconds: Seconds  # how far the ring reaches back
    extension: _Word | None = None  # the version of the worker extension
    ranks_expected: _Ranks | None = None  # how many workers the API server has
    data_parallel: _Ranks | None = None
    pipeline_parallel: _Ranks | None = None
    tensor_parallel: _Ranks | None = None
    model: _Word | None = None
    # Whether the worker has our operations, so that they may be called; `None` where it does not say.
    rpc: bool | None = None
    self_started: bool | None = None  # whether the worker started its recorder by itself, as the engine came up

    @property
    def title(self) -> str:
        """``rank 0 (pid 7 on node-1)``."""
        where = f" on {self.host}" if self.host else ""
        return f"{self.name} (pid {self.pid}{where})"


_IDENTITY = TypeAdapter(Identity)


def parse_identity(content: bytes, file_name: str) -> Identity:
    """Return the identity in a header. Raises RingUnusable: it is invalid, or does not fit the file's name."""
    given = json_object(content)
    if given is None:
        raise RingUnusable("corrupt identity: it is no JSON object")
    try:
        identity = _IDENTITY.validate_python(given)
    except ValidationError as exc:
        raise RingUnusable(f"corrupt identity: {flaw(exc.errors())}") from exc
    device = identity.device
    if not is_within_bounds(device):
        raise RingUnusable("corrupt identity: a number that nothing has")
    if not all((text or "").isprintable() for text in (device.type, device.name)):
        raise RingUnusable("corrupt identity: device: characters that no name has")
    if file_name != ring_name(identity.instance, identity.pid):
        raise RingUnusable("corrupt identity: it is not that of the file's name")
    return identity


# --- the entries of its encoder cache, and what else changes seldom ---

# More phases and notes than a worker writes: files may say anything.
MAX_PHASES = 32
MAX_NOTES = 32
MAX_NOTE = 1000


class EntryRow(TypedDict):
    mm_hash: str  # its first 64 characters
    bytes: int
    residency: str  # `device` or `host`
    age_seconds: float  # a lower bound


def largest_first(row: EntryRow) -> tuple[int, str]:
    return -row["bytes"], row["mm_hash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryTable:
    mono: Seconds  # when entries came or went last, on the writer's monotonic clock
    total: Count  # how many entries there are; the table may have fewer
    budget: Budget = field(default_factory=Budget)
    start: Annotated[tuple[StartPhase, ...], Field(max_length=MAX_PHASES)] = ()  # the phases of the worker's start
    notes: Annotated[tuple[Note, ...], Field(max_length=MAX_NOTES)] = ()
    rows: bytes = b""  # the entries as they stand in the file
    engine_budget: EngineBudget | None = None  # `None` where the file has none, or an invalid one

    def entries(self, mono: float) -> Iterator[EntryRow]:
        """Return the valid entries, as first seen one after another; ages as of ``mono``, on the writer's clock."""
        for name, nbytes, seen_mono, is_on_host in ROW.iter_unpack(self.rows):
            if nbytes <= MAX_NUMBER and 0 <= seen_mono <= MAX_NUMBER:
                yield EntryRow(
                    mm_hash=printable(name.rstrip(b"\0").decode("ascii", "replace"), instead="?"),
                    bytes=nbytes,
                    residency="host" if is_on_host else "device",
                    age_seconds=round(max(mono - seen_mono, 0.0), 3),
                )


_TABLE = TypeAdapter(EntryTable)
_ENGINE_BUDGET = TypeAdapter(EngineBudget)


def parse_table(body: bytes) -> EntryTable | None:
    if len(body) < HEAD_LENGTH.size:
        return None
    rows_at = HEAD_LENGTH.size + HEAD_LENGTH.unpack_from(body)[0]
    if rows_at > len(body) or (len(body) - rows_at) % ROW.size:
        return None
    given = json_object(body[HEAD_LENGTH.size : rows_at]) or {}
    # Validated by itself: one invalid figure in it must not cost the entries.
    engine_budget: EngineBudget | None = None
    problem: str | None = None
    if (given_budget := given.pop("engine_budget", None)) is not None:
        try:
            # JSON can name halves of characters, which no response of ours could hold.
            json.dumps(given_budget, ensure_ascii=False).encode()
            engine_budget = _ENGINE_BUDGET.validate_python(given_budget)
        except UnicodeEncodeError:
            problem = "a text is no Unicode"
        except ValidationError as exc:
            problem = flaw(exc.errors())
    try:
        head = _TABLE.validate_python({**given, "rows": body[rows_at:]})
    except ValidationError:
        return None
    notes = [Note(name=_short(note.name), reason=_short(note.reason)) for note in head.notes]
    if problem is not None:
        notes.append(Note(name="engine_budget", reason=f"the file has none that can be read: {problem}"))
    return replace(
        head,
        budget=head.budget if is_within_bounds(head.budget) else Budget(),
        start=tuple(
            replace(phase, name=_short(phase.name), error=None if phase.error is None else _short(phase.error))
            for phase in head.start
            if is_within_bounds(phase)
        ),
        notes=tuple(notes),
        engine_budget=engine_budget,
    )


def _short(text: str) -> str:
    return printable(text[:MAX_NOTE])


# --- its steps and calls ---

_MAX_STACK = 8
# A frame as Python's faulthandler writes it: `  File "/usr/lib/python3/a.py", line 12 in run`.
_FRAME = re.compile(r'  File "(?:.*/)?([^"]*)", line ([0-9]+) in (.*)')

# Functions in which a step makes what it runs next: torch.compile (torch/_dynamo/convert_frame.py, _inductor), Triton's
# compiler and its tuning, and the capture of graphs (vLLM's model runners).
_COMPILES = frozenset({"_compile", "compile", "compile_fx", "do_bench", "capture_model", "_capture_cudagraphs"})

# alive: it writes. silent: it should have written by now. dead: its process has ended. stopped: a signal or a debugger
# holds its process. ended: it wrote that it would write no more.
RankStatus: TypeAlias = Literal["alive", "silent", "dead", "stopped", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """A worker's last record of its steps and of our calls in it; seconds as of then."""

    steps_begun: int = 0
    calls: int = 0  # the number of calls of the engine, steps or other, and operations of the sidecar that have begun
    # Whether the last step had no tokens: the engine runs one after its last request has ended, or was aborted; `None`
    # where the recorder does not say.
    is_out_of_work: bool | None = None
    tokens_age_seconds: float | None = None  # since a step with tokens ended, or none has; `None` where it does not say
    step_seconds: float | None = None  # the age of the current step; `None` outside of steps
    last_step_age_seconds: float | None = None  # since a step began or ended last; `None` before the first
    # How long the engine has waited for what a step returned, with asynchronous scheduling.
    output_seconds: float | None = None
    rpc: str | None = None  # our operation that runs, for `rpc_seconds`
    rpc_seconds: float | None = None
    # The engine's call outside of a step: to load weights, an adapter, to wake up; for at least `call_seconds`.
    call: str | None = None
    call_seconds: float | None = None
    is_compiling: bool = False  # whether what lasts is seen to compile or to capture graphs
    stack: tuple[str, ...] = ()  # where its thread is, innermost first; empty where nothing has lasted for long


def parse_progress(mono: float, body: Mapping[str, Any]) -> RankProgress | None:
    moving, dump = body.get("moving"), body.get("dump")
    if not isinstance(moving, dict):
        return None
    # The first thread of a dump is the one that lasts longest.
    frames = map(_FRAME.fullmatch, dump.partition("\n\n")[0].splitlines()) if isinstance(dump, str) else ()
    tokens_at = number(moving.get("tokens_mono"))
    last_step, is_out_of_work = number(moving.get("last_step_mono")), moving.get("last_step_empty")
    return RankProgress(
        steps_begun=count(moving.get("steps_begun")) or 0,
        calls=count(body.get("calls")) or 0,
        is_out_of_work=is_out_of_work if isinstance(is_out_of_work, bool) else None,
        tokens_age_seconds=None if tokens_at is None else max(mono - tokens_at, 0.0),
        last_step_age_seconds=None if last_step is None else max(mono - last_step, 0.0),
        step_seconds=number(moving.get("step_seconds")),
        output_seconds=number(moving.get("output_seconds")),
        rpc=short_text(moving.get("rpc")),
        rpc_seconds=number(moving.get("rpc_seconds")),
        call=short_text(moving.get("call")),
        call_seconds=number(moving.get("call_seconds")),
        is_compiling=any(frame is not None and frame[3] in _COMPILES for frame in frames),
        stack=parse_stack(dump) if isinstance(dump, str) else (),
    )


def parse_stack(dump: str) -> tuple[str, ...]:
    """Return the first thread's innermost frames as ``file.py:line function``; a dump is ``faulthandler``'s."""
    lines = dump.partition("\n\n")[0].splitlines()
    frames = islice((frame for line in lines if (frame := _FRAME.fullmatch(line))), _MAX_STACK)
    return tuple(text for frame in frames if (text := short_text(f"{frame[1]}:{frame[2]} {frame[3]}")))
