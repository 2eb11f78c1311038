"""The devices of the engine that another engine, or another program, uses as well.

There are two sources: other engines' recorder files in the same folder, and NVML where its Python bindings are
installed. Without any, a device counts as the engine's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

from highwater.model.rank import RankReading
from highwater.model.report import Report
from highwater.process.errors import contained
from highwater.process.untrusted import plain
from highwater.watch.history import History
from highwater.watch.recorder.folder import RecorderFolder

LOOK_SECONDS: Final = 30.0
# A process with less on the device, a monitor for example, could not use what a trim gave back.
MIN_OTHER_BYTES: Final = 256 * 1024 * 1024

log = logging.getLogger("highwater.shared_devices")


def find_nvml() -> ModuleType | None:
    """Return NVML's Python bindings, initialised; ``None`` where they (``nvidia-ml-py``) or the driver are missing."""
    if find_spec("pynvml") is None:
        return None
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


class SharedDevices:
    """Reads both sources from time to time, off the event loop; the history gets an event for each shared device.

    Attributes:
        users: Who else uses a device, by the shared devices (``RankReading.card``).
    """

    def __init__(
        self,
        report: Callable[[], Report],
        history: History,
        *,
        recorders: RecorderFolder | None,
        nvml: ModuleType | None,
        internal_error: Callable[[], None] = lambda: None,
    ) -> None:
        self.users: Mapping[str, str] = {}
        self._report = report
        self._history = history
        self._recorders = recorders
        self._nvml = nvml
        self._internal_error = internal_error
        self._noted: set[str] = set()

    @property
    def cards(self) -> frozenset[str]:
        return frozenset(self.users)

    @property
    def has_witness(self) -> bool:
        return self._recorders is not None or self._nvml is not None

    async def run(self) -> None:
        while True:
            # A folder or a driver may fail in unforeseen ways; the last known devices stay.
            with contained(self._internal_error, log, "looking for other users of the devices failed unexpectedly"):
                await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        ranks = [
            rank
            for rank in self._report().ranks
            if not rank.device.traits.is_host_memory and rank.device_id is not None
        ]
        if not ranks or not self.has_witness:
            return
        self.users = users = dict(await asyncio.to_thread(lambda: list(self._others(ranks))))
        for card in sorted(self.cards - self._noted):
            self._history.record(
                "policy",
                f"device {card.rpartition('/')[2]} is shared: {users[card]} uses it as well. By default only release "
                "runs there: what a trim or a reset frees, the other one could take",
            )
        self._noted |= self.cards

    def _others(self, ranks: Sequence[RankReading]) -> Iterator[tuple[str, str]]:
        cards = {rank.device_id for rank in ranks}
        for ring in self._recorders.others() if self._recorders is not None else ():
            newest = None if ring.record is None else ring.record.newest
            card = None if newest is None else newest.device_id
            if newest is not None and card is not None and card in cards and ring.is_alive:
                yield card, f"another engine (a worker with pid {newest.pid})"
        if self._nvml is not None:
            yield from self._other_processes(self._nvml, ranks)

    @staticmethod
    def _other_processes(nvml: ModuleType, ranks: Sequence[RankReading]) -> Iterator[tuple[str, str]]:
        own = {rank.pid for rank in ranks}
        for rank in ranks:
            card, uuid = rank.device_id, rank.device.uuid
            if card is None or uuid is None or not rank.device.traits.has_nvml:
                continue
            try:
                processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
            except nvml.NVMLError:
                continue  # a device of another machine, or one that this container may not see
            pids = {process.pid: process.usedGpuMemory or 0 for process in processes}
            if rank.pid not in pids:
                continue  # another PID namespace: whose the processes are is unknown
            size, other = max(((size, pid) for pid, size in pids.items() if pid not in own), default=(0, 0))
            if size >= MIN_OTHER_BYTES:
                name = ""
                with suppress(OSError):
                    comm = Path(f"/proc/{other}/comm").read_text(encoding="utf-8", errors="replace")
                    name = f", {plain(comm, 32)}"
                yield card, f"another process (pid {other}{name})"
