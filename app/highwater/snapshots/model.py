"""One snapshot of PyTorch's allocator, checked where it enters: segments, their blocks, and the stacks behind them.

The shape is that of `torch.cuda.memory._snapshot` and of torch_npu's, which has the same keys. Names, types and counts
are checked by hand, so that a file that refers to one list a million times costs no more than others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeGuard

from highwater.snapshots import SnapshotError
from highwater.text.printable import printable

MAX_SEGMENTS: Final = 200_000
MAX_BLOCKS: Final = 3_000_000
MAX_ENTRIES: Final = 5_000_000
MAX_FRAMES: Final = 64
MAX_WORD: Final = 300
DEFAULT_POOL: Final = (0, 0)
_MAX_SIZE: Final = 1 << 60
_WORD_BITS: Final = 64  # of addresses and streams
_MAX_NUMBER: Final = 1 << 64

Frame: TypeAlias = tuple[str, int, str]
"""File, line, function."""
Stack: TypeAlias = tuple[Frame, ...]
"""Innermost first; empty where PyTorch recorded none."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment, in bytes, and the stack of its allocation."""

    size: int
    requested: int  # before rounding; the size where PyTorch does not say
    state: str  # ``live``: a tensor's; ``pending``: freed, and waiting for another stream; ``free``
    stack: Stack


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of memory that the allocator got from the driver; its blocks are in order, without a gap."""

    device: int
    address: int
    size: int
    stream: int
    kind: str  # ``small`` or ``large``: requests up to 1 MiB, or above
    pool: tuple[int, int]  # ``(0, 0)``: the default pool; any other is private to captured graphs or to sleep mode
    is_expandable: bool  # it is one mapped range of an expandable segment
    blocks: tuple[Block, ...]

    @property
    def is_private(self) -> bool:
        """True if requests from outside its pool cannot use it."""
        return self.pool != DEFAULT_POOL

    @property
    def free_bytes(self) -> int:
        """The bytes of its free blocks."""
        return sum(block.size for block in self.blocks if block.state == "free")

    @property
    def held(self) -> Iterator[Block]:
        """Its blocks that are not free."""
        return (block for block in self.blocks if block.state != "free")


@dataclass(frozen=True, slots=True)
class Request:
    """The last request of the history that failed for want of memory, else its largest; in bytes."""

    size: int
    stream: int
    failed: bool
    device_free: int | None = None  # as the driver reported then; only of a request that failed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of all devices: segments, the largest request of each device's history, and the history's length."""

    segments: tuple[Segment, ...]
    largest: Mapping[int, Request] = field(default_factory=dict)
    trace_entries: int = 0
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    @property
    def has_stacks(self) -> bool:
        """True if any block in use has the stack of its allocation."""
        return any(block.stack for segment in self.segments for block in segment.blocks)


class _Reader:
    """Reads one snapshot; the stacks that several blocks share are built once."""

    def __init__(self) -> None:
        self._stacks: dict[int, Stack] = {}
        self._blocks = 0

    def segment(self, raw: Any, where: str) -> Segment:  # noqa: ANN401 - from a pickle
        size = _size(_get(raw, "total_size", where), f"{where}.total_size")
        listed = _listed(_get(raw, "blocks", where), f"{where}.blocks")
        self._blocks += len(listed)
        if self._blocks > MAX_BLOCKS:
            raise SnapshotError(f"it has more than {MAX_BLOCKS:,} blocks")
        blocks = tuple(self._block(block, f"{where}.blocks[{index}]") for index, block in enumerate(listed))
        if sum(block.size for block in blocks) != size:
            raise SnapshotError(f"{where}: its blocks have other bytes than the segment's {size}")
        kind = _word(raw.get("segment_type", "large"))
        return Segment(
            device=_whole(raw.get("device", 0), f"{where}.device"),
            address=_whole(raw.get("address", 0), f"{where}.address"),
            size=size,
            stream=_whole(raw.get("stream", 0), f"{where}.stream"),
            kind="small" if kind == "small" else "large",
            pool=_pool(raw.get("segment_pool_id", DEFAULT_POOL), f"{where}.segment_pool_id"),
            is_expandable=bool(raw.get("is_expandable", False)),
            blocks=blocks,
        )

    def _block(self, raw: Any, where: str) -> Block:  # noqa: ANN401 - from a pickle
        size = _size(_get(raw, "size", where), f"{where}.size")
        state = _word(_get(raw, "state", where))
        requested, frames = raw.get("requested_size"), raw.get("frames")
        history = raw.get("history")
        if isinstance(history, list) and history and isinstance(history[0], dict):  # as PyTorch 1.x and 2.0 wrote it
            frames = history[0].get("frames") if frames is None else frames
            requested = history[0].get("real_size") if requested is None else requested
        # `active_pending_free`, as it is called, and `active_awaiting_free`, as it is documented.
        kind = "live" if state == "active_allocated" else "free" if state == "inactive" else "pending"
        return Block(
            size=size,
            requested=min(size, _size(requested, f"{where}.requested_size")) if requested is not None else size,
            state=kind,
            stack=self._stack(frames) if kind != "free" else (),
        )

    def _stack(self, frames: Any) -> Stack:  # noqa: ANN401 - from a pickle
        if not isinstance(frames, list):
            return ()
        known = self._stacks.get(id(frames))  # the list lives as long as the snapshot that it came with
        if known is None:
            known = tuple(_frame(frame) for frame in frames[:MAX_FRAMES] if isinstance(frame, dict))
            self._stacks[id(frames)] = known
        return known


def parse(raw: object) -> Snapshot:
    """Return the snapshot in a pickle's content.

    Raises:
        SnapshotError: It is not a snapshot; the text names the wrong key.
    """
    if isinstance(raw, list):  # `torch.cuda.memory_snapshot()` returns the segments alone
        raw = {"segments": raw}
    listed = _listed(_get(raw, "segments", "the snapshot"), "segments")
    if len(listed) > MAX_SEGMENTS:
        raise SnapshotError(f"it has more than {MAX_SEGMENTS:,} segments")
    reader = _Reader()
    segments = tuple(reader.segment(segment, f"segments[{index}]") for index, segment in enumerate(listed))
    assert isinstance(raw, dict)  # noqa: S101 - `_get` has checked it
    traces, settings = raw.get("device_traces"), raw.get("allocator_settings")
    listed = traces if isinstance(traces, list) else []
    history = {device: trace for device, trace in enumerate(listed) if isinstance(trace, list)}
    entries = sum(map(len, history.values()))
    if entries > MAX_ENTRIES:
        raise SnapshotError(f"its history has more than {MAX_ENTRIES:,} entries")
    largest = {device: request for device, trace in history.items() if (request := _largest(trace)) is not None}
    return Snapshot(segments, largest, entries, dict(_settings(settings)))


def _settings(raw: object) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(raw, dict):
        for key, value in list(raw.items())[:100]:
            # Values that JSON cannot express are left out.
            if isinstance(value, str):
                yield _word(key), value[:MAX_WORD]
            elif isinstance(value, int | float) and abs(value) <= _MAX_NUMBER:
                yield _word(key), value


def _largest(trace: list[Any]) -> Request | None:
    request: Request | None = None
    for entry in trace:
        if not isinstance(entry, dict):
            continue
        action, size, stream = entry.get("action"), entry.get("size"), entry.get("stream", 0)
        if action not in ("alloc", "oom") or not isinstance(size, int) or not 0 < size < _MAX_SIZE:
            continue
        stream = stream if isinstance(stream, int) and stream.bit_length() <= _WORD_BITS else 0
        if action == "oom":
            free = entry.get("device_free")
            request = Request(size, stream, failed=True, device_free=free if _is_size(free) else None)
        elif request is None or (not request.failed and size > request.size):
            request = Request(size, stream, failed=False)
    return request


def _frame(raw: dict[Any, Any]) -> Frame:
    line = raw.get("line", 0)
    file, name = (printable(_word(raw.get(key, "?")), instead="?") for key in ("filename", "name"))
    return file, line if isinstance(line, int) and line.bit_length() <= _WORD_BITS else 0, name


def _word(raw: object) -> str:
    """Return a text cut short. Other values are not formatted: a few bytes of lists can be gigabytes as text."""
    return raw[:MAX_WORD] if isinstance(raw, str) else "?"


def _get(raw: Any, key: str, where: str) -> Any:  # noqa: ANN401 - from a pickle
    if not isinstance(raw, dict):
        raise SnapshotError(f"{where} is of type {type(raw).__name__}; PyTorch writes a dict there")
    if key not in raw:
        raise SnapshotError(f"{where} has no {key!r}; a snapshot of PyTorch's has one")
    return raw[key]


def _listed(raw: object, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise SnapshotError(f"{where} is of type {type(raw).__name__}; PyTorch writes a list there")
    return raw


def _whole(raw: object, where: str) -> int:
    if not isinstance(raw, int) or raw.bit_length() > _WORD_BITS:
        raise SnapshotError(f"{where} is not a whole number of 64 bits")
    return int(raw)


def _is_size(raw: object) -> TypeGuard[int]:
    return isinstance(raw, int) and 0 <= raw < _MAX_SIZE


def _size(raw: object, where: str) -> int:
    size = _whole(raw, where)
    if not 0 <= size < _MAX_SIZE:
        raise SnapshotError(f"{where} is {size}; no device has so many bytes")
    return size


def _pool(raw: object, where: str) -> tuple[int, int]:
    if not isinstance(raw, tuple | list) or len(raw) != 2:  # noqa: PLR2004 - PyTorch's pair
        raise SnapshotError(f"{where} is not a pair of numbers")
    return _whole(raw[0], where), _whole(raw[1], where)
