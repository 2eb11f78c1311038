"""Highwater's worker extension: shows where one vLLM worker's memory went, and gives it back.

vLLM finds its plugin where the distribution is installed, or loads the class by name:
`--worker-extension-cls highwater_worker.MemoryExtension`. It refuses to import torch with itself, to touch a device
before a call needs it, and to raise into a worker. The class is imported when it is looked up: the sidecar, which reads
the kernel's files with this package too, has no use for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from highwater_worker.extension import MemoryExtension

__all__ = ["MemoryExtension"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from highwater_worker.extension import MemoryExtension  # noqa: PLC0415 - see above

    return MemoryExtension
