"""The steps, by name. To add one: a file with `SAYS`, `CHECKS` and `run`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from bench.device.results import Findings
from bench.device.steps import allocator, engine, oom, policy, reading, spill, under_load
from bench.device.torch_device import TorchDevice


class Step(Protocol):
    """The interface of a step's module."""

    SAYS: str
    """Its subject, in a few words."""
    CHECKS: Mapping[str, str]
    """Its checks, and the sentence that each one stands for."""

    def run(self, on: TorchDevice, found: Findings) -> None:
        """Run it."""


STEPS: Mapping[str, Step] = {
    "reading": reading,
    "allocator": allocator,
    "spill": spill,
    "under-load": under_load,
    "oom": oom,
    "policy": policy,
    "engine": engine,
}
