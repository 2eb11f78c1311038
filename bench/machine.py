"""The machine that the figures hold for: its kind, never its name; and how busy others keep it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CLOCK_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
GIB = 1024**3
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # fields of the line `cpu` of /proc/stat; proc(5)
_UTIME, _STIME = 11, 12  # fields of /proc/<pid>/stat, counted from behind the command's name


def description(vllm_version: str | None) -> str:
    """Cores, model, memory and versions in one line; None: no engine was in it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores of {_cpu_model()}, {memory:.0f} GiB RAM, {platform.system()}, "
        f"Python {platform.python_version()}" + (f", vLLM {vllm_version} (CPU)" if vllm_version else "")
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def busy_seconds() -> float:
    """Core-seconds that were taken so far, by anybody, the hypervisor's other guests too."""
    # Guest time is in user time already.
    ticks = [int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").split()[1 : _STEAL + 2]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT]) * CLOCK_TICK_SECONDS


def cpu_seconds(pid: int) -> float:
    """A process's user and system time so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[_UTIME]) + int(fields[_STIME])) * CLOCK_TICK_SECONDS
