"""The machine that the figures hold for: its kind, never its name; and how busy others keep it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

CLOCK_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
GIB = 1024**3
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # fields of the line `cpu` of /proc/stat; proc(5)


def description(vllm_version: str) -> str:
    """Cores, model, memory and versions in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores of {_cpu_model()}, {memory:.0f} GiB RAM, {platform.system()}, "
        f"Python {platform.python_version()}, vLLM {vllm_version} (CPU)"
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def busy_cores(seconds: float) -> float:
    """How many cores were taken over the next `seconds`, by anybody, the hypervisor's other guests too."""
    before = _cpu_ticks()
    time.sleep(seconds)
    spent = [after - start for after, start in zip(_cpu_ticks(), before, strict=True)]
    return (sum(spent) - spent[_IDLE] - spent[_IOWAIT]) * CLOCK_TICK_SECONDS / seconds


def _cpu_ticks() -> list[int]:
    # Guest time is in user time already.
    return [int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").split()[1 : _STEAL + 2]]
