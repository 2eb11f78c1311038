"""Highwater's worker extension: shows where one vLLM worker's memory went, and gives it back.

vLLM loads it by name: `--worker-extension-cls highwater_worker.MemoryExtension`. It refuses to import torch or vllm
with
itself, to touch a device before a call needs it, and to raise into a worker.
"""

from highwater_worker.extension import MemoryExtension

__all__ = ["MemoryExtension"]
