"""The workers' recorders: started with each life of the engine, then read at every poll.

The call that starts them runs on every data-parallel engine although only the first one's workers respond, so a rank
counts as soon as its file exists. Recorders that another sidecar started, or this one before it was restarted, are read
and left alone. Nothing depends on them: without a folder, or where they do not start, the workers' responses remain.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from highwater.engine.client import Engine, WorkerAnswer
from highwater.model.components import MemoryPoint, thin
from highwater.process.clocks import SYSTEM, Clocks
from highwater.process.errors import EngineError
from highwater.watch.recorder.contents import Identity, RingUnusable
from highwater.watch.recorder.folder import MAX_FILES, RecorderFolder, last_life
from highwater.watch.recorder.rank import RankRecord
from highwater_worker.wire import ring_name

RETRY_SECONDS = 30.0
# The files of earlier lives of the engine stay so long: an incident report may need them.
STALE_SECONDS = 600.0
SWEEP_SECONDS = 60.0
# Until a reading is newer than a remedy. A worker writes one at its end, and for two seconds after it a heartbeat every
# 0.1 s, which says that the reading still holds; one that has long been idle writes a heartbeat a second.
WAIT_SECONDS = 1.3
WAIT_STEP_SECONDS = 0.1
# Readings of one moment may differ by less: the clocks are floating-point numbers.
_INSTANT = 0.001
SAMPLES_WHOLE = 200
# Of all ranks in one response: writing many megabytes of JSON would hold up every stream of the proxy.
MAX_SAMPLES = 8000

log = logging.getLogger("highwater.recorders")


@dataclass(frozen=True, slots=True)
class Coverage:
    """The recorders at one moment, compared with the ranks that there should be."""

    writing: tuple[RankRecord, ...] = ()  # the records of ranks that write and have a reading
    is_complete: bool = False  # every expected rank writes, and shows as much as its worker would report
    has_entries: bool = False  # and the entries of its encoder cache
    offers_calls: bool = False  # every expected rank writes that our operations may be called on its worker


def coverage(records: Sequence[RankRecord], expected: int | None) -> Coverage:
    alive = [record for record in records if record.status == "alive"]
    writing = tuple(record for record in alive if record.newest is not None)
    # A worker whose steps run where they cannot be seen has a recorder that shows little (worker_ext/README.md).
    newest = [record.newest for record in writing if record.newest is not None]
    full = [one for one in newest if one.device.traits.is_host_memory or one.torch.allocated_bytes is not None]
    is_complete = expected is not None and len(full) >= expected
    # Either number may be too low; a call of a worker without our operations ends the engine.
    most = max(expected or 0, ranks_expected(records) or 0)
    return Coverage(
        writing,
        is_complete=is_complete,
        has_entries=is_complete and all(record.table is not None for record in writing),
        offers_calls=most > 0 and sum(bool(record.identity.rpc) for record in alive) >= most,
    )


def ranks_expected(records: Sequence[RankRecord]) -> int | None:
    return max((record.identity.ranks_expected or 0 for record in records), default=0) or None


class Recorders:
    """The recorders of one engine's workers, which write into ``folder``, under the same path.

    They take ``rate`` samples in a second and reach back ``seconds``. ``records`` are their last contents, after
    the engine's end too; ``show_starts``: the workers start them by themselves, so that an engine that loads is seen.
    ``left`` are those of the last life in the folder, where no worker writes.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        rate: float,
        seconds: float,
        clocks: Clocks = SYSTEM,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        proc: Path = Path("/proc"),
    ) -> None:
        self.records: tuple[RankRecord, ...] = ()
        self.left: tuple[RankRecord, ...] = ()
        self.show_starts = False
        self.host = socket.gethostname()
        self._engine = engine
        self._folder = folder
        self._rate = rate
        self._seconds = seconds
        self._monotonic = clocks.monotonic
        self._sleep = sleep
        self.files = RecorderFolder(folder, clocks=clocks, proc=proc)
        self._refusal: str | None = None
        self._ambiguity: str | None = None  # several engines' recorders, so that none can be followed
        self._started = 0  # so many workers responded that theirs runs
        self._begun_at: float | None = None
        self._swept_at = clocks.monotonic()
        self._removal_problems: frozenset[str] = frozenset()
        self._reading = asyncio.Lock()

    @property
    def ranks_expected(self) -> int | None:
        return ranks_expected(self.records)

    @property
    def model(self) -> str | None:
        return next((record.identity.model for record in self.records if record.identity.model), None)

    @property
    def extension_versions(self) -> tuple[str, ...]:
        """The worker package's versions: one, unless something is wrong."""
        return tuple(sorted({record.identity.extension for record in self.records if record.identity.extension}))

    def are_here(self, records: Iterable[RankRecord]) -> bool:
        return any(record.identity.host == self.host for record in records)

    @property
    def are_followed(self) -> bool:
        return self.files.instance is not None

    @property
    def problem(self) -> str | None:
        if (known := self._refusal or self._ambiguity) is not None:
            return known
        if self.files.problems:
            return self.files.problems[0]
        if len(self.records) < self._started:
            there = f"{len(self.records)} of {self._started} workers"
            return f"recorder_dir: {self._folder} has the files of {there}: do all have it under the same path?"
        return None

    # --- starting ---

    def must_begin(self) -> bool:
        if self._started and self._refusal is None and len(self.records) >= self._started:
            return False
        return self._begun_at is None or self._monotonic() - self._begun_at >= RETRY_SECONDS

    def forget_refusal(self) -> None:
        self._refusal = None

    async def adopt(self, *, former: str | None = None, self_started: bool = False) -> None:
        """Follow recorders that run already, which takes no call: workers start them by themselves.

        The files of ``former``, a life that has ended, look alive for a moment longer. ``self_started`` leaves
        recorders alone that a sidecar started: they may be another engine's.
        """
        # A writer that is only silent has not ended: another engine's files are not its.
        has_writer = any(record.status not in {"dead", "ended"} for record in self.records)
        if self.are_followed and (has_writer or not self.records):
            return
        others = await asyncio.to_thread(self.files.others)
        self.left = last_life(others, self.host)
        self.show_starts |= any(record.identity.self_started for record in self.left)
        # Where an engine's processes have this host's name, as in a pod, those of others are another engine's.
        here = {other.instance for other in others if other.record is not None and self.are_here((other.record,))}
        alive = {
            other.instance
            for other in others
            if other.is_alive
            and other.instance != former
            and (other.instance in here or not (here or self.are_here(self.records)))
            and (not self_started or (other.record is not None and other.record.identity.self_started))
        }
        self._ambiguity = None
        if len(alive) > 1:
            self._ambiguity = (
                f"recorder_dir: {self._folder} has the recorders of {len(alive)} engines; give each a folder of its own"
            )
        elif alive:
            self._refusal, self._started = None, 0
            self.files.follow(alive.pop())
            self.records = await asyncio.to_thread(self.files.read)

    async def begin(self) -> None:
        """Start the recorders. An error is kept in ``problem``, and tried again later."""
        self._begun_at = self._monotonic()
        # One name for a whole life: the call may come late, or to some workers only, and recorders that run go on then.
        instance = self.files.instance or secrets.token_hex(8)
        self.files.follow(instance)
        try:
            answers = await self._start(instance)
            names = (one.get("instance") for one in answers if one.is_ok and one.get("other"))
            other = next((name for name in names if isinstance(name, str) and re.fullmatch("[0-9a-f]{16}", name)), None)
            if other is not None:
                # Ours may run on some, also of those engines whose workers do not respond: all must have one name.
                await self._engine.rpc("recorder_stop", {"instance": instance})
                self.files.follow(other)
                answers = await self._start(other)
        except EngineError as exc:
            self._refusal = f"the recorders were not started: {exc}"
            return
        refused = [one for one in answers if not one.is_ok]
        self._started = len(answers) - len(refused)
        if refused:
            self._refusal = f"{refused[0].rank_name} did not start its recorder: {refused[0].message}"
            return
        named = (answer.get("path") for answer in answers)
        paths = (Path(path) for path in named if isinstance(path, str) and path.isprintable())
        folder = next((path.parent for path in paths if path.parent != self._folder), None)
        self._refusal = None
        if folder is not None:
            self._refusal = (
                f"recorder_dir: the workers' recorders, which this sidecar did not start, write to {folder}, "
                f"not {self._folder}"
            )

    async def _start(self, instance: str) -> Sequence[WorkerAnswer]:
        payload = {"directory": str(self._folder), "instance": instance, "rate": self._rate, "seconds": self._seconds}
        return await self._engine.rpc("recorder_start", payload)

    def forget(self) -> None:
        self.files.follow(None)
        self._refusal, self._started = None, 0
        self._begun_at = None

    def close(self) -> None:
        self.files.close()

    # --- reading ---

    async def read(self, *, within_seconds: float | None = None) -> tuple[RankRecord, ...]:
        """Return every rank's record; where ``within_seconds``, once no writer's is older, or WAIT_SECONDS passed."""
        if self._monotonic() - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = self._monotonic()
            problems = (await asyncio.to_thread(self.files.remove_stale, STALE_SECONDS)).problems
            for problem in sorted({*problems} - self._removal_problems):
                log.warning("recorder_dir: %s", problem)
            self._removal_problems = frozenset(problems)
        if self.files.instance is None:
            return ()
        # Not in the loop: with many ranks it is milliseconds, which every stream of the proxy would wait for.
        records = await asyncio.to_thread(self.files.read)
        began = self._monotonic()
        for _ in range(round(WAIT_SECONDS / WAIT_STEP_SECONDS) if within_seconds is not None else 0):
            limit = (within_seconds or 0.0) + self._monotonic() - began
            if all(_is_within(record, limit) for record in records):
                break
            await self._sleep(WAIT_STEP_SECONDS)
            records = await asyncio.to_thread(self.files.read)
        self.records = records
        self.show_starts |= any(record.identity.self_started for record in records)
        return records

    async def samples(self, since: float) -> list[dict[str, Any]]:
        """Return each rank's samples since ``since`` (Unix seconds), oldest first, thinned. One caller at a time."""
        instance = self.files.instance
        if instance is None:
            return []
        async with self._reading:
            return await asyncio.to_thread(self._samples, instance, since)

    def _samples(self, instance: str, since: float) -> list[dict[str, Any]]:
        rings = sorted(self._last_samples(instance, since), key=lambda ring: ring[0].key)
        most = max(MAX_SAMPLES // max(len(rings), 1), 1)
        return [
            {
                "dp_rank": identity.dp_rank,
                "rank": identity.rank,
                "pid": identity.pid,
                "samples": [{"at": point.at, **point.row()} for point in thin(samples, most)],
            }
            for identity, samples in rings
        ]

    def _last_samples(self, instance: str, since: float = 0.0) -> Iterator[tuple[Identity, tuple[MemoryPoint, ...]]]:
        for path in islice(self._folder.glob(ring_name(instance, "*")), MAX_FILES):
            with suppress(RingUnusable):
                yield self.files.last_samples(path, since)

    def last_minutes(self, instance: str) -> dict[int, tuple[MemoryPoint, ...]]:
        """Return the samples of one life's files by their writers' pids, thinned; slow, and safe in a thread."""
        return {
            # The last ones whole, those before them thinned.
            identity.pid: thin(samples, 2 * SAMPLES_WHOLE, recent=SAMPLES_WHOLE)
            for identity, samples in self._last_samples(instance)
        }


def _is_within(record: RankRecord, seconds: float) -> bool:
    if (
        record.status != "alive"
        or record.reading_age_seconds is None
        or record.reading_age_seconds < seconds - _INSTANT
    ):
        return True
    # In the middle of a step there is no reading to come.
    return record.progress is not None and (record.progress.step_seconds or 0.0) > WAIT_SECONDS
