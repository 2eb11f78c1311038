"""vLLM's processor caches: prepared images, audio and video in host memory, limited for each copy. Pure.

The copies by process (vLLM 0.11 to 0.32, the same rule in all of them):

- One API server, and one engine behind it: ``lru`` keeps the data in EngineCore and its keys in the API server; ``shm``
  keeps the data once, in a ring in ``/dev/shm`` (vllm 0.12.0 multimodal/cache.py:382 and :440, vllm 0.32.0
  multimodal/cache/lru.py:22, vllm 0.32.0 multimodal/cache/shm.py:64).
- Several API servers or engines: each API server keeps the data for itself, and EngineCore none (vllm 0.23.0
  multimodal/registry.py:283, vllm 0.32.0 multimodal/cache/factories.py:37).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias

from highwater.host.reading import EngineMemorySettings, HostReading
from highwater.units import GIB

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
        queries: Items looked up since the engine's start, by its ``/metrics``; likewise ``hits``, those found.
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
