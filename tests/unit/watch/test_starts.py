"""Which worker a failed start is blamed on."""

from __future__ import annotations

from types import SimpleNamespace

from highwater.model.engine import StartedRank
from highwater.model.rank import StartPhase
from highwater.watch.starts import start_failure


def record(rank, status, *phases):
    """A worker's recorder, as far as its start goes."""
    identity = SimpleNamespace(instance="a" * 16)
    started = StartedRank(rank=rank, dp_rank=0, host="a", pid=100 + rank, status=status, phases=phases)
    return SimpleNamespace(title=f"rank {rank}", pid=100 + rank, identity=identity, started=started)


def test_the_rank_that_was_killed_is_named():
    """vLLM ends the others in order."""
    done = StartPhase(name="init", at=1.0, seconds=1.0)
    failure = start_failure([record(0, "ended", done), record(1, "dead", done)], 9.0)
    assert failure.summary == "the engine did not start: the process of rank 1 ended after phase init"


def test_the_rank_that_failed_first_is_named():
    """Another one began its phase earlier, and failed a minute later, because its peer was gone."""
    echo = StartPhase(name="weights", at=100.0, seconds=60.0, error="RuntimeError: peer is gone")
    cause = StartPhase(name="weights", at=100.2, seconds=1.0, error="OutOfMemoryError")
    failure = start_failure([record(0, "ended", echo), record(1, "ended", cause)], 200.0)
    assert failure.summary.endswith("rank 1 failed in phase weights after 1.0 s: OutOfMemoryError")
