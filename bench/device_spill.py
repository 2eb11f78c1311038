"""Trim, release and restore on a real device: bytes that it gets back, and seconds per GiB both ways.

`python -m bench.device_spill` prints one JSON line. It needs torch (and torch_npu on an Ascend) and this repository on
PYTHONPATH, no vLLM: the worker is a stand-in that holds encoder outputs as Qwen3-VL-8B makes them, in batches whose
entries are views of one storage. On CPU the sizes are small, and it only checks itself: nothing is given back there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from highwater_worker import MemoryExtension

GIB = 1024**3
COPY_WIDTH = 8192
# An image of 4096 x 4096: 16,384 tokens of Qwen3-VL-8B, each with the deepest features and three deepstack sets.
TOKENS = 16384
WIDTH = 4096 * (1 + 3)
BYTES_PER_NUMBER = 2
CPU_TOKENS = 256
BATCH = 2
GOAL = 0.95


class PlainCopy:
    """The rate of a plain copy between device and host memory; all tensors were written once.

    Args:
        device: torch's; on a CPU every copy is one from memory to memory.
        count: How many tensors on each side.
        size: Bytes of each, a multiple of 16 KiB.
    """

    def __init__(self, device: Any, count: int, size: int) -> None:  # noqa: ANN401 - torch's
        self._torch = import_module("torch")
        self._gib = count * size / GIB
        shape = (size // COPY_WIDTH // BYTES_PER_NUMBER, COPY_WIDTH)
        self._pinned = {"pin_memory": True} if device.type != "cpu" else {}
        self._wait = getattr(self._torch, device.type).synchronize if device.type != "cpu" else lambda: None
        ones = self._torch.ones
        self._here = [ones(shape, dtype=self._torch.bfloat16, device=device) for _ in range(count)]
        self._there = [ones(shape, dtype=self._torch.bfloat16, **self._pinned) for _ in range(count)]

    def rates(self) -> dict[str, float]:
        """GiB/s of one turn: to the host and back, into tensors that are there."""
        with self._torch.inference_mode():
            return {
                "to_host": self._rate(lambda: self._onto(self._there, self._here)),
                "to_device": self._rate(lambda: self._onto(self._here, self._there)),
            }

    def _rate(self, copy: Callable[[], None]) -> float:
        self._wait()
        began = time.perf_counter()
        copy()
        self._wait()
        return self._gib / (time.perf_counter() - began)

    @staticmethod
    def _onto(targets: list[Any], sources: list[Any]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


class _Base:
    """Only a base that the extension can be added to."""


class StandIn(_Base, MemoryExtension):
    """A worker without an engine.

    Args:
        device: torch's.
        cache: The encoder cache.
    """

    def __init__(self, device: Any, cache: dict[str, Any]) -> None:  # noqa: ANN401 - torch's
        self.device = device
        self.model_runner = SimpleNamespace(encoder_cache=cache, requests={})
        self.vllm_config = SimpleNamespace()

    def ask(self, op: str, **payload: object) -> dict[str, Any]:
        """Return the answer, also one that says no."""
        answer: dict[str, Any] = json.loads(self.highwater_rpc(op, json.dumps(payload)))
        return answer


def main() -> int:
    """Measure and print; the status is 1 where the goal is missed on a device that can reach it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.device_spill", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--device", help="cuda:0, npu:0 or cpu; default: what is there")
    parser.add_argument("--images", type=int, default=8, help="encoder outputs, %(default)s by default")
    parser.add_argument("--rounds", type=int, default=5, help="how often all of it goes and comes back")
    wanted = parser.parse_args()
    found = measure(wanted.device, images=wanted.images, rounds=wanted.rounds)
    print(json.dumps(found))
    ratio = found["given_back_over_spilled"]
    return int(ratio is not None and ratio["lowest"] < GOAL)


def measure(name: str | None, *, images: int, rounds: int) -> dict[str, Any]:
    """Everything, on one device."""
    torch = import_module("torch")
    if importlib.util.find_spec("torch_npu"):
        import_module("torch_npu")  # it makes torch.npu
    device = torch.device(name or _present(torch))
    if device.type != "cpu":
        if device.index is None:
            device = torch.device(device.type, 0)
        getattr(torch, device.type).set_device(device)
    tokens = CPU_TOKENS if device.type == "cpu" else TOKENS
    worker = StandIn(device, _outputs(torch, device, images, tokens))
    size = tokens * WIDTH * BYTES_PER_NUMBER
    before = _prints(torch, worker)
    turns = [_turn(torch, worker) for _ in range(rounds + 1)]
    unchanged = before == _prints(torch, worker)
    off_thread = {op: _off_the_main_thread(worker, op) for op in ("trim", "release")}
    worker.model_runner.encoder_cache.clear()
    worker.ask("release")
    copy = PlainCopy(device, images, size)
    plain = [copy.rates() for _ in range(rounds + 1)][1:]
    return {
        "device": worker.ask("hello")["device"],
        "torch": torch.__version__,
        "images": images,
        "image_bytes": size,
        "batch": BATCH,
        "given_back_over_spilled": _spread(turns, "given_back_over_spilled"),
        # The first round pins the host's memory, which takes far longer than the copies; torch keeps it.
        "first": turns[0],
        "spill_seconds_per_gib": _spread(turns[1:], "spill_seconds_per_gib"),
        "restore_seconds_per_gib": _spread(turns[1:], "restore_seconds_per_gib"),
        "release_ms": _spread(turns, "release_ms"),
        "plain_to_host_seconds_per_gib": 1 / statistics.median(rates["to_host"] for rates in plain),
        "plain_to_device_seconds_per_gib": 1 / statistics.median(rates["to_device"] for rates in plain),
        "unchanged": unchanged,
        "off_the_main_thread": off_thread,
        "notes": turns[0]["notes"],
    }


def _present(torch: Any) -> str:  # noqa: ANN401 - the module
    return next(
        (kind for kind in ("npu", "cuda") if hasattr(torch, kind) and getattr(torch, kind).is_available()), "cpu"
    )


def _outputs(torch: Any, device: Any, images: int, tokens: int) -> dict[str, Any]:  # noqa: ANN401 - torch's
    """Return encoder outputs as an engine makes them: one tensor per batch, each image a view of it."""
    cache: dict[str, Any] = {}
    with torch.inference_mode():
        while len(cache) < images:
            parts = min(BATCH, images - len(cache))
            made = torch.randn(parts * tokens, WIDTH, device=device, dtype=torch.bfloat16)
            for part in made.split(tokens):
                cache[f"{len(cache):064x}"] = part
            del made, part
    return cache


def _prints(torch: Any, worker: StandIn) -> list[float]:  # noqa: ANN401 - the module
    """One number per entry, that another value would change."""
    values = worker.model_runner.encoder_cache.values()
    return [float(value[:: max(1, len(value) // 64)].to("cpu", torch.float64).abs().sum()) for value in values]


def _turn(torch: Any, worker: StandIn) -> dict[str, Any]:  # noqa: ANN401 - the module
    """Everything to the host, the allocator's blocks to the device, and everything back."""
    worker.ask("release")
    free = _free_bytes(torch, worker.device)
    trimmed = _good(worker.ask("trim", max_seconds=60))
    unseen = _free_bytes(torch, worker.device)
    released = _good(worker.ask("release"))
    seen = _free_bytes(torch, worker.device)
    restored = _good(worker.ask("restore", max_seconds=60))
    spilled, reserve = trimmed["spilled_bytes"], trimmed["encoder_cache"]["restore_reserve_bytes"]
    on_cpu = worker.device.type == "cpu"
    return {
        "spilled_bytes": spilled,
        "restored_bytes": restored["restored_bytes"],
        "given_back_before_release_bytes": None if on_cpu else unseen - free,
        "given_back_bytes": None if on_cpu else seen - free,
        "restore_reserve_bytes": reserve,
        # What is kept for the way back was spilled too, and is no loss.
        "given_back_over_spilled": None if on_cpu else (seen - free + reserve) / spilled,
        "spill_seconds_per_gib": trimmed["copy_seconds"] * GIB / spilled,
        "restore_seconds_per_gib": restored["copy_seconds"] * GIB / restored["restored_bytes"],
        "release_ms": released["elapsed_ms"],
        "left_entries": restored["left_entries"],
        "notes": [*trimmed["notes"], *restored["notes"]],
    }


def _free_bytes(torch: Any, device: Any) -> int:  # noqa: ANN401 - torch's
    return 0 if device.type == "cpu" else int(getattr(torch, device.type).mem_get_info(device.index)[0])


def _good(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["ok"], answer
    return answer


def _off_the_main_thread(worker: StandIn, op: str) -> dict[str, Any]:
    """Return what the op says on another thread, as under an executor that runs calls beside the steps."""
    said: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: said.append(worker.ask(op)))
    thread.start()
    thread.join()
    return {"ok": said[0]["ok"], "error": said[0].get("error")}


def _spread(turns: list[dict[str, Any]], name: str) -> dict[str, float] | None:
    values = [turn[name] for turn in turns if turn[name] is not None]
    if not values:
        return None
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


if __name__ == "__main__":
    sys.exit(main())
