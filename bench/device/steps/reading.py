"""Step 1: the worker's reading of its device, against the driver's and against what was allocated here."""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from bench.device.child import child_beside
from bench.device.results import Findings
from bench.device.torch_device import MIB, NO_DEVICE, SIMULATED, TorchDevice, tool
from bench.device.worker import KitWorker, weights_bytes
from highwater_worker.devices import HostMemory, device_of
from highwater_worker.errors import Notes
from highwater_worker.kernel.proc import rss_bytes
from highwater_worker.recorder.reading import Depth, MemoryReader

SAYS = "the worker's reading: parts, identity, neighbours on the device, cost of a sample"
CHECKS: Mapping[str, str] = {
    "weights": "`weights_bytes` is what the model's parameters have",
    "kv_cache": "`kv_cache_bytes` is the size of the KV cache",
    "encoder_cache": "the encoder cache's `device_bytes` is the size of its storages, each counted once",
    "components_fit": "the product's components fit into the used bytes, and none had to be cut",
    "non_torch": "what is left over for `non_torch` is what the process used before it allocated anything",
    "allocated_follows": "a new tensor raises `allocated_bytes` by its size, padding of up to 512 bytes included",
    "used_follows": "the same tensor raises `used_bytes` by its size, as far as the allocator had to ask the driver",
    "driver_agrees": "`used_bytes` is what the driver's own tool shows as used",
    "uuid": "`uuid` is the identity that the driver's own tool shows",
    "neighbour_in_used": "another process on the device raises `used_bytes` by what it took",
    "neighbour_not_ours": "and it changes nothing of this worker's own figures",
    "neighbour_same_device": "both processes report the same device",
    "mig": "a slice of a GPU (MIG) reports its own identity and its own size",
    "sample_cost": "a recorder's sample on the main thread costs at most 1 ms, by the median",
    "sample_does_not_wait": "a sample returns while the device still computes",
}
MAX_SAMPLE_MS = 1.0
# Libraries load their kernels when they are first used.
MAX_LIBRARIES_BYTES = 1024 * MIB
# torch_npu adds 32 bytes where CANN and the chip want them (torch_npu 2.13.0 csrc/core/npu/NPUCachingAllocator.cpp),
# and the allocator rounds to blocks of 512.
MAX_PADDING_BYTES = 512
PROBE_BYTES = 256 * MIB
# What the driver's tool and PyTorch see at two moments, and round.
AGREE_BYTES = 64 * MIB
SAMPLES = 300


def run(on: TorchDevice, found: Findings) -> None:
    """Take all readings."""
    before = on.space()
    worker = KitWorker(on, images=on.sizes.images)
    on.wait()
    answer = worker.call("memory")
    _parts(on, worker, answer, found)
    _accounting(on, answer, before, found)
    _identity(on, answer, found)
    _follows(on, worker, found)
    _neighbour(on, worker, found)
    _mig(on, answer, found)
    _samples(on, worker, found)


def _parts(on: TorchDevice, worker: KitWorker, answer: dict[str, Any], found: Findings) -> None:
    sizes = on.sizes
    found.equals("weights", answer["weights_bytes"], weights_bytes(worker))
    found.equals("kv_cache", answer["kv_cache_reserved_bytes"], sizes.kv_bytes)
    image = sizes.tokens * sizes.width * on.torch.empty(0, dtype=on.dtype).element_size()
    found.equals("encoder_cache", answer["encoder_cache"]["device_bytes"], sizes.images * image)
    found.figure("elapsed_ms", answer["elapsed_ms"], "ms")


def _accounting(on: TorchDevice, answer: dict[str, Any], before: tuple[int, int], found: Findings) -> None:
    try:
        from pydantic import TypeAdapter  # noqa: PLC0415 - the one step that needs it runs without it, too

        from highwater.model.components import account  # noqa: PLC0415 - as above
        from highwater.model.rank import WorkerMemory  # noqa: PLC0415 - as above
    except ImportError as missing:
        found.skip(f"needs {missing.name}, which is not installed here", "components_fit", "non_torch")
        return
    reading = account(TypeAdapter(WorkerMemory).validate_python(answer))
    cut = [note.reason for note in reading.notes if "fit into used" in note.reason]
    found.holds("components_fit", not cut, "; ".join(cut))
    for name in ("weights", "kv_cache", "encoder_cache", "other_tensors", "torch_cached", "non_torch"):
        value = getattr(reading.components, f"{name}_bytes")
        if value is not None:
            found.figure(f"{name}_bytes", value, "bytes")
    if on.is_cpu:
        found.skip(NO_DEVICE, "non_torch")
        return
    outside = before[1] - before[0]
    found.at_most("non_torch", abs((reading.components.non_torch_bytes or 0) - outside), MAX_LIBRARIES_BYTES, "bytes")


def _identity(on: TorchDevice, answer: dict[str, Any], found: Findings) -> None:
    if on.type != "cuda":
        why = NO_DEVICE if on.is_cpu else "npu-smi shows no identity that can be compared"
        found.skip(why, "uuid", "driver_agrees")
        return
    row = tool("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits", "-i", _smi_index(answer))
    if row is None:
        found.skip("nvidia-smi is not installed, or does not answer here", "uuid", "driver_agrees")
        return
    uuid, used = (part.strip() for part in row.split(","))
    if str(answer["device"]["uuid"]).startswith("MIG-"):
        found.skip("the device is a slice, and nvidia-smi's row is the whole GPU's", "uuid", "driver_agrees")
        return
    found.equals("uuid", answer["device"]["uuid"], uuid)
    # nvidia-smi counts what the driver keeps for itself, mem_get_info's total is without it.
    reserved = tool("nvidia-smi", "--query-gpu=memory.reserved", "--format=csv,noheader,nounits", "-i", uuid)
    driver = int(reserved) * MIB if reserved is not None and reserved.isdigit() else 0
    difference = abs(int(used) * MIB - answer["used_bytes"])
    found.at_most("driver_agrees", min(difference, abs(difference - driver)), AGREE_BYTES, "bytes")


def _smi_index(answer: dict[str, Any]) -> str:
    index = answer["device"]["physical_index"]
    return str(answer["device"]["index"] if index is None else index)


def _follows(on: TorchDevice, worker: KitWorker, found: Findings) -> None:
    if on.is_cpu:
        found.skip(NO_DEVICE, "allocated_follows", "used_follows")
        return
    before = worker.call("memory")
    tensor = on.empty(PROBE_BYTES)
    after = worker.call("memory")
    padding = _grown(before, after, "torch", "allocated_bytes") - PROBE_BYTES
    found.holds("allocated_follows", 0 <= padding <= MAX_PADDING_BYTES, f"{padding} bytes more than its size")
    asked = _grown(before, after, "torch", "reserved_bytes")
    found.at_most("used_follows", abs(after["used_bytes"] - before["used_bytes"] - asked), 4 * MIB, "bytes")
    del tensor


def _grown(before: dict[str, Any], after: dict[str, Any], part: str, name: str) -> int:
    return int(after[part][name] - before[part][name])


def neighbour(on: TorchDevice, nbytes: int) -> None:
    """Hold memory on the device until standard input ends: the other process."""
    worker = KitWorker(on, kv_bytes=nbytes)
    worker.execute_model()
    on.wait()
    answer = worker.call("memory")
    print(json.dumps({"device": answer["device"], "reserved_bytes": answer["torch"]["reserved_bytes"]}), flush=True)
    sys.stdin.read()


def _neighbour(on: TorchDevice, worker: KitWorker, found: Findings) -> None:
    before = worker.call("memory")
    with child_beside(neighbour, on, nbytes=on.sizes.kv_bytes) as other:
        beside = worker.call("memory")
    same = other["device"] == beside["device"]
    found.holds("neighbour_same_device", same, f"{other['device']} and {beside['device']}")
    parts = ("weights_bytes", "kv_cache_reserved_bytes", "encoder_cache", "torch")
    # How long ago an entry was seen changes by itself.
    changed = [name for name in parts if _settled(before[name]) != _settled(beside[name])]
    found.holds("neighbour_not_ours", not changed, f"changed: {', '.join(changed)}")
    if on.is_cpu:
        found.skip(NO_DEVICE, "neighbour_in_used")
        return
    grown = beside["used_bytes"] - before["used_bytes"]
    found.figure("neighbour_used_bytes", grown, "bytes")
    found.at_least("neighbour_in_used", grown, other["reserved_bytes"], "bytes")


def _settled(value: object) -> object:
    return {k: v for k, v in value.items() if k != "oldest_age_seconds"} if isinstance(value, dict) else value


def _mig(on: TorchDevice, answer: dict[str, Any], found: Findings) -> None:
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        found.skip("CUDA_VISIBLE_DEVICES names no slice of a GPU (MIG-...)", "mig")
        return
    uuid, total = str(answer["device"]["uuid"]), answer["total_bytes"]
    whole = tool("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "-i", str(on.index))
    is_smaller = whole is None or total < int(whole) * MIB
    found.holds("mig", uuid.startswith("MIG-") and is_smaller, f"uuid {uuid}, {total} bytes", value=uuid)


def _samples(on: TorchDevice, worker: KitWorker, found: Findings) -> None:
    sampler = MemoryReader()
    _times(sampler, worker, 20)
    idle = _times(sampler, worker, SAMPLES)
    _figures("sample_idle", idle, found)
    found.at_most("sample_cost", statistics.median(idle), MAX_SAMPLE_MS, "ms")
    _figures("sample_beside_a_python_thread", _beside_a_thread(lambda: _times(sampler, worker, SAMPLES // 3)), found)
    _figures("reading_on_a_thread", _on_a_thread(worker), found)
    _parts_beside_a_thread(worker, found)
    if on.is_cpu or on.is_simulated:
        found.skip(NO_DEVICE if on.is_cpu else SIMULATED, "sample_does_not_wait")
        return
    on.wait()
    busy = on.keep_busy()
    done = on.module.Event()
    done.record()
    during = _times(sampler, worker, 20)
    found.holds("sample_does_not_wait", not done.query(), "the device was done when the samples were")
    _figures("sample_on_a_busy_stream", during, found)
    on.wait()
    del busy


def _times(sampler: MemoryReader, worker: KitWorker, count: int) -> list[float]:
    return [
        _milliseconds(lambda number=number: sampler.read(worker, Depth.STEP, time.monotonic(), number))
        for number in range(count)
    ]


def _beside_a_thread(measure: Callable[[], list[float]]) -> list[float]:
    """Measure while another thread of this process computes in Python."""
    stopping = threading.Event()

    def compute() -> None:
        while not stopping.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        return measure()
    finally:
        stopping.set()
        thread.join()


def _parts_beside_a_thread(worker: KitWorker, found: Findings) -> None:
    """Measure each call of a sample that may let go of Python's lock, and then wait for the other thread."""
    device = device_of(worker)
    parts: dict[str, Callable[[], object]] = {
        "space": lambda: device.space(HostMemory()),
        "allocator": lambda: device.allocator(Notes()),
        "pinned": device.pinned_bytes,
        "rss": rss_bytes,
    }
    for name, read in parts.items():
        times = _beside_a_thread(lambda read=read: [_milliseconds(read) for _ in range(SAMPLES // 10)])
        found.figure(f"{name}_beside_a_python_thread_median", statistics.median(times), "ms")


def _milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def _on_a_thread(worker: KitWorker) -> list[float]:
    """Measure what the same figures cost on a thread of their own, as the recorder does not read them."""
    times: list[float] = []

    def read() -> None:
        device = device_of(worker)
        times.extend(_milliseconds(lambda: device.allocator(Notes())) for _ in range(SAMPLES // 3))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return times


def _figures(name: str, times: list[float], found: Findings) -> None:
    found.figure(f"{name}_median", statistics.median(times), "ms")
    found.figure(f"{name}_longest", max(times), "ms")
