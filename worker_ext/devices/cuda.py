"""NVIDIA GPUs; AMD's too, which torch also calls cuda."""

from __future__ import annotations

from worker_ext.devices.accelerator import Accelerator


class Cuda(Accelerator):
    """A GPU under CUDA or ROCm."""

    type = "cuda"
