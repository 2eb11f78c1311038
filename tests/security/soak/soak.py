"""The run: ordinary clients all the time, attackers in two of its parts, and what is measured meanwhile.

::

    control | attack | control | attack | control
      1/15     6/15      1/15     6/15     1/15

So what else the machine does falls on both alike. The attackers of a part leave all at once at its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.machine import busy_seconds, cpu_seconds
from bench.simulated_engine import SimulatedEngine
from highwater.terminal.demo.process import DemoError
from tests.security.soak.clients import Answer, Clients, Service
from tests.security.soak.sidecar import ROOT, Held, SoakSidecar

ATTACK_PARTS = 2
CONTROL_SHARE = 0.2
MARK_SHARE = 1 / 6  # minute five of thirty
SAMPLE_SECONDS = 1.0
SAMPLES_OF_A_LEVEL = 5
RESET_SECONDS = 120.0
WARM_UP_SECONDS = 6.0
# Idle engine connections, held for 4 s, and answers that the sidecar lingers on, for 5 s, have gone by then.
SETTLE_SECONDS = 8.0
RELEASE_SECONDS = 60.0
# A sidecar that grows so much has failed; to go on would only take the machine's memory.
GIVE_UP_BYTES = 400_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run.

    Attributes:
        seconds: Control and attack parts together.
        clients: Ordinary ones that stream at once.
        scale: Of the number of attackers.
        seed: Of everything that is drawn.
        attacks: Only these kinds; empty: all.
    """

    seconds: float
    clients: int
    scale: float
    seed: int
    attacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run, in seconds of `time.monotonic`."""

    has_attackers: bool
    began: float
    ended: float


@dataclass(slots=True)
class SoakResult:
    """All that a run found.

    Attributes:
        service: What the ordinary clients and the operator saw.
        parts: Control and attack, in order.
        rss: Time and bytes, one sample a second.
        attacks: Sums over the parts, by kind.
        at_start: What the sidecar held before the run.
        at_end: What it held when all had left.
        gave_up: Why the run ended early.
        sidecar_cores: That it used, on average.
        other_cores: That neither the run's processes nor idling used, on average.
    """

    service: Service
    at_start: Held
    at_end: Held
    parts: list[Part] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)
    attacks: dict[str, Counter[str]] = field(default_factory=dict)
    gave_up: str | None = None
    sidecar_cores: float = 0.0
    other_cores: float = 0.0

    def answers(self, *, has_attackers: bool) -> list[Answer]:
        """Those whose request was sent and whose first byte came within one part with attackers, or without."""
        parts = [part for part in self.parts if part.has_attackers is has_attackers]
        return [
            answer
            for answer in self.service.answers
            if any(part.began <= answer.asked and answer.first_byte <= part.ended for part in parts)
        ]

    def left(self) -> dict[str, int]:
        """Return what the sidecar holds more of than before, by name."""
        return self.at_end.more_than(self.at_start)

    def rss_at_mark(self) -> float:
        """At a sixth of the run."""
        began, ended = self.parts[0].began, self.parts[-1].ended
        return self._level(began + (ended - began) * MARK_SHARE)

    def rss_at_end(self) -> float:
        """The higher of the end of the last attack, while the attackers were there, and of the run."""
        attacked = [part.ended for part in self.parts if part.has_attackers]
        return max(self._level(at) for at in (attacked[-1], self.parts[-1].ended))

    def _level(self, at: float) -> float:
        """The median of the last samples before a time."""
        before = [size for time_, size in self.rss if time_ <= at] or [self.rss[0][1]]
        return statistics.median(before[-SAMPLES_OF_A_LEVEL:])


class _TooLarge(Exception):
    """The sidecar's memory is more than the machine should give it."""


def run(options: Options, folder: Path) -> SoakResult:
    """Run engine, sidecar, clients and attackers, and measure.

    Raises:
        DemoError: Engine or sidecar did not start, or the attackers failed by themselves.
    """
    with (
        SimulatedEngine(folder, "tests.security.soak.engine") as engine,
        SoakSidecar(engine.url, folder) as sidecar,
    ):
        return asyncio.run(_Run(options, engine, sidecar).run())


class _Run:
    def __init__(self, options: Options, engine: SimulatedEngine, sidecar: SoakSidecar) -> None:
        self._options = options
        self._engine = engine
        self._sidecar = sidecar
        self._clients = Clients(f"http://127.0.0.1:{sidecar.port}", options.clients, options.seed)

    async def run(self) -> SoakResult:
        at_start = await self._warm_up()
        measured = SoakResult(self._clients.service, at_start, at_start)
        began, others, sidecar = time.monotonic(), self._others_seconds(), cpu_seconds(self._sidecar.pid)
        async with self._clients.running():
            watch = asyncio.create_task(self._watch(measured.rss))
            parts = asyncio.create_task(self._parts(measured))
            await asyncio.wait({watch, parts}, return_when=asyncio.FIRST_COMPLETED)
            for task in (watch, parts):
                task.cancel()
            for error in await asyncio.gather(watch, parts, return_exceptions=True):
                if isinstance(error, _TooLarge):
                    measured.gave_up = str(error)
                elif isinstance(error, Exception):
                    raise error
        seconds = time.monotonic() - began
        measured.sidecar_cores = (cpu_seconds(self._sidecar.pid) - sidecar) / seconds
        measured.other_cores = (self._others_seconds() - others) / seconds
        await self._wait_for_release(measured)
        return measured

    async def _warm_up(self) -> Held:
        """Have everything loaded that is loaded once, leave, and return what the sidecar holds then."""
        clients = Clients(f"http://127.0.0.1:{self._sidecar.port}", self._options.clients, self._options.seed)
        async with clients.running():
            await asyncio.sleep(WARM_UP_SECONDS)
            seen = self._sidecar.held().objects
        if seen.get("ClientConnection", 0) < self._options.clients / 2:  # the others pause, or connect anew
            raise DemoError(f"the sidecar has {self._options.clients} clients and counts otherwise: {seen}")
        await clients.reset()
        if clients.service.failed:
            raise DemoError(f"ordinary clients fail without attackers: {clients.service.failures}")
        await asyncio.sleep(SETTLE_SECONDS)
        return self._sidecar.held()

    async def _parts(self, measured: SoakResult) -> None:
        await asyncio.sleep(WARM_UP_SECONDS)  # until every client streams
        control = self._options.seconds * CONTROL_SHARE / (ATTACK_PARTS + 1)
        attack = self._options.seconds * (1 - CONTROL_SHARE) / ATTACK_PARTS
        for number in range(ATTACK_PARTS):
            await self._part(measured, control, has_attackers=False)
            await self._part(measured, attack, has_attackers=True, seed=self._options.seed + number)
        await self._part(measured, control, has_attackers=False)

    async def _part(self, measured: SoakResult, seconds: float, *, has_attackers: bool, seed: int = 0) -> None:
        began = time.monotonic()
        # One that is refused may hold requests for ten seconds: a short control part has no room for it.
        has_resets = has_attackers or seconds >= RESET_SECONDS / 2
        operator = asyncio.create_task(self._reset_now_and_then(began + seconds if has_resets else began))
        try:
            if has_attackers:
                await self._attack(measured, seconds, seed)
            else:
                await asyncio.sleep(seconds)
        finally:
            measured.parts.append(Part(has_attackers, began, time.monotonic()))
            await operator

    async def _reset_now_and_then(self, until: float) -> None:
        # In a part of 24 s that leaves ten for those under way before it, and ten for it.
        pause = min(RESET_SECONDS, 0.5 * (until - time.monotonic()))
        while time.monotonic() + 1.5 * pause < until:
            await asyncio.sleep(pause)
            await self._clients.reset()

    async def _attack(self, measured: SoakResult, seconds: float, seed: int) -> None:
        words = (str(self._sidecar.port), str(self._options.scale), str(seed), *self._options.attacks)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.security.soak.attackers", *words, cwd=ROOT, stdin=-1, stdout=-1
        )
        try:
            await asyncio.sleep(seconds)
        finally:
            printed, _ = await process.communicate(b"")  # closes its standard input, which ends it
            if process.returncode:
                raise DemoError("the attackers failed by themselves; what they printed says why")
            for name, counts in json.loads(printed).items():
                measured.attacks.setdefault(name, Counter()).update(counts)

    async def _watch(self, samples: list[tuple[float, int]]) -> None:
        first = self._sidecar.rss_bytes()
        while True:
            size = self._sidecar.rss_bytes()
            samples.append((time.monotonic(), size))
            if size > first + GIVE_UP_BYTES:
                raise _TooLarge(f"the sidecar grew by {(size - first) / 1e6:.0f} MB; the run was ended")
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _wait_for_release(self, measured: SoakResult) -> None:
        """Wait until the sidecar holds no more than at the start, or long enough."""
        deadline = time.monotonic() + RELEASE_SECONDS
        while True:
            await asyncio.sleep(1.0)
            measured.at_end = self._sidecar.held()
            if not measured.left() or time.monotonic() > deadline:
                return

    def _others_seconds(self) -> float:
        """Core-seconds that other processes took so far; the attackers' are known once they have ended."""
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return busy_seconds() - own - sum(map(cpu_seconds, (*self._engine.pids(), *self._sidecar.pids())))
