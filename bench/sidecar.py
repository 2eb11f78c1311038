"""`highwater serve` as a process of its own, ready before it is measured, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from highwater.terminal.demo.process import DemoError
from highwater.terminal.demo.sidecar import DemoSidecar

READY_SECONDS = 60.0
MIB = 1024**2


@contextmanager
def sidecar_beside(engine_url: str, folder: Path, **settings: str) -> Iterator[DemoSidecar]:
    """A sidecar that has a reading of every rank; ended at the end, also after Ctrl-C.

    Args:
        engine_url: The engine.
        folder: Gets its log.
        settings: Further settings by key, such as `poll_seconds="0.2"`.
    """
    variables = {f"HIGHWATER_{key.upper()}": value for key, value in settings.items()}
    with DemoSidecar(engine_url, folder=folder, settings=variables) as sidecar:
        deadline = time.monotonic() + READY_SECONDS
        while (report := sidecar.call("GET", "/memory"))["engine"]["state"] != "ready" or report["stale"]:
            if time.monotonic() > deadline:
                raise DemoError.with_log("the sidecar got no reading", sidecar.log_path)
            time.sleep(0.1)
        yield sidecar


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident and proportional set size, bytes."""

    rss_bytes: int
    pss_bytes: int


def process_id(sidecar: DemoSidecar) -> int:
    """The one process that it is."""
    (pid,) = sidecar.pids()
    return pid


def process_memory(pid: int) -> ProcessMemory:
    """Return the kernel's figures of now."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return ProcessMemory(sizes["Rss"], sizes["Pss"])
