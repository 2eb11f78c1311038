"""Step 3: trim and restore of encoder outputs: bit for bit, at which rate, on a busy device, without room."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from bench.device.results import Findings
from bench.device.torch_device import GIB, NO_DEVICE, SIMULATED, Tensor, TorchDevice
from bench.device.worker import KitWorker, RefusedCallError
from highwater_worker.encoder_cache.spilling import restorer_of
from highwater_worker.encoder_cache.spilling_dict import spilling_cache

SAYS = "trim and restore: bit for bit, rates, a busy stream, graph replay, no room, the host's budget"
CHECKS: Mapping[str, str] = {
    "identical": "every encoder output is bit for bit the same after it went to the host and back",
    "identical_pageable": "and so it is through pageable memory",
    "views_go_together": "entries that are views of one storage go together, and the device gets the storage back",
    "tuples_stay": "an entry that is a tuple of tensors (deepstack in parts) is left alone, and counted as such",
    "given_back": "the device gets at least 0.95 of the spilled bytes back, the restore reserve counted",
    "pinned": "pinning host memory succeeded",
    "pinned_is_faster": "copies to pinned memory are not slower than to pageable memory",
    "busy_stream": "outputs that the device still computes are spilled only once they are done",
    "graph_replay": "a trim during a graph's replay changes neither the graph's output nor the entries",
    "access_brings_back": "an access alone brings an entry back, bit for bit",
    "no_room_makes_room": "on a full device an access makes room for its entry",
    "no_room_fails_cleanly": "where no room can be made the access fails, and the entry stays whole on the host",
    "host_budget": "no more than the given bytes of the host are used",
    "host_budget_none": "a budget in which no entry fits is refused, and everything stays on the device",
}
GOAL = 0.95
ROUNDS = 4
MORE_THAN_RESERVE = 6
"""Images: of those in one batch a trim moves none, since it would keep as much for the way back."""
NO_LIMIT = 60


def run(on: TorchDevice, found: Findings) -> None:
    """Run all cases."""
    _whole_trips(on, found)
    _tuples(on, found)
    _budget(on, found)
    if on.is_cpu:
        found.skip(NO_DEVICE, "busy_stream", "graph_replay", "no_room_makes_room", "no_room_fails_cleanly")
        return
    if on.is_simulated:
        found.skip(SIMULATED, "pinned_is_faster", "busy_stream", "graph_replay")
    else:
        _busy(on, found)
        _graph(on, found)
    _no_room(on, found)


def _references(worker: KitWorker) -> dict[str, Tensor]:
    """Return plain copies of all entries in host memory, by PyTorch alone."""
    return {key: value.to("cpu", copy=True) for key, value in dict.items(worker.cache)}


def _differing(on: TorchDevice, worker: KitWorker, references: dict[str, Tensor]) -> list[str]:
    """Return the entries that are not the same bits; each is accessed as the engine accesses it."""
    integers = on.torch.int32 if on.is_cpu else on.torch.int16
    return [
        key
        for key, reference in references.items()
        if not on.torch.equal(worker.cache[key].to("cpu").view(integers), reference.view(integers))
    ]


def _same(on: TorchDevice, worker: KitWorker, references: dict[str, Tensor], found: Findings, check: str) -> None:
    differing = _differing(on, worker, references)
    found.holds(check, not differing, f"differ: {', '.join(key[-4:] for key in differing)}")


def _whole_trips(on: TorchDevice, found: Findings) -> None:
    worker = KitWorker(on, images=on.sizes.images)
    references = _references(worker)
    # The first round pins the host's memory, which takes far longer than the copies.
    turns = [_turn(on, worker) for _ in range(ROUNDS + 1)]
    _same(on, worker, references, found, "identical")
    together = turns[0]["spilled_bytes"] == sum(value.nbytes for value in references.values())
    found.holds("views_go_together", together, f"{turns[0]['spilled_bytes']} bytes went")
    worker.call("trim", max_seconds=NO_LIMIT)
    _same(on, worker, references, found, "access_brings_back")
    with on.pins(False):
        pageable = KitWorker(on, images=on.sizes.images)
        kept = _references(pageable)
        slow = [_turn(on, pageable) for _ in range(ROUNDS)]
        _same(on, pageable, kept, found, "identical_pageable")
    _rates(on, turns[1:], slow, found)
    found.figure("first_trip_to_host", turns[0]["to_host"], "GB/s")
    notes = [note["reason"] for note in turns[0]["notes"] if "pinning failed" in note["reason"]]
    if on.is_cpu:
        found.skip(NO_DEVICE, "given_back", "pinned", "pinned_is_faster")
        return
    found.holds("pinned", not notes, "; ".join(notes))
    found.at_least("given_back", min(turn["given_back"] for turn in turns), GOAL, "of the spilled bytes")


def _rates(on: TorchDevice, pinned: list[dict[str, Any]], pageable: list[dict[str, Any]], found: Findings) -> None:
    medians = {}
    for kind, turns in (("pinned", pinned), ("pageable", pageable)):
        for way in ("to_host", "to_device"):
            medians[kind, way] = statistics.median(turn[way] for turn in turns)
            found.figure(f"{kind}_{way}", medians[kind, way], "GB/s")
    for way, rate in _plain_rates(on).items():
        found.figure(f"plain_copy_{way}", rate, "GB/s")
    if not (on.is_cpu or on.is_simulated):
        ratio = medians["pinned", "to_host"] / medians["pageable", "to_host"]
        found.at_least("pinned_is_faster", ratio, 1.0, "times the rate")


def _turn(on: TorchDevice, worker: KitWorker) -> dict[str, Any]:
    """Move everything to the host, the allocator's blocks to the device, and everything back."""
    worker.call("release")
    free = on.space()[0]
    trimmed = worker.call("trim", max_seconds=NO_LIMIT)
    worker.call("release")
    seen = on.space()[0]
    restored = worker.call("restore", max_seconds=NO_LIMIT)
    spilled, reserve = trimmed["spilled_bytes"], trimmed["encoder_cache"]["restore_reserve_bytes"]
    return {
        "spilled_bytes": spilled,
        # What is kept for the way back was spilled too, and is no loss.
        "given_back": (seen - free + reserve) / spilled,
        "to_host": spilled / trimmed["copy_seconds"] / 1e9,
        "to_device": restored["restored_bytes"] / restored["copy_seconds"] / 1e9,
        "notes": trimmed["notes"],
    }


def _plain_rates(on: TorchDevice) -> dict[str, float]:
    """Return the rates of PyTorch's own copies between tensors that are there: the measure of the others."""
    size = min(GIB, on.sizes.kv_bytes)
    here = on.torch.ones(size, dtype=on.torch.uint8, device=on.device)
    there = on.torch.ones(size, dtype=on.torch.uint8, pin_memory=not on.is_cpu)
    return {
        "to_host": size / _seconds(on, lambda: there.copy_(here)) / 1e9,
        "to_device": size / _seconds(on, lambda: here.copy_(there)) / 1e9,
    }


def _seconds(on: TorchDevice, copy: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        on.wait()
        began = time.perf_counter()
        copy()
        on.wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _tuples(on: TorchDevice, found: Findings) -> None:
    worker = KitWorker(on, images=2)
    parts = tuple(on.randn(on.sizes.tokens // 4, on.sizes.width // 4) for _ in range(4))
    worker.cache["f" * 64] = parts
    trimmed = worker.call("trim", max_seconds=NO_LIMIT)
    left = dict.__getitem__(worker.cache, "f" * 64)
    counted = trimmed["kept"]["unspillable_entries"]
    found.holds("tuples_stay", left is parts and counted == 1, f"{counted} entries counted as such")


def _budget(on: TorchDevice, found: Findings) -> None:
    worker = KitWorker(on, images=on.sizes.images)
    references = _references(worker)
    batch = 2 * next(iter(references.values())).nbytes
    trimmed = worker.call("trim", host_budget_bytes=batch, max_seconds=NO_LIMIT)
    added, over = trimmed["host_bytes_added"], trimmed["kept"]["over_budget_entries"]
    found.holds("host_budget", 0 < added <= batch and over > 0, f"{added} of {batch} bytes, {over} entries stayed")
    other = KitWorker(on, images=MORE_THAN_RESERVE)
    try:
        said = str(other.call("trim", host_budget_bytes=1, max_seconds=NO_LIMIT))
        is_refused = False
    except RefusedCallError as refusal:
        said, is_refused = str(refusal), "budget" in str(refusal)
    on_device = all(on.torch.is_tensor(value) for value in dict.values(other.cache))
    found.holds("host_budget_none", is_refused and on_device, said)


def _busy(on: TorchDevice, found: Findings) -> None:
    """Spill entries that are the outputs of work that the device has not begun yet."""
    worker = KitWorker(on)
    expected = on.randn(on.sizes.tokens, on.sizes.width)
    reference = expected.to("cpu", copy=True)
    on.wait()
    busy = on.keep_busy()
    # Comes after all of that on the stream; `busy` is ones, and stays so.
    late = expected * busy[0, 0]
    worker.cache["a" * 64] = late
    del late
    is_done = on.module.Event()
    is_done.record()
    was_busy = not is_done.query()
    worker.call("trim", max_seconds=NO_LIMIT)
    differing = _differing(on, worker, {"a" * 64: reference})
    found.holds("busy_stream", was_busy and not differing, "the device was idle" if differing == [] else "it differs")


def _graph(on: TorchDevice, found: Findings) -> None:
    worker = KitWorker(on, images=4)
    references = _references(worker)
    replay, output = on.capture(worker.execute_model)
    replay()
    on.wait()
    expected = output.clone()
    busy = on.keep_busy(100)
    for _ in range(200):
        replay()
    worker.call("trim", max_seconds=NO_LIMIT)
    for _ in range(50):
        replay()
    differing = _differing(on, worker, references)
    on.wait()
    same = bool((output == expected).all())
    found.holds("graph_replay", same and not differing, f"output the same: {same}; entries that differ: {differing}")
    del busy


def _no_room(on: TorchDevice, found: Findings) -> None:
    """Let somebody else take what a trim gave back, and access the entries."""
    worker = KitWorker(on, images=MORE_THAN_RESERVE)
    references = _references(worker)
    first = next(iter(references))
    batch = 2 * references[first].nbytes
    # Not all of them: what is left on the device makes room. The reserve for the way back is not counted as free.
    worker.call("trim", free_bytes=1, max_seconds=NO_LIMIT)
    worker.call("release")
    hog = _fill(on, batch // 16)
    try:
        worker.cache[first]
        found.holds("no_room_makes_room", not _differing(on, worker, {first: references[first]}), "it differs")
    except RuntimeError as error:
        found.holds("no_room_makes_room", False, str(error)[:200])
    del hog
    worker.cache.clear()
    worker.call("release")
    worker.add_images(MORE_THAN_RESERVE)
    references = _references(worker)
    worker.call("trim", max_seconds=NO_LIMIT)
    cache = spilling_cache(worker)
    if cache is not None:
        restorer_of(cache).drop_reserve()
    del cache
    worker.call("release")
    hog = _fill(on, batch // 16)
    failed = ""
    try:
        worker.cache[first]
    except RuntimeError as error:
        failed = f"{type(error).__name__}: {error}"[:200]
    hog.clear()
    whole = not _differing(on, worker, references)
    found.holds(
        "no_room_fails_cleanly", bool(failed) and whole, f"raised: {failed or 'nothing'}; whole: {whole}", value=failed
    )
    found.figure("no_room_batch_bytes", batch, "bytes")


def _fill(on: TorchDevice, left_bytes: int) -> list[Tensor]:
    """Take the device to its last bytes."""
    hog, size = [], 8 * GIB
    while size >= left_bytes:
        try:
            hog.append(on.empty(size))
        except RuntimeError:
            size //= 2
    return hog
