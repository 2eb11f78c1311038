"""A card that vLLM can ask for its kind, and no more: a start gets as far as the device itself where there is none.

vLLM asks NVIDIA's library for a card, and has no platform without one (vllm 0.26.0 platforms/__init__.py:54); some of
its modules ask for the card's kind when they are imported (model_executor/layers/quantization/utils/w8a8_utils.py:15).
It finds this by its entry point, on the engine's PYTHONPATH.
"""

from __future__ import annotations

from functools import partial
from typing import Any

TOTAL_BYTES = 80 << 30


def name() -> str:
    """Return the platform's class, as vLLM's own plugin does where there is a card."""
    return "cuda_platform.WithoutCard"


def __getattr__(wanted: str) -> Any:
    if wanted != "WithoutCard":
        raise AttributeError(wanted)
    from vllm.platforms import cuda, interface  # noqa: PLC0415 - when vLLM asks, not before

    # Of Hopper's kind.
    answers = {"capability": interface.DeviceCapability(9, 0), "name": "no card", "total_memory": TOTAL_BYTES}
    methods = {f"get_device_{name}": staticmethod(partial(_answered, answer)) for name, answer in answers.items()}
    made = type(wanted, (cuda.CudaPlatform,), methods)
    globals()[wanted] = made  # the same class at every look
    return made


def _answered(answer: object, *_: object, **__: object) -> object:
    return answer
