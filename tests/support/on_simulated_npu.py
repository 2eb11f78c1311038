"""What the worker package does on a simulated NPU whose faults are ordered; `python -m` writes what it saw, as JSON.

Runs in an engine's Python, beside the real torch_npu (tests/fakes/cann).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.device.torch_device import MIB, Tensor, TorchDevice
from bench.device.worker import KitWorker
from tests.fakes.cann.state import VARIABLE, set_state

ANSWERS = "answers.json"
IMAGES = 8  # in batches of two, of 32 MiB each
SLOW_BYTES_PER_SECOND = 64 * MIB
SLOW_SECONDS = 1.0


@contextmanager
def fault(**values: int) -> Iterator[None]:
    """Have the device at fault for a while."""
    state = Path(os.environ[VARIABLE])
    set_state(state, **values)
    yield
    set_state(state, **dict.fromkeys(values, 0))


def main(folder: str) -> None:
    """Order one fault after another; the encoder outputs are compared at the end."""
    on = TorchDevice("npu:0")
    worker = KitWorker(on, images=IMAGES)
    before = {key: value.to("cpu", copy=True) for key, value in dict.items(worker.cache)}
    answers = {**_whole(on, worker, folder), **_faults(on, worker), "same": _same(on, worker, before)}
    Path(folder, ANSWERS).write_text(json.dumps(answers))


def _whole(on: TorchDevice, worker: KitWorker, folder: str) -> dict[str, Any]:
    worker.call("record_stacks", minutes=1)
    on.empty(MIB)
    snapshot = worker.call("snapshot", directory=folder, name="on_npu")
    worker.call("record_stacks", minutes=0)
    return {"memory": worker.call("memory"), "budget": worker.call("budget"), "snapshot": snapshot}


def _faults(on: TorchDevice, worker: KitWorker) -> dict[str, Any]:
    with fault(copy_bytes_per_second=SLOW_BYTES_PER_SECOND):
        slow = worker.call("trim", max_seconds=SLOW_SECONDS)
    worker.call("trim")
    on.wait()
    with fault(refused_from_bytes=1):
        worker.call("release")
        try:
            on.empty(64 * MIB)
            message = ""
        except RuntimeError as error:
            message = str(error)
    with fault(is_lost=1):
        lost = {op: json.loads(worker.highwater_rpc(op, "{}")) for op in ("memory", "trim", "restore", "release")}
    return {"slow": slow, "message": message, "lost": lost}


def _same(on: TorchDevice, worker: KitWorker, before: dict[str, Tensor]) -> bool:
    bits = on.torch.int16
    return all(on.torch.equal(worker.cache[key].cpu().view(bits), value.view(bits)) for key, value in before.items())


if __name__ == "__main__":
    main(sys.argv[1])
