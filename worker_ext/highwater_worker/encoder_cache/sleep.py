"""The engine's memory pools that are asleep: unmapped, and perhaps used by another process meanwhile.

vLLM's worker is put to sleep and woken by methods of its own, pool by pool (tags such as `weights` and `kv_cache`); no
version keeps a record of it that a worker could read. So the methods are watched from this package's first call on.
Earlier changes are read where the allocator shows them, and are unknown elsewhere.
"""

from __future__ import annotations

import sys
import weakref

from highwater_worker.encoder_cache.spilling_dict import spilling_cache
from highwater_worker.engine_view import backend_is_asleep, look_up
from highwater_worker.errors import Notes, RefusedError
from highwater_worker.wrapping import notice_calls

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


def watch_sleep(worker: object, record: SleepRecord) -> None:
    """Record from now on the pools put to sleep and woken; a second call does nothing. The worker is not kept alive."""
    if record.is_watching:
        return
    record.is_watching = True
    reference = weakref.ref(worker)

    def before_sleep(*_: object, **__: object) -> None:
        # Before the call: the pools go somewhere within it, also where it fails later.
        record.tags |= ALL_TAGS
        record.is_complete = True
        cache = spilling_cache(reference())
        if cache is not None:
            # The engine gives up the whole of the device, and empties the allocator's cache after that.
            cache.restorer.drop_reserve()

    def after_wake_up(_: object, tags: object = None, *__: object, **___: object) -> None:
        record.tags -= record.tags if tags is None else _names(tags)
        record.is_complete = record.is_complete or tags is None
        cache = None if record.tags else spilling_cache(reference())
        if cache is not None:
            cache.restorer.settle(cache, Notes())

    def before_discard(tags: object = None, *_: object, **__: object) -> None:
        record.tags |= _names(tags)

    # `discard` puts single pools to sleep (vllm 0.32.0 v1/worker/gpu_worker.py:358; not in 0.27).
    notice_calls(worker, "sleep", before=before_sleep)
    notice_calls(worker, "wake_up", after=after_wake_up)
    notice_calls(worker, "discard", before=before_discard)


def asleep_tags(worker: object, record: SleepRecord) -> list[str] | None:
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


def refuse_while_asleep(worker: object, record: SleepRecord) -> None:
    """Check that no memory of the engine's is unmapped; `engine_view.refuse_suspended` checks that its device answers.

    Raises RefusedError where some is: another process may use what was given up, and what is taken now may be missing
    when the engine wakes. Where it is unknown nothing is refused: the caller can read /is_sleeping.
    """
    tags = asleep_tags(worker, record)
    if tags:
        raise RefusedError(f"the engine sleeps ({', '.join(tags)}): its memory is not to be touched until it wakes")


def _names(tags: object) -> set[str]:
    if isinstance(tags, str):
        return {tags}
    return set(map(str, tags)) if isinstance(tags, (list, tuple, set, frozenset)) else set()
