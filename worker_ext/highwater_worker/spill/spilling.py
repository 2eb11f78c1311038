"""Puts a cache that can spill in the place of the engine's encoder cache, and refuses where that is dangerous.

That is wherever another object may hold the cache or its tensors, or a step may run beside this call: a missing entry
ends the engine.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any, cast

from highwater_worker.attributes import look_up
from highwater_worker.devices import Device
from highwater_worker.devices.family import on_main_thread
from highwater_worker.encoder_cache.encoder_outputs import find_encoder_cache, spilling_cache
from highwater_worker.encoder_cache.sleep import refuse_while_asleep
from highwater_worker.encoder_cache.spilling_dict import SpillingDict
from highwater_worker.errors import RefusedError
from highwater_worker.spill.restorer import Restorer
from highwater_worker.state import WorkerState, state_of

# What vllm-ascend keeps encoder outputs in while it moves them to host memory itself. Its runners have all three from
# 0.27.1rc1 on, and use them where `use_score_encoder_cache` is set (vllm_ascend 0.27.1rc1
# worker/model_runner_v1.py:589, `__init__`).
ASCENDS_OWN = ("cpu_encoder_cache", "tmp_encoder_cache", "_pending_encoder_cache_copies")


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


def watch(worker: object, device: Device, state: WorkerState) -> SpillingDict | None:
    """Return the cache as a `SpillingDict`, None without one. Raises RefusedError where it must stay as it is."""
    if find_encoder_cache(worker) is None:
        return None
    _refuse_lasting(worker)
    if spilling_cache(worker) is None:
        owner, name = _owner(worker)
        holders = other_holders(owner, name)
        if holders:
            raise RefusedError(f"other code holds the encoder cache's dict ({', '.join(holders)}), and would keep it")
        restorer = Restorer(worker, device, state.allocator_reserve)
        # Complete before it is seen: the engine has the old dict until this one statement is done, then the new.
        setattr(owner, name, SpillingDict(getattr(owner, name), restorer, state.ledger))
    return spilling_cache(worker)


def refuse_trim(worker: object) -> None:
    """Check what `watch` checks, without a search through all objects, and put nothing in place.

    Raises RefusedError where a trim would be refused, or only that search can show it.
    """
    _refuse_lasting(worker)
    if spilling_cache(worker) is None and not is_held_once(*_owner(worker)):
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
    refuse_while_asleep(worker, state_of(worker).sleep)


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
    used = _ascends_own_tier(runner)
    if used is not None:
        yield f"vllm-ascend moves encoder outputs to host memory itself (model_runner.{used})"
    # vLLM's developers can have every wait for the device raise within a step (vllm 0.32.0 utils/gpu_sync_debug.py:42):
    # also the copy that brings an entry back.
    if look_up(sys.modules.get("vllm.utils.gpu_sync_debug"), "_SYNC_CHECK_MODE") == "error":
        yield "VLLM_GPU_SYNC_CHECK=error is set, under which to bring an entry back would end the engine"
    backend = look_up(config, "parallel_config", "distributed_executor_backend")
    is_ray = "ray" in str(backend).lower() or look_up(config, "parallel_config", "use_ray") is True
    if is_ray and not _busy_loop_waits():
        yield f"the executor is Ray's first ({backend}), under which a step may run beside this call"


def _ascends_own_tier(runner: object) -> str | None:
    """Return the sign that vllm-ascend's own host tier is in use, None where it is not."""
    is_on = look_up(runner, "use_score_encoder_cache")
    if is_on is not None:
        return "use_score_encoder_cache is set" if is_on else None
    held = (name for name in ASCENDS_OWN if (value := look_up(runner, name)) is not None and len(value))
    return next((f"{name} is in use" for name in held), None)


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


def _owner(worker: object) -> tuple[Any, str]:
    runner = look_up(worker, "model_runner")
    cache = look_up(runner, "encoder_cache")
    return (runner, "encoder_cache") if isinstance(cache, dict) else (cache, "encoder_outputs")


def restorer_of(cache: SpillingDict) -> Restorer:
    return cast("Restorer", cache.restorer)
