"""The most that a command line can need of host memory, by vLLM's own rules: processor caches, and ``/dev/shm``. Pure.

The rules of ``/dev/shm`` are data, each with the place in vLLM's source that it is from; users whose need is not known
are named, and never counted as zero. The processor caches hold prepared images, audio and video, limited for each copy.
Their copies by process (vLLM 0.11 to 0.32, the same rule in all of them):

- One API server, and one engine behind it: ``lru`` keeps the data in EngineCore and its keys in the API server; ``shm``
  keeps the data once, in a ring in ``/dev/shm`` (vllm 0.12.0 multimodal/cache.py:382 and :440, vllm 0.32.0
  multimodal/cache/lru.py:22, vllm 0.32.0 multimodal/cache/shm.py:64).
- Several API servers or engines: each API server keeps the data for itself, and EngineCore none (vllm 0.23.0
  multimodal/registry.py:283, vllm 0.32.0 multimodal/cache/factories.py:37).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias

from highwater.host.reading import EngineMemorySettings, HostReading
from highwater.model.rank import RESPONSE_SCHEMA, device_traits
from highwater.model.units import GIB, MIB

CacheKind: TypeAlias = Literal["off", "lru", "shm", "processor_only", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCopy:
    """The copies in the processes of one role, or in ``shm``: the data, or its keys where another copy has the data."""

    where: str
    copies: int
    limit_bytes: int
    holds: Literal["data", "keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounts:
    """Counters from the engine's ``/metrics`` and its workers; ``None`` where not known.

    Attributes:
        queries: Items looked up since the engine's start, by its ``/metrics``; ``hits``: those found.
        spilled_bytes: Encoder outputs that a trim has moved to host memory.
        pinned_bytes: Host memory that PyTorch keeps locked in place for copies, in use or not.
    """

    queries: int | None = None
    hits: int | None = None
    spilled_bytes: int | None = None
    pinned_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorCaches(CacheCounts):
    """All copies of the processor cache.

    Attributes:
        kind: ``unknown`` where no worker reports the settings.
        limit_bytes: ``mm_processor_cache_gb`` in bytes: of each copy.
        max_bytes: The most that all copies can take in total, on this machine.
        used_bytes: The present size, where that is known: of ``shm``.
    """

    kind: CacheKind
    copies: tuple[CacheCopy, ...] = ()
    limit_bytes: int | None = None
    max_bytes: int | None = None
    used_bytes: int | None = None
    why: str = ""

    @property
    def hit_ratio(self) -> float | None:
        return self.hits / self.queries if self.queries and self.hits is not None else None

    def may_have_grown(self, where: str | None) -> bool:
        return self.queries != 0 and any(copy.where == where and copy.holds == "data" for copy in self.copies)


NOT_COUNTED: Final = CacheCounts()


def processor_caches(reading: HostReading, counts: CacheCounts = NOT_COUNTED) -> ProcessorCaches:
    size_gb = None if reading.engine is None else reading.engine.mm_processor_cache_gb
    limit = None if size_gb is None else int(size_gb * GIB)
    kind, copies, why = _copies(reading.engine, limit)
    used = None
    if kind == "shm" and reading.shm is not None:
        used = sum(one.used_bytes for one in reading.shm.owners if one.owner == "processor_cache" and one.is_in_use)
    total = sum(one.copies * one.limit_bytes for one in copies if one.holds == "data")
    return ProcessorCaches(
        **asdict(counts),
        kind=kind,
        copies=copies,
        limit_bytes=limit,
        max_bytes=None if kind == "unknown" else total,
        used_bytes=used,
        why=why,
    )


def _copies(engine: EngineMemorySettings | None, limit: int | None) -> tuple[CacheKind, tuple[CacheCopy, ...], str]:
    if engine is None:
        return "unknown", (), "no worker reports the engine's settings"
    if engine.is_multimodal is False or limit == 0:
        why = "the model takes text alone" if engine.is_multimodal is False else "mm_processor_cache_gb is 0"
        return "off", (), why
    if limit is None:
        return "unknown", (), "this engine does not show mm_processor_cache_gb"

    def held(where: str, copies: int = 1, holds: Literal["data", "keys"] = "data") -> CacheCopy:
        return CacheCopy(where=where, copies=copies, limit_bytes=limit, holds=holds)

    servers = max(1, engine.api_servers or 1)
    engines = 1 if engine.external_lb else max(1, engine.data_parallel or 1)
    if servers > 1 or engines > 1:
        why = f"with {servers} API servers and {engines} engines each API server keeps the data for itself"
        return "processor_only", (held("api_server", servers),), why
    if engine.mm_processor_cache_type == "shm":
        return "shm", (held("shm"),), "one ring in /dev/shm has the data, for the API server and all workers"
    why = "EngineCore holds the data; the API server holds only its keys"
    return "lru", (held("engine_core"), held("api_server", holds="keys")), why


# --- /dev/shm ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmNeed:
    """One user of ``/dev/shm``: the most that it can take, the arithmetic, and the place in vLLM's source.

    Attributes:
        bytes: ``None``: not known, and ``why`` gives the reason.
        owner: The owner of its files, as in ``ShmOwner``.
    """

    __pydantic_config__ = RESPONSE_SCHEMA

    name: str
    bytes: int | None = None
    owner: str
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmNeeds:
    """All users, and the sum of the needs that are known.

    ``/dev/shm`` is too small by ``short_bytes`` for them and its other files; ``None`` where it cannot be seen, or no
    worker reports the settings.
    """

    rows: tuple[ShmNeed, ...] = ()
    known_bytes: int | None = None
    short_bytes: int | None = None

    @property
    def unknown(self) -> tuple[ShmNeed, ...]:
        return tuple(row for row in self.rows if row.bytes is None)


_CHUNK: Final = " (VLLM_MQ_MAX_CHUNK_BYTES_MB)"
_TO_WORKERS: Final = (
    "vllm 0.12.0 v1/executor/multiproc_executor.py:140, vllm 0.32.0 v1/executor/multiproc_executor.py:151"
)
_FROM_WORKERS: Final = (
    "vllm 0.12.0 v1/executor/multiproc_executor.py:490, vllm 0.32.0 v1/executor/multiproc_executor.py:624"
)
_IN_GROUPS: Final = "vllm 0.12.0 distributed/parallel_state.py:374, vllm 0.32.0 distributed/parallel_state.py:563"


# When it is there, its name, the owner of its files, and why its size is not known.
_UNSIZED: Final[tuple[tuple[Callable[[EngineMemorySettings], bool], str, str, str], ...]] = (
    (lambda one: one.executor == "ray", "Ray", "ray", "its object store takes 30 % of the machine by default"),
    (lambda one: (one.nodes or 1) > 1, "several machines", "rpc_rings", "the rings between machines differ"),
    (lambda one: bool(one.kv_offload), "offloaded KV cache or a KV connector", "kv_offload", "by its configuration"),
)


def shm_needs(reading: HostReading) -> ShmNeeds:
    engine = reading.engine
    if engine is None:
        return ShmNeeds()
    rows: list[ShmNeed] = []
    tensor, pipeline = max(1, engine.tensor_parallel or 1), max(1, engine.pipeline_parallel or 1)
    engines = max(1, engine.data_parallel_local or engine.data_parallel or 1)
    is_mp, has_groups = engine.executor == "mp", tensor > 1 and engine.executor != "uni"
    to_workers, workers = engine.max_chunk_mb or 16, engines * tensor * pipeline
    for is_used, name, count, chunks, mib, note, source in (
        (is_mp, "RPC rings from EngineCore to its workers", engines, 10, to_workers, _CHUNK, _TO_WORKERS),
        (is_mp, "RPC rings from workers to EngineCore", workers, 10, 24, "", _FROM_WORKERS),
        (has_groups, "broadcast rings of tensor-parallel groups", engines * pipeline, 6, 4, "", _IN_GROUPS),
    ):
        if is_used:
            why = f"{count} x {chunks} chunks of {mib} MiB{note}"
            size = count * chunks * mib * MIB
            rows.append(ShmNeed(name=name, bytes=size, owner="rpc_rings", why=why, source=source))
    if (collectives := device_traits(engine.device).collectives) is not None and max(tensor, pipeline) > 1:
        rows.append(ShmNeed(name=collectives.name, owner=collectives.owner, why=collectives.why_unsized))
    rows += [ShmNeed(name=name, owner=owner, why=why) for is_there, name, owner, why in _UNSIZED if is_there(engine)]
    caches = processor_caches(reading)
    if caches.kind == "shm":
        source = "vllm 0.12.0 multimodal/cache.py:459, vllm 0.32.0 multimodal/cache/shm.py:82"
        why = "mm_processor_cache_gb with mm_processor_cache_type shm"
        name = "processor cache (shm)"
        rows.append(ShmNeed(name=name, bytes=caches.max_bytes, owner="processor_cache", why=why, source=source))
    known = sum(row.bytes for row in rows if row.bytes is not None)
    shm, short = reading.shm, None
    if shm is not None and shm.size_bytes is not None and shm.used_bytes is not None:
        owners = {row.owner for row in rows if row.bytes is not None}
        theirs = sum(one.used_bytes for one in shm.owners if one.owner in owners and one.is_in_use)
        short = max(0, known + max(0, shm.used_bytes - theirs) - shm.size_bytes)
    return ShmNeeds(rows=tuple(rows), known_bytes=known, short_bytes=short)
