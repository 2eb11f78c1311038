"""Kernels that vllm-ascend imports for models with linear attention, which the tests have none of."""

from __future__ import annotations

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> None:
        raise NotImplementedError(f"the simulated NPU has no {name}")

    return absent
