"""Nothing that is called: sleep mode needs vllm-ascend's compiled part."""

from __future__ import annotations


def memcpy(*_: object) -> int:
    raise NotImplementedError("the simulated NPU has no sleep mode")
