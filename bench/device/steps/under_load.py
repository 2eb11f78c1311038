"""Step 4: `release`, `trim`, `restore` and `snapshot` between the steps of a running loop, two hundred times."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

from bench.device.results import Findings
from bench.device.torch_device import NO_DEVICE, Tensor, TorchDevice
from bench.device.worker import KitWorker, RefusedCallError

SAYS = "operations under load: how long the step loop stands still, and that no step computes anything wrong"
CHECKS: Mapping[str, str] = {
    "results": "no step's output changed, over two hundred operations between steps (forty on a CPU)",
    "entries": "no encoder output changed meanwhile",
    "operations": "every operation on the worker succeeded",
    "trims_moved": "the trims moved encoder outputs, and accesses brought them back",
    "snapshot": "a snapshot is made of the allocator, with its segments",
    "snapshot_refused": "where there is no allocator of PyTorch's, a snapshot is refused with the reason",
    "release_standstill": "the step loop stands still for at most 2 s for a `release`",
    "release_computes": "on a CPU, whose cores others share, a `release` computes for at most 2 s",
}
STEPS_BETWEEN = 5
MAX_RELEASE_MS = 2000.0
OPERATIONS = ("release", "snapshot", "trim", "memory")


def run(on: TorchDevice, found: Findings) -> None:
    """Run the loop."""
    worker = KitWorker(on, images=4)
    entries = {key: float(value.double().sum()) for key, value in dict.items(worker.cache)}
    step = _step(on, worker)
    expected = step().clone()
    on.wait()
    standstill: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    computed: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    wrong, failed, moved = 0, [], 0
    operations = [name for name in OPERATIONS if name != "snapshot" or not on.is_cpu]
    for number in range(on.sizes.operations):
        outputs = [step() for _ in range(STEPS_BETWEEN)]  # on the stream, and not waited for
        op = operations[number % len(operations)]
        began = time.thread_time()
        try:
            answer = worker.call(op, **({"dry_run": True} if op == "snapshot" else {}))
            standstill[op].append(answer["elapsed_ms"])
            computed[op].append((time.thread_time() - began) * 1000)
            moved += answer.get("spilled_entries", 0)
        except RefusedCallError as refusal:
            failed.append(str(refusal))
        # The engine reads an entry for the next step; a spilled one comes back.
        key = list(entries)[number % len(entries)]
        wrong += float(worker.cache[key].double().sum()) != entries[key]
        outputs.append(step())
        wrong += sum(not on.torch.equal(output, expected) for output in outputs)
    found.holds("operations", not failed, "; ".join(failed[:3]))
    found.holds("results", wrong == 0, f"{wrong} results differ", value=on.sizes.operations)
    changed = [key for key, value in entries.items() if float(worker.cache[key].double().sum()) != value]
    found.holds("entries", not changed, f"{len(changed)} differ")
    restores = worker.call("memory")["encoder_cache"]["restores"]
    found.holds("trims_moved", moved > 0 and restores > 0, f"{moved} moved, {restores} brought back", value=moved)
    for op, taken in standstill.items():
        if taken:
            found.figure(f"{op}_median", statistics.median(taken), "ms")
            found.figure(f"{op}_longest", max(taken), "ms")
    found.figure("python_objects", len(gc.get_objects()), "objects")
    # Nobody else uses a device's cores; those of a CPU, also under a simulated device, others may have for seconds.
    of_clock, of_cpu, is_shared = "release_standstill", "release_computes", on.is_cpu or on.is_simulated
    judged, left_out, times = (of_cpu, of_clock, computed) if is_shared else (of_clock, of_cpu, standstill)
    found.at_most(judged, max(times["release"]), MAX_RELEASE_MS, "ms")
    found.skip("a device is judged by the clock, a CPU by its own time", left_out)
    _snapshot(on, worker, found)


def _step(on: TorchDevice, worker: KitWorker) -> Callable[[], Tensor]:
    """Return one step of the loop: a graph's replay on a device, as engines run; the model itself on a CPU."""
    if on.is_cpu:
        return worker.execute_model
    replay, output = on.capture(worker.execute_model)

    def replayed() -> Tensor:
        replay()
        return output.clone()

    return replayed


def _snapshot(on: TorchDevice, worker: KitWorker, found: Findings) -> None:
    if not on.is_cpu:
        found.skip("this device has an allocator of PyTorch's", "snapshot_refused")
        answer = worker.call("snapshot", dry_run=True)
        found.at_least("snapshot", answer["segments"], 1, "segments")
        found.figure("snapshot_bytes", answer["bytes"], "bytes")
        found.figure("snapshot_blocks", answer["blocks"], "blocks")
        return
    found.skip(NO_DEVICE, "snapshot")
    try:
        said = str(worker.call("snapshot", dry_run=True))
        is_refused = False
    except RefusedCallError as refusal:
        said, is_refused = str(refusal), "snapshot" in str(refusal)
    found.holds("snapshot_refused", is_refused, said)
