"""The state of a worker that is kept between two calls, in one private object on it; and the pools that are asleep.

A pool of the engine's memory that is asleep is unmapped, and perhaps used by another process meanwhile. A worker is
put to sleep and woken by methods of its own, pool by pool (tags such as `weights` and `kv_cache`); no version keeps a
record of it that a worker could read. So the methods are watched from this package's first call on. Earlier changes
are read where the allocator shows them, and are unknown elsewhere.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

from highwater_worker.engine_view import backend_is_asleep, find_encoder_cache, look_up
from highwater_worker.errors import Notes, RefusedError
from highwater_worker.memory.allocator import AllocationHistory, AllocatorReserve
from highwater_worker.memory.start_phases import StartPhases
from highwater_worker.memory.storages import Residency, WeightCount
from highwater_worker.wrapping import notice_calls

ATTRIBUTE = "_highwater_state"
ALL_TAGS = frozenset({"weights", "kv_cache"})
"""All pools that `sleep` takes (vllm 0.12.0 v1/executor/abstract.py:304, vllm 0.32.0 v1/executor/abstract.py:37)."""

# Singletons that hold the pools: CUDA's and Ascend's.
ALLOCATORS = (
    ("vllm.device_allocator.cumem", "CuMemAllocator"),
    ("vllm_ascend.device_allocator.camem", "CaMemAllocator"),
)


class SleepRecord:
    def __init__(self) -> None:
        self.is_watching = False
        self.tags: set[str] = set()  # the pools that are asleep, as far as the calls show
        self.is_complete = False
        """True where the calls show everything: all pools were put to sleep or woken at once since they are watched."""


@dataclass
class Ledger:
    """The moves since the engine started, counted in entries; an entry that went twice counts twice."""

    spills: int = 0
    restores: int = 0
    restore_seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        return {
            "spills": self.spills,
            "restores": self.restores,
            "restore_seconds": round(self.restore_seconds, 6),
        }


@dataclass
class WorkerState:
    index: object = None
    """The index of the encoder cache that operations keep; `encoder_cache.index.read_index` returns it."""
    residency: Residency = field(default_factory=Residency)
    ledger: Ledger = field(default_factory=Ledger)
    """The counts of moves between device and host; they outlive a cache that the engine makes anew."""
    sleep: SleepRecord = field(default_factory=SleepRecord)
    weights: WeightCount = field(default_factory=WeightCount)
    allocator_reserve: AllocatorReserve = field(default_factory=AllocatorReserve)
    history: AllocationHistory = field(default_factory=AllocationHistory)
    start: StartPhases | None = None  # None where the plugin did not see it
    has_warned: bool = False  # that no recorder could be started
    recorder: object = None
    """The recorder that was started last, running or not; `running_recorder` of `recorder` returns it."""


def state_of(worker: object) -> WorkerState:
    """Return the worker's state, made at the first call: a mixed-in class has no `__init__` that runs."""
    state = getattr(worker, ATTRIBUTE, None)
    if not isinstance(state, WorkerState):
        state = WorkerState()
        setattr(worker, ATTRIBUTE, state)
    return state


# --- sleep ---


def watch_sleep(worker: object) -> None:
    """Record from now on the pools put to sleep and woken; a second call does nothing. The worker is not kept alive."""
    record = state_of(worker).sleep
    if record.is_watching:
        return
    record.is_watching = True
    reference = weakref.ref(worker)

    def before_sleep(*_: object, **__: object) -> None:
        # Before the call: the pools go somewhere within it, also where it fails later.
        record.tags |= ALL_TAGS
        record.is_complete = True
        restorer = look_up(find_encoder_cache(reference()), "restorer")  # of an `encoder_cache.spilling_dict`
        if restorer is not None:
            # The engine gives up the whole of the device, and empties the allocator's cache after that.
            restorer.drop_reserve()

    def after_wake_up(_: object, tags: object = None, *__: object, **___: object) -> None:
        record.tags -= record.tags if tags is None else _names(tags)
        record.is_complete = record.is_complete or tags is None
        cache = None if record.tags else find_encoder_cache(reference())
        if (restorer := look_up(cache, "restorer")) is not None:
            restorer.settle(cache, Notes())

    def before_discard(tags: object = None, *_: object, **__: object) -> None:
        record.tags |= _names(tags)

    # `discard` puts single pools to sleep (vllm 0.32.0 v1/worker/gpu_worker.py:358; not in 0.27).
    notice_calls(worker, "sleep", before=before_sleep)
    notice_calls(worker, "wake_up", after=after_wake_up)
    notice_calls(worker, "discard", before=before_discard)


def asleep_tags(worker: object) -> list[str] | None:
    record = state_of(worker).sleep
    allocations = [
        data
        for module, name in ALLOCATORS
        for data in list((look_up(sys.modules.get(module), name, "instance", "pointer_to_data") or {}).values())
    ]
    # From vLLM 0.27 on; vllm-ascend has no such thing.
    is_shown = all(look_up(data, "is_asleep") is not None for data in allocations)
    tags = record.tags | {str(look_up(data, "tag")) for data in allocations if is_shown and look_up(data, "is_asleep")}
    # Of other backends than the allocators, and of engines that fell asleep unwatched.
    if not tags and backend_is_asleep(worker):
        tags = set(ALL_TAGS)
    if not is_shown and not record.is_complete:
        # Copies show pools that fell asleep unwatched; a wake-up drops them.
        tags |= {str(look_up(data, "tag")) for data in allocations if look_up(data, "cpu_backup_tensor") is not None}
        tags |= {"weights"} if look_up(worker, "_sleep_saved_buffers") else set()
        return sorted(tags) if tags else None
    return sorted(tags)


def refuse_while_asleep(worker: object) -> None:
    """Check that no memory of the engine's is unmapped; `engine_view.refuse_suspended` checks that its device answers.

    Raises RefusedError where some is: another process may use what was given up, and what is taken now may be missing
    when the engine wakes. Where it is unknown nothing is refused: the caller can read /is_sleeping.
    """
    tags = asleep_tags(worker)
    if tags:
        raise RefusedError(f"the engine sleeps ({', '.join(tags)}): its memory is not to be touched until it wakes")


def _names(tags: object) -> set[str]:
    if isinstance(tags, str):
        return {tags}
    return set(map(str, tags)) if isinstance(tags, (list, tuple, set, frozenset)) else set()
