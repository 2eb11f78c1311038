"""Puts a cache that can spill in the place of the engine's encoder cache, and refuses where that is dangerous.

That is wherever another object may hold the cache or its tensors, or a step may run beside this call: a missing entry
ends the engine. An access that fails ends it too, so every harmless way to make room for an entry that comes back is
tried first: the allocator's unused blocks go back to the device; idle entries go to host memory, least recently used
first; the reserve is dropped.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, cast

from highwater_worker.devices import Device, on_main_thread
from highwater_worker.encoder_cache.mover import HostCopies, Mover, RestoreReserve, Target, read_host_budget
from highwater_worker.encoder_cache.spilling_dict import FREEING, Spilled, SpillingDict, spilling_cache
from highwater_worker.engine_view import encoder_cache_place, find_encoder_cache, is_rays, look_up
from highwater_worker.errors import Notes, RefusedError
from highwater_worker.memory.allocator import AllocatorReserve
from highwater_worker.memory.storages import Tensor, view_bytes
from highwater_worker.state import refuse_while_asleep, state_of
from highwater_worker.wrapping import wrap_method

# What vllm-ascend keeps encoder outputs in while it moves them to host memory itself. Its runners have all three from
# 0.27.1rc1 on, and use them where `use_score_encoder_cache` is set (vllm_ascend 0.27.1rc1
# worker/model_runner_v1.py:589, `__init__`).
ASCENDS_OWN = ("cpu_encoder_cache", "tmp_encoder_cache", "_pending_encoder_cache_copies")
_FREEING_IS_SEEN = "_highwater_freeing"


def other_holders(owner: object, name: str) -> list[str]:
    """Return the types of the objects, besides its owner, that refer to `owner.name`.

    References are counted first, which takes no time and misses none. Only where there are too many does the garbage
    collector look for them: it walks every object, and sees neither references in C nor objects that the engine has
    frozen (`gc.freeze()` after warming up: vllm 0.32.0 v1/worker/gpu_worker.py:1082, `compile_or_warm_up_model`, and
    vllm 0.33.0 v1/worker/gpu_worker.py:1114, which that wraps). A
    frame is not a holder: it belongs to a call that ends.
    """
    if is_held_once(owner, name):
        return []
    own = {id(owner), id(getattr(owner, "__dict__", None))}
    holders = [holder for holder in gc.get_referrers(getattr(owner, name)) if id(holder) not in own]
    kinds = sorted({type(holder).__name__ for holder in holders} - {FrameType.__name__})
    if not kinds and gc.get_freeze_count():
        return ["something that cannot be seen"]
    return kinds


def is_held_once(owner: object, name: str) -> bool:
    """Return whether nothing but its owner refers to `owner.name`; a frame of a call under way counts here too."""
    # The same expression on an object that is surely held once says how many references the expression makes itself.
    return _references(owner, name) <= _references(SimpleNamespace(held={}), "held")


def _references(owner: object, name: str) -> int:
    return sys.getrefcount(getattr(owner, name))


def watch(worker: object, device: Device) -> SpillingDict | None:
    """Return the cache as a `SpillingDict`, None without one. Raises RefusedError where it must stay as it is."""
    if (place := encoder_cache_place(worker)) is None:
        return None
    _refuse_lasting(worker)
    if spilling_cache(worker) is None:
        owner, name = place
        holders = other_holders(owner, name)
        if holders:
            raise RefusedError(f"other code holds the encoder cache's dict ({', '.join(holders)}), and would keep it")
        state = state_of(worker)
        restorer = Restorer(worker, device, state.allocator_reserve)
        # Complete before it is seen: the engine has the old dict until this one statement is done, then the new.
        setattr(owner, name, SpillingDict(getattr(owner, name), restorer, state.ledger))
        with suppress(Exception):  # an entry that comes back to be freed is slow, not wrong
            _watch_freeing(owner, name)
    return spilling_cache(worker)


def _watch_freeing(owner: object, name: str) -> None:
    """Have `owner.name` know while the engine frees entries. Raises TypeError where `owner` has no weak references."""
    reference = weakref.ref(owner)

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def freeing(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
            cache = getattr(reference(), name, None)
            if not isinstance(cache, SpillingDict):
                return method(*arguments, **named)
            with cache.freeing():
                return method(*arguments, **named)

        setattr(freeing, _FREEING_IS_SEEN, True)
        return freeing

    for method in FREEING:
        if not hasattr(getattr(owner, method, None), _FREEING_IS_SEEN):  # the cache before this one was watched
            wrap_method(owner, method, make)


def refuse_trim(worker: object) -> None:
    """Check what `watch` checks, without a search through all objects, and put nothing in place.

    Raises RefusedError where a trim would be refused, or only that search can show it.
    """
    _refuse_lasting(worker)
    place = encoder_cache_place(worker)
    if place is not None and spilling_cache(worker) is None and not is_held_once(*place):
        raise RefusedError("other code may hold the encoder cache's dict; only a trim searches for it")


def _refuse_lasting(worker: object) -> None:
    refuse_now(worker)
    reason = next(_reasons_in_the_configuration(worker), None) or _foreign_dict(worker)
    if reason is not None:
        raise RefusedError(reason)


def _foreign_dict(worker: object) -> str | None:
    # In a function of its own, with whose end its references to the dict go: they would look like another holder's.
    cache = find_encoder_cache(worker)
    if cache is None or type(cache) in (dict, SpillingDict):
        return None
    name = type(cache).__name__
    return f"the encoder cache is a {name}: a foreign dict, which may do more than hold entries"


def refuse_now(worker: object) -> None:
    """Check what may change between two calls; raises RefusedError where tensors must not be moved now."""
    if not on_main_thread():
        raise RefusedError("this is not the worker's main thread, on which its steps run: one may be running now")
    refuse_while_asleep(worker)


def _reasons_in_the_configuration(worker: object) -> Iterator[str]:
    config, runner = look_up(worker, "vllm_config"), look_up(worker, "model_runner")
    if config is None:
        yield "the worker has no vllm_config: other users of its encoder cache are unknown"
    connector = look_up(config, "ec_transfer_config")
    if connector is not None:
        # They keep the dict (vllm 0.32.0 v1/worker/gpu/ec_connector.py:42), compare the identity of tensors
        # (vllm 0.32.0 distributed/ec_transfer/ec_connector/mooncake/memory.py:482) and copy from raw addresses
        # (vllm 0.32.0 distributed/ec_transfer/ec_connector/mooncake/transfer.py:84).
        name = look_up(connector, "ec_connector")
        yield f"an encoder cache connector is configured (ec_transfer_config: {name}), which uses the same tensors"
    manager = look_up(config, "ec_manager_config", "encoder_cache_manager_cls")
    if manager is not None:
        yield f"an encoder cache manager of its own is configured (encoder_cache_manager_cls: {manager})"
    is_on = look_up(runner, "use_score_encoder_cache")
    held = (name for name in ASCENDS_OWN if (value := look_up(runner, name)) is not None and len(value))
    used = "use_score_encoder_cache is set" if is_on else None
    if is_on is None and (name := next(held, None)):
        used = f"{name} is in use"
    if used is not None:
        yield f"vllm-ascend moves encoder outputs to host memory itself (model_runner.{used})"
    # vLLM's developers can have every wait for the device raise within a step (vllm 0.32.0 utils/gpu_sync_debug.py:42):
    # also the copy that brings an entry back.
    if look_up(sys.modules.get("vllm.utils.gpu_sync_debug"), "_SYNC_CHECK_MODE") == "error":
        yield "VLLM_GPU_SYNC_CHECK=error is set, under which to bring an entry back would end the engine"
    if (is_rays(worker) or look_up(config, "parallel_config", "use_ray") is True) and not _busy_loop_waits():
        backend = look_up(config, "parallel_config", "distributed_executor_backend")
        yield f"the executor is Ray's first ({backend}), under which a step may run beside this call"


def _busy_loop_waits() -> bool:
    """Return whether this call came out of the loop that also runs the worker's steps: none begins before it returns.

    Both vLLM's multiprocessing executor and RayExecutorV2 (the default in 0.23, 0.27 and 0.32)
    run that loop (vllm 0.32.0 v1/executor/ray_executor_v2.py:231, `RayWorkerProc.run`). Ray's first executor has none.
    It runs a method of the worker's in one thread of the actor and steps in another (vllm 0.32.0
    v1/executor/ray_utils.py:144, `execute_model_ray`).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "worker_busy_loop" and str(frame.f_globals.get("__name__")).startswith("vllm"):
            return True
        frame = frame.f_back
    return False


def restorer_of(cache: SpillingDict) -> Restorer:
    return cast("Restorer", cache.restorer)


# --- the way back ---


class Restorer:
    """Brings one cache's entries back; the worker is not kept alive."""

    def __init__(self, worker: object, device: Device, allocator_reserve: AllocatorReserve) -> None:
        self._worker = weakref.ref(worker)
        self._device = device
        self._allocator_reserve = allocator_reserve
        self._copies = HostCopies(device)
        self.reserve = RestoreReserve(device)
        self.host_budget_bytes: int | None = None
        """The limit that the last caller of `trim` gave; entries that make room for others keep to it."""

    @property
    def reserve_bytes(self) -> int:
        return self.reserve.nbytes

    def bring(self, cache: SpillingDict, spilled: Spilled, *, is_urgent: bool) -> Tensor:
        """Return an entry on its device, or raise a RuntimeError where there is still no room.

        An urgent one is needed by the engine now: the copy is not waited for (the engine's next computation comes after
        it on the same stream), and others make room. Else only the allocator's unused blocks do.
        """
        try:
            return self._copies.to_device(spilled, is_waited_for=not is_urgent)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; torch_npu raises it as it is
            failure = error.with_traceback(None)  # whose frames would hold on to what was allocated
        had, freed = self.reserve.nbytes, 0
        tensor: Tensor | None = None
        # Cheapest first; each returns the bytes freed, None where it changed nothing.
        ways: list[Callable[[], int | None]] = [self._empty_cache]
        if is_urgent and not self._device.is_host_memory:  # what goes to the host there stays in the same memory
            ways += [
                partial(self._spill_idle, cache, spilled, view_bytes(spilled.host)),
                partial(self._spill_idle, cache, spilled, None),  # where the device is in fragments
                self._use_reserve,
                self._empty_cache,
            ]
        for make_room in ways:
            try:
                made = make_room()
                if made is None:
                    continue
                freed += made
                tensor = self._copies.to_device(spilled, is_waited_for=not is_urgent)
            except Exception:  # noqa: BLE001, S112 - the next way is tried; the engine gets the failure that began it
                continue
            break
        if is_urgent:
            # What is left of the reserve and of the room that others made stays kept: foreign allocations may have
            # taken the rest of the device, and these bytes are the way back of the next entry.
            left = had + freed - (0 if tensor is None else view_bytes(tensor))
            self._grow_reserve(min(left, self._required_bytes(cache)))
        if tensor is None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame: a cycle that would keep the callers' tensors
        return tensor

    def settle(self, cache: SpillingDict, notes: Notes, freed: int = 0) -> None:
        """Make the reserve as large as the largest group in host memory; where that is impossible, it is noted.

        On a full device the bytes that were just freed are kept instead: entries that come back one by one take the
        reserve with them, and the bytes that they leave are the next one's way back.
        """
        wanted, had = self._required_bytes(cache), self.reserve.nbytes
        if not self.reserve.resize(wanted):
            self._grow_reserve(min(wanted, had + freed))
            notes.add(
                "encoder_cache.restore_reserve_bytes",
                f"{self.reserve.nbytes} instead of {wanted}: the device has no room for more",
            )

    def drop_reserve(self) -> None:
        self.reserve.drop()

    def _empty_cache(self) -> int:
        self._device.give_back()
        # Our own reserve is in use, and so no part of what is left unused.
        self._allocator_reserve.learn_after_release(self._device, self._device.allocator(Notes()))
        return 0

    def _spill_idle(self, cache: SpillingDict, spilled: Spilled, asked: int | None) -> int | None:
        worker, notes = self._worker(), Notes()
        mover = Mover(self._device, notes)
        plan = mover.plan(worker, cache, Target())
        # Entries of the same group that came back are most likely needed by the same request.
        idle = [group for group in plan.groups if all(cache.group(key) is not spilled.group for key in group.tensors)]
        del plan  # it holds the tensors, and the device gets them back with the last reference
        try:
            budget = read_host_budget(worker, self.host_budget_bytes, cache.host_bytes(), notes).left
        except RefusedError:  # nothing is known of the host's memory
            return None
        mover.spill(cache, idle, asked, budget)
        if not mover.entries:
            return None
        self._empty_cache()
        return mover.device_bytes

    def _use_reserve(self) -> int | None:
        if not self.reserve.nbytes:
            return None
        self.reserve.drop()
        return 0

    def _grow_reserve(self, nbytes: int) -> None:
        if nbytes > self.reserve.nbytes:
            self.reserve.resize(nbytes)

    @staticmethod
    def _required_bytes(cache: SpillingDict) -> int:
        return max((value.group.nbytes for value in cache.spilled().values()), default=0)
