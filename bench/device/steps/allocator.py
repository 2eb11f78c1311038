"""Step 2: PyTorch's allocator: `releasable_bytes` against what `release` gave, under each setting of the allocator."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

from bench.device.child import run_child
from bench.device.results import Findings
from bench.device.torch_device import MIB, NO_DEVICE, SIMULATED, Tensor, TorchDevice
from bench.device.worker import KitWorker
from highwater_worker.devices import Device, device_of
from highwater_worker.memory.allocator import AllocatorReserve, kept_bytes
from highwater_worker.state import ATTRIBUTE, state_of

SAYS = "the allocator's reserve: the bytes that `release` can give back, foretold and given"
SETTINGS = {
    "default": "",
    "expandable_segments": "expandable_segments:True",
    "max_split_size": "max_split_size_mb:256",
}
CHECKS: Mapping[str, str] = {
    "foretold_first": "before the first release, `releasable_bytes` is what it gives, within 1 %",
    "foretold_later": "after one, `releasable_bytes` is what the next one gives, within 1 %",
    "driver_gets_it": "the driver gets what the allocator gives, within 1 %",
    "tensors_stay": "tensors that are in use keep their contents through a release",
    "graphs_replay": "a captured graph computes the same after a release",
    "private_pools_kept": "with graphs captured, what is left unused after a release is in the figure of what is kept",
    "no_invented_figure": "where there is no allocator of PyTorch's, `releasable_bytes` is null",
    "release_answers": "`release` reports what the process's memory lost or gained",
}
SHARE = 0.01
# A page of the allocator's small segments: less cannot be given back at all.
PAGE_BYTES = 2 * MIB
ROUNDS = 2
GRAPHS = 4
DAY_SECONDS = 86400.0


def run(on: TorchDevice, found: Findings) -> None:
    """Run every setting with and without graphs, each in a process of its own."""
    if on.is_cpu:
        found.skip(NO_DEVICE, *(name for name in CHECKS if name not in ("no_invented_figure", "release_answers")))
        worker = KitWorker(on, images=on.sizes.images)
        found.equals("no_invented_figure", worker.call("memory")["releasable_bytes"], None)
        worker.cache.clear()
        freed = worker.call("release")
        found.holds("release_answers", isinstance(freed["freed_bytes"], int), f"{freed['freed_bytes']}")
        found.figure("freed_bytes", freed["freed_bytes"], "bytes")
        return
    found.skip("this device has an allocator of PyTorch's", "no_invented_figure")
    if on.is_simulated:
        found.skip(SIMULATED, "graphs_replay")
    variable = "PYTORCH_NPU_ALLOC_CONF" if on.type == "npu" else "PYTORCH_CUDA_ALLOC_CONF"
    for name, setting in SETTINGS.items():
        # Each process costs a simulated device's machine seconds of its processor.
        for graphs in (GRAPHS,) if on.is_simulated and setting else (0, GRAPHS):
            measured = run_child(measure, on, environ={variable: setting}, graphs=graphs)
            pools = "private_pools" if on.is_simulated else "graphs"
            _judge(f"{name}_{pools if graphs else 'no_graphs'}", measured, found)


def _judge(variant: str, measured: dict[str, Any], found: Findings) -> None:
    for number, one in enumerate(measured["rounds"]):
        check = "foretold_later" if number else "foretold_first"
        foretold, gave = one["releasable_bytes"], one["gave_bytes"]
        why = f"{variant}: {foretold} foretold, {gave} given"
        is_right = foretold is not None and abs(foretold - gave) <= max(SHARE * gave, PAGE_BYTES)
        found.holds(check, is_right, why, value=why)
        driver = abs(one["driver_bytes"] - gave) <= max(SHARE * gave, PAGE_BYTES)
        found.holds("driver_gets_it", driver, f"{variant}: {one['driver_bytes']} of {gave}")
        for figure in ("reserve_bytes", "gave_bytes", "floor_bytes"):
            found.figure(f"{variant}_round_{number + 1}_{figure}", one[figure], "bytes")
        found.figure(f"{variant}_round_{number + 1}_walk", one["walk_ms"], "ms")
        found.figure(f"{variant}_round_{number + 1}_blocks", one["blocks"], "blocks")
    found.equals("release_answers", measured["mechanism"], "empty_cache")
    found.holds("tensors_stay", measured["tensors_stay"], f"{variant}: a tensor changed")
    if measured["graphs"]:
        if measured["graphs_replay"] is not None:
            found.holds("graphs_replay", measured["graphs_replay"], f"{variant}: an output changed")
        left, kept = measured["rounds"][-1]["floor_bytes"], measured["pool_bytes"]
        found.holds("private_pools_kept", left >= kept > 0, f"{variant}: {left} left, {kept} in private pools")


def measure(on: TorchDevice, graphs: int) -> dict[str, Any]:
    """Fragment the allocator, foretell and release, twice; the first time nothing is known but its segments."""
    worker = KitWorker(on, images=2)
    worker.execute_model()
    on.wait()
    worker.call("release")
    before = _reserved(on)
    captured = [on.capture(lambda: _intermediates(worker)) for _ in range(graphs)]
    outputs = [_replayed(on, graph) for graph in captured]
    gc.collect()
    worker.call("release")
    pool = max(0, _reserved(on) - before)
    # As a worker that has just captured its graphs: nothing is known of its allocator yet.
    delattr(worker, ATTRIBUTE)
    worker.call("memory")
    reserve, device = state_of(worker).allocator_reserve, device_of(worker)
    rounds, mechanism, stay = [], "", True
    for number in range(ROUNDS):
        kept = _fragmented(on)
        prints = [float(tensor.float().sum()) for tensor in kept]
        blocks, walk_ms = device.block_count(), _walk_ms(device)
        _look_after_a_pause(reserve, device, number + 1)
        foretold = worker.call("memory")
        released = worker.call("release")
        mechanism = released["mechanism"]
        stay = stay and prints == [float(tensor.float().sum()) for tensor in kept]
        was, left = released["before"], released["after"]
        rounds.append(
            {
                "walk_ms": walk_ms,
                "blocks": blocks,
                "releasable_bytes": foretold["releasable_bytes"],
                "reserve_bytes": was["reserved_bytes"] - was["allocated_bytes"],
                "gave_bytes": was["reserved_bytes"] - left["reserved_bytes"],
                "driver_bytes": released["freed_bytes"],
                "floor_bytes": left["reserved_bytes"] - left["allocated_bytes"],
            }
        )
        del kept
    same = all(bool((_replayed(on, graph) == output).all()) for graph, output in zip(captured, outputs, strict=True))
    return {
        "graphs": graphs,
        "rounds": rounds,
        "mechanism": mechanism,
        "tensors_stay": stay,
        "graphs_replay": None if on.is_simulated else same,
        # Of what the graphs took, the outputs are in use; the rest is what a release must leave alone.
        "pool_bytes": max(0, pool - sum(output.nbytes for output in outputs)) if graphs else 0,
    }


def _walk_ms(device: Device) -> float:
    """Return what a look at the allocator's segments costs, in milliseconds."""
    began = time.perf_counter()
    kept_bytes(device.segments(), device.index)
    return (time.perf_counter() - began) * 1000


def _look_after_a_pause(reserve: AllocatorReserve, device: Device, day: int) -> None:
    """Look at the allocator's segments, where it is done again, as if the pause since the last time were over.

    From then on the reserve's clock stands still, so that the operation that follows does not look once more.
    """
    later = time.monotonic() + day * DAY_SECONDS
    reserve.clock = lambda: later
    reserve.look(device)
    reserve.clock = lambda: 0.0


def _intermediates(worker: KitWorker) -> Tensor:
    wide = worker.execute_model().repeat(256, 1)
    return (wide * 2 + wide).sum(dim=0)


def _replayed(on: TorchDevice, graph: tuple[Any, Tensor]) -> Tensor:
    replay, output = graph
    replay()
    on.wait()
    return output.clone()


def _reserved(on: TorchDevice) -> int:
    return int(on.module.memory_stats(on.index)["reserved_bytes.all.current"])


def _fragmented(on: TorchDevice) -> list[Tensor]:
    """Allocate tensors of many sizes, and return every third: segments that are free, in use, and split."""
    sizes = [(1 + 7 * number % 61) * MIB // 2 for number in range(on.sizes.pieces)]
    made = [on.torch.ones(size // 2, dtype=on.dtype, device=on.device) for size in sizes]
    kept = made[::3]
    # Large segments too, whole ones.
    large = [on.empty(size * MIB) for size in (300, 700, 1100)]
    del made, large
    on.wait()
    return kept
