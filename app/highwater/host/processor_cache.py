"""vLLM's processor caches: prepared images, audio and video in host memory, limited for each copy. Pure.

Which process holds what (vLLM 0.11 to 0.32, the same rule in all of them):

- One API server, and one engine behind it: ``lru`` keeps the data in EngineCore and its keys in the API server; ``shm``
  keeps the data once, in a ring in ``/dev/shm`` (vllm 0.12.0 multimodal/cache.py:382 and :440, vllm 0.32.0
  multimodal/cache/lru.py:22, vllm 0.32.0 multimodal/cache/shm.py:64).
- Several API servers or engines: each API server keeps the data for itself, and EngineCore none (vllm 0.23.0
  multimodal/registry.py:283, vllm 0.32.0 multimodal/cache/factories.py:37).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from highwater.host.reading import EngineMemorySettings, HostReading
from highwater.units import GIB

CacheKind: TypeAlias = Literal["off", "lru", "shm", "processor_only", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCopy:
    """The copies in the processes of one role.

    Attributes:
        where: The role, or ``shm``.
        copies: How many there are.
        limit_bytes: Of each.
        holds: ``data``, or ``keys`` where another process has the data.
    """

    where: str
    copies: int
    limit_bytes: int
    holds: Literal["data", "keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorCaches:
    """All copies of the processor cache.

    Attributes:
        kind: How it is kept; ``unknown`` where no worker reports the settings.
        copies: Where the copies are.
        limit_bytes: ``mm_processor_cache_gb`` in bytes: of each copy.
        max_bytes: What all copies can take in total; on this machine.
        used_bytes: What it takes now, where that can be told: of ``shm``.
        queries: Items looked up since the engine's start, by its ``/metrics``; hits likewise.
        hits: Items found.
        spilled_bytes: Encoder outputs that a trim has moved to host memory.
        pinned_bytes: Host memory that PyTorch keeps locked in place for copies, in use or not.
        why: In words, how the copies come about.
    """

    kind: CacheKind
    copies: tuple[CacheCopy, ...] = ()
    limit_bytes: int | None = None
    max_bytes: int | None = None
    used_bytes: int | None = None
    queries: int | None = None
    hits: int | None = None
    spilled_bytes: int | None = None
    pinned_bytes: int | None = None
    why: str = ""

    @property
    def hit_ratio(self) -> float | None:
        """The share of items that were found; ``None`` before the first."""
        return self.hits / self.queries if self.queries and self.hits is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounts:
    """Counters from the engine's ``/metrics`` and its workers; ``None`` where not known."""

    queries: int | None = None
    hits: int | None = None
    spilled_bytes: int | None = None
    pinned_bytes: int | None = None


NOT_COUNTED: Final = CacheCounts()


def processor_caches(reading: HostReading, counts: CacheCounts = NOT_COUNTED) -> ProcessorCaches:
    """Return the copies of the processor cache and what they can take.

    Args:
        reading: Has the engine's settings, and ``/dev/shm``.
        counts: What is counted elsewhere.
    """
    kind, copies, why = _copies(reading.engine)
    limit = None
    if reading.engine is not None and reading.engine.mm_processor_cache_gb is not None:
        limit = int(reading.engine.mm_processor_cache_gb * GIB)
    used = None
    if kind == "shm" and reading.shm is not None:
        used = sum(one.used_bytes for one in reading.shm.owners if one.owner == "processor_cache")
    total = sum(one.copies * one.limit_bytes for one in copies if one.holds == "data")
    return ProcessorCaches(
        kind=kind,
        copies=copies,
        limit_bytes=limit,
        max_bytes=None if kind == "unknown" else total,
        used_bytes=used,
        queries=counts.queries,
        hits=counts.hits,
        spilled_bytes=counts.spilled_bytes,
        pinned_bytes=counts.pinned_bytes,
        why=why,
    )


def _copies(engine: EngineMemorySettings | None) -> tuple[CacheKind, tuple[CacheCopy, ...], str]:
    if engine is None:
        return "unknown", (), "no worker reports the engine's settings"
    if engine.is_multimodal is False or not (engine.mm_processor_cache_gb or engine.mm_processor_cache_gb is None):
        return (
            "off",
            (),
            "the model takes text alone" if engine.is_multimodal is False else "mm_processor_cache_gb is 0",
        )
    if engine.mm_processor_cache_gb is None:
        return "unknown", (), "this engine does not show mm_processor_cache_gb"
    limit = int(engine.mm_processor_cache_gb * GIB)
    servers = max(1, engine.api_servers or 1)
    engines = 1 if engine.external_lb else max(1, engine.data_parallel or 1)
    copies: tuple[CacheCopy, ...]
    if servers > 1 or engines > 1:
        copies = (CacheCopy(where="api_server", copies=servers, limit_bytes=limit, holds="data"),)
        why = f"with {servers} API servers and {engines} engines each API server keeps the data for itself"
        return "processor_only", copies, why
    if engine.mm_processor_cache_type == "shm":
        copies = (CacheCopy(where="shm", copies=1, limit_bytes=limit, holds="data"),)
        return "shm", copies, "one ring in /dev/shm has the data, for the API server and all workers"
    copies = (
        CacheCopy(where="engine_core", copies=1, limit_bytes=limit, holds="data"),
        CacheCopy(where="api_server", copies=1, limit_bytes=limit, holds="keys"),
    )
    return "lru", copies, "EngineCore has the data; the API server has its keys alone"
