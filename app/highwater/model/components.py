"""The components of device memory, a row each, and the accounting of a worker's memory by them.

A new one needs a field in ``rank.WorkerMemory`` and one in ``rank.Components``, its place in ``_place`` and a row here;
in the worker a reader in ``memory`` and its figure in ``recorder/reading.py``, ``responses.json`` and README. Generated
from these rows (``make docs``): the dashboard's ``facts.js`` and ``components.css``, and the table in docs/http.md.

The parts are placed one after another into ``used_bytes`` and never overfill it: a part that does not fit
(PyTorch's statistics and the driver's are not read at the same instant; a sleeping engine has unmapped pools that
PyTorch still counts) is cut, and a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, Self

from highwater.model.rank import Components, Note, RankMemory, RankReading, ReadingSource, TorchMemory, WorkerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    name: str  # its field in `rank.Components`, in `/memory` and in the history
    title: str  # as people read it
    meaning: str  # in a few words
    explained: str  # what its growth means, in sentences
    letter: str  # draws it in a terminal without colour, and in legends
    terminal: str  # its colour in a terminal
    # On the dashboard's light ground: Okabe and Ito's hues, of different lightness too; `dark`: on its dark one.
    light: str
    dark: str
    grafana: str  # its colour there
    layer: int  # its place in a stacked chart, from the bottom: stable parts first

    @property
    def label(self) -> str:
        return self.name.removesuffix("_bytes")

    @property
    def variable(self) -> str:
        return f"--c-{self.label.replace('_', '-')}"


COMPONENTS: tuple[Component, ...] = (
    Component(
        name="weights_bytes",
        title="weights",
        meaning="the model's parameters and buffers",
        explained="Weights are loaded at start; a change since then is unusual.",
        letter="W",
        terminal="blue",
        light="#35507f",
        dark="#4d6cab",
        grafana="#5794f2",
        layer=0,
    ),
    Component(
        name="kv_cache_bytes",
        title="KV cache",
        meaning="the preallocated KV pool",
        explained="The KV pool is allocated at start; a change since then is unusual.",
        letter="K",
        terminal="cyan",
        light="#79b2e2",
        dark="#84bdec",
        grafana="#8ab8ff",
        layer=1,
    ),
    Component(
        name="encoder_cache_bytes",
        title="encoder cache",
        meaning="encoder outputs kept on the device",
        explained=(
            "vLLM evicts encoder outputs only when it needs the room, so the cache climbs to its budget and stays "
            "there. That looks like a leak and is not one, but it must fit."
        ),
        letter="E",
        terminal="magenta",
        light="#e06c1f",
        dark="#ee7d33",
        grafana="#ff9830",
        layer=4,
    ),
    Component(
        name="other_tensors_bytes",
        title="other tensors",
        meaning=(
            "allocated by PyTorch and none of the others: buffers, workspaces and graphs' inputs at rest, and "
            "activations while a step runs"
        ),
        explained=(
            "Live tensors of PyTorch that are neither weights, KV pool nor encoder outputs: at rest buffers, "
            "workspaces and graphs' inputs; in a step also activations, of which large images and large batches need "
            "the most."
        ),
        letter="O",
        terminal="green",
        light="#a6528f",
        dark="#c07fb2",
        grafana="#b877d9",
        layer=3,
    ),
    Component(
        name="torch_cached_bytes",
        title="allocator reserve",
        meaning=(
            "reserved by PyTorch's allocator and not allocated: fragments, captured graphs' memory, and what release "
            "can give back"
        ),
        explained=(
            "PyTorch's allocator keeps what tensors leave behind. Others on the device (workspaces, collectives, "
            "graphs) cannot use it until it is given back."
        ),
        letter="C",
        terminal="yellow",
        light="#f0cb55",
        dark="#efcd62",
        grafana="#fade2a",
        layer=5,
    ),
    Component(
        name="non_torch_bytes",
        title="non-torch",
        meaning=(
            "contexts, collectives, graphs, workspaces, other processes on the device; on CPU the interpreter, its "
            "libraries and the heap"
        ),
        explained=(
            "Not PyTorch's: contexts, collectives' buffers, graphs, operators' workspaces, other processes. On the NPU "
            "the workspace allocator has one block for each stream that grows and is given back only by a release, or "
            "when memory has run out."
        ),
        letter="N",
        terminal="bright_black",
        light="#aeb6c0",
        dark="#737e8b",
        grafana="#8e8e8e",
        layer=2,
    ),
)
BY_NAME: Mapping[str, Component] = MappingProxyType({component.name: component for component in COMPONENTS})
STACKED: tuple[Component, ...] = tuple(sorted(COMPONENTS, key=lambda component: component.layer))
COMPONENT_NAMES: tuple[str, ...] = tuple(BY_NAME)


def component_title(name: str) -> str:
    return BY_NAME[name].title if name in BY_NAME else name.removesuffix("_bytes").replace("_", " ")


_SHARED = tuple(field.name for field in fields(RankMemory))


def account(worker: WorkerMemory, source: ReadingSource = "rpc") -> RankReading:
    components, notes = _place(worker)
    shared = {name: getattr(worker, name) for name in _SHARED}
    has_ratio = worker.used_bytes is not None and worker.total_bytes
    return RankReading(
        **shared | {"notes": worker.notes + notes},
        used_ratio=(worker.used_bytes or 0) / (worker.total_bytes or 1) if has_ratio else None,
        components=components,
        budget=replace(worker.budget, headroom_bytes=worker.free_bytes),
        source=source,
    )


def _place(worker: WorkerMemory) -> tuple[Components, tuple[Note, ...]]:
    encoder = worker.encoder_cache.device_bytes if worker.encoder_cache is not None else None
    known = {
        "weights_bytes": worker.weights_bytes,
        "encoder_cache_bytes": encoder,
        "kv_cache_bytes": worker.kv_cache_bytes,
    }
    if worker.used_bytes is None:
        return Components(**known), (Note(name="used_bytes", reason="not known, so the components cannot be summed"),)

    unknown = [name for name in ("weights_bytes", "kv_cache_bytes") if known[name] is None]
    allocated, reserved = worker.torch.allocated_bytes, worker.torch.reserved_bytes
    other = cached = None
    if allocated is not None and reserved is not None:
        other = None if unknown else max(allocated - sum(size or 0 for size in known.values()), 0)
        cached = max(reserved - allocated, 0)
    parts = {**known, "other_tensors_bytes": other, "torch_cached_bytes": cached}
    why = "not known for this worker; its bytes are counted in non_torch_bytes"
    notes = [Note(name=name, reason=why) for name in unknown]
    placed: dict[str, int | None] = {}
    left = worker.used_bytes
    for name, size in parts.items():
        if size is None:
            placed[name] = None
            continue
        placed[name] = min(max(size, 0), left)
        left -= placed[name] or 0
        if size > (placed[name] or 0):
            notes.append(Note(name=name, reason=f"{size} bytes counted, of which only {placed[name]} fit into used"))
    return Components(**placed, non_torch_bytes=left), tuple(notes)


# --- a rank's memory at one moment, flat: kept by history, recorders, incidents, measured loads and charts ---

ROW: Final[tuple[str, ...]] = (
    "used_bytes",
    "free_bytes",
    "total_bytes",
    "used_ratio",
    *COMPONENT_NAMES,
    "torch_allocated_bytes",
    "torch_reserved_bytes",
    "encoder_cache_entries",
    "host_rss_bytes",
)
_UNKNOWN: Final = Components()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    at: float  # Unix seconds
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    components: Components = _UNKNOWN
    torch_allocated_bytes: int | None = None
    torch_reserved_bytes: int | None = None
    encoder_cache_entries: int | None = None  # cached encoder outputs, on the device or the host
    host_rss_bytes: int | None = None  # the resident set size of the worker's process

    @classmethod
    def of(cls, reading: RankReading) -> Self:
        return cls(
            at=reading.taken_at,
            total_bytes=reading.total_bytes,
            used_bytes=reading.used_bytes,
            free_bytes=reading.free_bytes,
            components=reading.components,
            torch_allocated_bytes=reading.torch.allocated_bytes,
            torch_reserved_bytes=reading.torch.reserved_bytes,
            encoder_cache_entries=reading.encoder_cache.entries if reading.encoder_cache is not None else None,
            host_rss_bytes=reading.host_memory.rss_bytes,
        )

    @classmethod
    def of_row(cls, at: float, row: Mapping[str, Any]) -> Self:
        """Return the point of a row of ``GET /memory/history``. Raises KeyError where the row lacks a name."""
        parts = {name: row[name] for name in COMPONENT_NAMES}
        rest = {name: row[name] for name in ROW if name not in parts and name != "used_ratio"}
        return cls(at=at, components=Components(**parts), **rest)

    def row(self) -> dict[str, float | None]:
        return {name: getattr(self.components if name in COMPONENT_NAMES else self, name) for name in ROW}

    @property
    def used_ratio(self) -> float | None:
        return self.used_bytes / self.total_bytes if self.used_bytes is not None and self.total_bytes else None

    @property
    def torch(self) -> TorchMemory:
        return TorchMemory(allocated_bytes=self.torch_allocated_bytes, reserved_bytes=self.torch_reserved_bytes)


def thin(points: Sequence[MemoryPoint], most: int, *, recent: int = 1) -> tuple[MemoryPoint, ...]:
    """Return at most ``most`` points: the last ``recent``, and the fullest of each stretch before them.

    A rise that lasted for one point must not fall between two that are kept.
    """
    room = most - recent
    if len(points) <= most or room < 1:
        return tuple(points[-most:])
    earlier, last = points[: len(points) - recent], points[len(points) - recent :]
    bounds = [index * len(earlier) // room for index in range(room + 1)]
    highest = (max(earlier[start:end], key=lambda point: point.used_bytes or 0) for start, end in pairwise(bounds))
    return (*highest, *last)
