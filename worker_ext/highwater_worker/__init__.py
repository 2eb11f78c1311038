"""Highwater's worker extension: shows where one vLLM worker's memory went, and gives it back.

vLLM finds its plugin where the distribution is installed, or loads the class by name:
`--worker-extension-cls highwater_worker.MemoryExtension`. It refuses to import torch with itself, to touch a device
before a call needs it, and to raise into a worker.
"""

from highwater_worker.extension import MemoryExtension

__all__ = ["MemoryExtension"]
