"""What a plain copy between device and host memory reaches, for tensors of one size.

Run with the engine's interpreter: `python -m bench.plain_copy COUNT BYTES` copies once for every line on its standard
input, and answers each with a line of JSON. It needs torch and nothing else.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

WIDTH = 8192
BYTES_PER_NUMBER = 2
GIB = 1024**3


class PlainCopy:
    """Tensors on a device, and as many in host memory; all of them were written once.

    Args:
        device: torch's; on a CPU every copy is one from memory to memory.
        count: How many tensors on each side.
        size: Bytes of each, a multiple of 16 KiB.
    """

    def __init__(self, device: Any, count: int, size: int) -> None:  # noqa: ANN401 - torch's
        self._torch = import_module("torch")
        self._gib = count * size / GIB
        shape = (size // WIDTH // BYTES_PER_NUMBER, WIDTH)
        self._pinned = {"pin_memory": True} if device.type != "cpu" else {}
        self._wait = getattr(self._torch, device.type).synchronize if device.type != "cpu" else lambda: None
        ones = self._torch.ones
        self._here = [ones(shape, dtype=self._torch.bfloat16, device=device) for _ in range(count)]
        self._there = [ones(shape, dtype=self._torch.bfloat16, **self._pinned) for _ in range(count)]

    def rates(self) -> dict[str, float]:
        """GiB/s of one turn: to the host and back into tensors that are there, and to the host into new ones."""
        with self._torch.inference_mode():
            return {
                "to_host": self._rate(lambda: self._onto(self._there, self._here)),
                "to_device": self._rate(lambda: self._onto(self._here, self._there)),
                "to_new": self._rate(self._to_new),
            }

    def _rate(self, copy: Any) -> float:  # noqa: ANN401 - whatever it gives back lives until the time is taken
        self._wait()
        began = time.perf_counter()
        made = copy()
        self._wait()
        seconds = time.perf_counter() - began
        del made
        return self._gib / seconds

    @staticmethod
    def _onto(targets: list[Any], sources: list[Any]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def _to_new(self) -> list[Any]:
        new = self._torch.empty_like
        return [new(tensor, device="cpu", **self._pinned).copy_(tensor) for tensor in self._here]


def main() -> None:
    torch = import_module("torch")
    count, size = map(int, sys.argv[1:3])
    copy = PlainCopy(torch.device("cpu"), count, size)
    copy.rates()  # warm
    for _ in sys.stdin:
        print(json.dumps({**copy.rates(), "threads": torch.get_num_threads()}), flush=True)


if __name__ == "__main__":
    main()
