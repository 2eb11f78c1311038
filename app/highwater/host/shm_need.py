"""What a command line can need of ``/dev/shm`` at most, by vLLM's own rules. Pure.

The rules are data, each with the place in vLLM's source that it is from; what no rule covers is named as not known, and
never taken for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from highwater.host.processor_cache import processor_caches
from highwater.host.reading import EngineMemorySettings, HostReading, ShmMemory
from highwater.units import MIB

CHUNKS: Final = 10
BROADCAST_CHUNK_MB: Final = 16
RESPONSE_CHUNK_BYTES: Final = 24 * MIB
GROUP_CHUNK_BYTES: Final = 4 * MIB
GROUP_CHUNKS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmNeed:
    """One user of ``/dev/shm``.

    Attributes:
        name: What an operator calls it.
        bytes: The most that it can take; ``None``: not known.
        owner: The owner of its files, as in ``ShmOwner``.
        why: The arithmetic, or why it is not known.
        source: Where vLLM has it.
    """

    name: str
    bytes: int | None
    owner: str
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmNeeds:
    """All users.

    Attributes:
        rows: One each.
        known_bytes: The sum of those that are known.
        short_bytes: By how much ``/dev/shm`` is too small for them, with what others have in it; ``None`` where it
            cannot be seen, or no worker reports the settings.
    """

    rows: tuple[ShmNeed, ...] = ()
    known_bytes: int | None = None
    short_bytes: int | None = None

    @property
    def unknown(self) -> tuple[ShmNeed, ...]:
        """The users whose needs are not known."""
        return tuple(row for row in self.rows if row.bytes is None)


@dataclass(frozen=True, slots=True)
class _Engine:
    """The settings with their defaults, and what follows from them on this machine."""

    given: EngineMemorySettings
    engines: int
    tensor: int
    workers: int
    groups: int

    @classmethod
    def of(cls, given: EngineMemorySettings) -> _Engine:
        tensor, pipeline = max(1, given.tensor_parallel or 1), max(1, given.pipeline_parallel or 1)
        engines = max(1, given.data_parallel_local or given.data_parallel or 1)
        return cls(given, engines, tensor, tensor * pipeline, pipeline)

    @property
    def is_mp(self) -> bool:
        return self.given.executor == "mp"


def _broadcast(engine: _Engine) -> ShmNeed | None:
    if not engine.is_mp:
        return None
    chunk = (engine.given.max_chunk_mb or BROADCAST_CHUNK_MB) * MIB
    return ShmNeed(
        name="RPC rings from EngineCore to its workers",
        bytes=engine.engines * chunk * CHUNKS,
        owner="rpc_rings",
        why=f"{engine.engines} x {CHUNKS} chunks of {chunk // MIB} MiB (VLLM_MQ_MAX_CHUNK_BYTES_MB)",
        source="vllm 0.12.0 v1/executor/multiproc_executor.py:140, vllm 0.32.0 v1/executor/multiproc_executor.py:151",
    )


def _responses(engine: _Engine) -> ShmNeed | None:
    if not engine.is_mp:
        return None
    count = engine.engines * engine.workers
    return ShmNeed(
        name="RPC rings from workers to EngineCore",
        bytes=count * RESPONSE_CHUNK_BYTES * CHUNKS,
        owner="rpc_rings",
        why=f"{count} x {CHUNKS} chunks of {RESPONSE_CHUNK_BYTES // MIB} MiB",
        source="vllm 0.12.0 v1/executor/multiproc_executor.py:490, vllm 0.32.0 v1/executor/multiproc_executor.py:624",
    )


def _tensor_groups(engine: _Engine) -> ShmNeed | None:
    if engine.tensor < 2 or engine.given.executor == "uni":  # noqa: PLR2004 - one rank is no group
        return None
    count = engine.engines * engine.groups
    return ShmNeed(
        name="broadcast rings of tensor-parallel groups",
        bytes=count * GROUP_CHUNK_BYTES * GROUP_CHUNKS,
        owner="rpc_rings",
        why=f"{count} x {GROUP_CHUNKS} chunks of {GROUP_CHUNK_BYTES // MIB} MiB",
        source="vllm 0.12.0 distributed/parallel_state.py:374, vllm 0.32.0 distributed/parallel_state.py:563",
    )


def _nccl(engine: _Engine) -> ShmNeed | None:
    if engine.given.device != "cuda" or engine.workers == 1:
        return None
    why = "NCCL chooses by topology: tens of MiB for each pair of GPUs without peer access"
    return ShmNeed(name="NCCL", bytes=None, owner="nccl", why=why)


def _hccl(engine: _Engine) -> ShmNeed | None:
    if engine.given.device != "npu" or engine.workers == 1:
        return None
    return ShmNeed(name="HCCL", bytes=None, owner="hccl", why="CANN does not document it")


def _cpu_collectives(engine: _Engine) -> ShmNeed | None:
    if engine.given.device != "cpu" or engine.workers == 1:
        return None
    why = "on processors with AVX-512 alone, by the number of threads"
    source = "vllm 0.32.0 distributed/device_communicators/cpu_communicator.py:41"
    return ShmNeed(name="collectives of the CPU backend", bytes=None, owner="cpu_collectives", why=why, source=source)


def _ray(engine: _Engine) -> ShmNeed | None:
    if engine.given.executor != "ray":
        return None
    return ShmNeed(name="Ray", bytes=None, owner="ray", why="its object store takes 30 % of the machine by default")


def _nodes(engine: _Engine) -> ShmNeed | None:
    if (engine.given.nodes or 1) < 2:  # noqa: PLR2004 - one machine is the rule above
        return None
    return ShmNeed(name="several machines", bytes=None, owner="rpc_rings", why="the rings between machines differ")


def _kv_offload(engine: _Engine) -> ShmNeed | None:
    if not engine.given.kv_offload:
        return None
    why = "by the connector's own configuration"
    return ShmNeed(name="offloaded KV cache or a KV connector", bytes=None, owner="kv_offload", why=why)


_RULES: tuple[Callable[[_Engine], ShmNeed | None], ...] = (
    _broadcast,
    _responses,
    _tensor_groups,
    _nccl,
    _hccl,
    _cpu_collectives,
    _ray,
    _nodes,
    _kv_offload,
)


def shm_needs(reading: HostReading) -> ShmNeeds:
    """Return what this command line can need of ``/dev/shm`` at most, and whether it has it."""
    if reading.engine is None:
        return ShmNeeds()
    engine = _Engine.of(reading.engine)
    rows = [row for rule in _RULES if (row := rule(engine)) is not None]
    caches = processor_caches(reading)
    if caches.kind == "shm":
        source = "vllm 0.12.0 multimodal/cache.py:459, vllm 0.32.0 multimodal/cache/shm.py:82"
        why = "mm_processor_cache_gb with mm_processor_cache_type shm"
        name = "processor cache (shm)"
        rows.append(ShmNeed(name=name, bytes=caches.max_bytes, owner="processor_cache", why=why, source=source))
    known = sum(row.bytes for row in rows if row.bytes is not None)
    return ShmNeeds(rows=tuple(rows), known_bytes=known, short_bytes=_short(rows, known, reading.shm))


def _short(rows: list[ShmNeed], known: int, shm: ShmMemory | None) -> int | None:
    if shm is None or shm.size_bytes is None or shm.used_bytes is None:
        return None
    owners = {row.owner for row in rows if row.bytes is not None}
    theirs = sum(one.used_bytes for one in shm.owners if one.owner in owners)
    return max(0, known + max(0, shm.used_bytes - theirs) - shm.size_bytes)
