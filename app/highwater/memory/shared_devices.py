"""The devices of the engine that another engine, or another program, uses as well.

Two witnesses are asked: other engines' recorder files in the same folder, and NVML where its Python bindings are
installed. Where neither knows anything, a device counts as the engine's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Final, Protocol

from highwater.accounting.attribution import device_id
from highwater.memory.history import History
from highwater.readings import RankReading, Report
from highwater.recorder.folder import OtherRing

LOOK_SECONDS: Final = 30.0
# A process with less on the device, a monitor for example, could not use what a trim gave back.
MIN_OTHER_BYTES: Final = 256 * 1024 * 1024

log = logging.getLogger("highwater.shared_devices")


class OtherRecorders(Protocol):
    """Reads the recorder files of other engines."""

    def others(self) -> tuple[OtherRing, ...]:
        """The files of other lives and other engines."""


def find_nvml() -> ModuleType | None:
    """NVML's Python bindings (package ``nvidia-ml-py``), initialised; ``None`` where they or the driver are missing."""
    if find_spec("pynvml") is None:
        return None
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


class SharedDevices:
    """Looks from time to time, off the event loop.

    Attributes:
        cards: The shared devices (``attribution.card``), as of the last look.

    Args:
        report: The last report.
        history: Where it is noted that a device is shared, once for each.
        recorders: The recorder folder; ``None`` without one.
        nvml: NVML's bindings, initialised; ``None`` without them.
        internal_error: Counts a fault of our own.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        report: Callable[[], Report],
        history: History,
        *,
        recorders: OtherRecorders | None,
        nvml: ModuleType | None,
        internal_error: Callable[[], None] = lambda: None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.cards: frozenset[str] = frozenset()
        self._report = report
        self._history = history
        self._recorders = recorders
        self._nvml = nvml
        self._internal_error = internal_error
        self._sleep = sleep
        self._noted: set[str] = set()

    @property
    def has_witness(self) -> bool:
        """True if other users of the devices can be seen, by recorder files or by NVML."""
        return self._recorders is not None or self._nvml is not None

    async def run(self) -> None:
        """Look every ``LOOK_SECONDS`` until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                # A folder or a driver may fail in ways that nobody foresaw; what was last known stands.
                self._internal_error()
                log.exception("looking for other users of the devices failed unexpectedly")
            await self._sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Ask both witnesses about the devices of the last report."""
        ranks = [rank for rank in self._report().ranks if rank.device.type != "cpu" and device_id(rank) is not None]
        if not ranks or not self.has_witness:
            return
        found = dict(await asyncio.to_thread(lambda: list(self._others(ranks))))
        self.cards = frozenset(found)
        for card in sorted(self.cards - self._noted):
            self._history.record(
                "policy",
                f"device {card.rpartition('/')[2]} is shared: {found[card]} uses it as well. By default only release "
                "runs there: what a trim or a reset frees, the other one could take",
            )
        self._noted |= self.cards

    def _others(self, ranks: Sequence[RankReading]) -> Iterator[tuple[str, str]]:
        cards = {device_id(rank) for rank in ranks}
        for ring in self._recorders.others() if self._recorders is not None else ():
            newest = None if ring.record is None else ring.record.newest
            card = None if newest is None else device_id(newest)
            if newest is not None and card is not None and card in cards and ring.is_alive:
                yield card, f"another engine (a worker with pid {newest.pid})"
        if self._nvml is not None:
            yield from self._other_processes(self._nvml, ranks)

    @staticmethod
    def _other_processes(nvml: ModuleType, ranks: Sequence[RankReading]) -> Iterator[tuple[str, str]]:
        ours = {rank.pid for rank in ranks}
        for rank in ranks:
            card, uuid = device_id(rank), rank.device.uuid
            if card is None or uuid is None or rank.device.type != "cuda":
                continue
            try:
                processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
            except nvml.NVMLError:
                continue  # a device of another machine, or one that this container may not see
            pids = {one.pid: one.usedGpuMemory or 0 for one in processes}
            if rank.pid not in pids:
                continue  # another PID namespace: whose the processes are is unknown
            other = next((pid for pid, size in pids.items() if pid not in ours and size >= MIN_OTHER_BYTES), None)
            if other is not None:
                yield card, f"another process (pid {other})"
