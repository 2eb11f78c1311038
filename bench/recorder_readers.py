"""What reading the workers' recorders costs the sidecar: 64 ranks, ten samples a second, read once a second."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

from app.sources.recorder import Recorder
from bench.figure import Figure, Goal, number
from bench.stage import Stage
from tests.fakes.ring import INSTANCE, MIB, MONO, WALL, FakeWriter, dump, moving

RANKS = 64
RATE = 10
RING_SECONDS = 120
SLOTS = (RATE + 1) * RING_SECONDS
ENTRIES = 500


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """A share of a core. The writers' part is not in it: they write between the reads, which alone are timed."""
    polls = 30 if short else RING_SECONDS + 30
    folder = stage.folder / "recorder"
    folder.mkdir()
    with ExitStack() as stack:
        writers = [FakeWriter(folder, pid=1000 + rank, slots=SLOTS, rank=rank, tp_rank=rank) for rank in range(RANKS)]
        for writer in writers:
            stack.callback(writer.path.unlink)
            stack.callback(writer.close)
        _write(writers, 0)
        elapsed = [0.0]
        recorder = Recorder(folder, INSTANCE, clock=lambda: WALL + elapsed[0], monotonic=lambda: MONO + elapsed[0])
        stack.callback(recorder.close)
        first = _read(recorder)
        seconds = []
        for poll in range(1, polls + 1):
            _write(writers, poll)
            elapsed[0] = poll + 1.0
            seconds.append(_read(recorder))
    assert not recorder.skipped
    return [
        Figure(
            what=f"Reading {RANKS} ranks' recorders once a second, CPU",
            value=statistics.mean(seconds) * 100,
            unit="% of a core",
            goal=Goal("under", 5.0),
            spread=f"{number(statistics.median(seconds) * 1e3)} ms a read at the median, the longest "
            f"{number(max(seconds) * 1e3)}; the first, which opens the files, {number(first * 1e3)}",
            method=f"{RANKS} simulated writers with {RATE} samples, one table of {ENTRIES} entries and a heartbeat "
            f"with stacks in it a second each, rings of {RING_SECONDS} s; CPU time of this thread in {polls} reads, "
            "the records written between them",
        )
    ]


def _write(writers: list[FakeWriter], second: int) -> None:
    """A second's records of every rank, and in the end a heartbeat in the middle of a long step, with its stacks."""
    stack = "\n".join(dump(*(f"some_module_{n}.py:{n} some_function" for n in range(1, 21))) for _ in range(8))
    rows = [(f"{number:064x}", 12 * MIB - number, float(second), False) for number in range(ENTRIES)]
    for writer in writers:
        for tick in range(RATE):
            writer.sample(second + tick / RATE)
        writer.table(second + 0.9, rows)
        long = moving(step_seconds=2.5, last_step_mono=MONO + second - 1.6)
        writer.heartbeat(second + 0.9, moving=long, dump=stack)


def _read(recorder: Recorder) -> float:
    began = time.thread_time()
    records = recorder.read()
    seconds = time.thread_time() - began
    assert len(records) == RANKS
    assert all(record.status == "alive" and len(record.records) == RATE for record in records)
    return seconds
