"""An engine on two nodes, as docs/fleet.md tells: the other node's recorder files lie where the sidecar cannot look."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from highwater.model.report import Report
from highwater.watch.recorder.recorders import RETRY_SECONDS
from tests.fakes.engine import USED_READY, Core, core_on


@pytest.fixture
def core(tmp_path) -> Iterator[Core]:
    """Two ranks of one engine, the second one elsewhere: its file is not in our folder."""
    made = core_on(recorder_dir=tmp_path)
    yield made
    made.recorders.close()
    for worker in made.fake.workers:
        worker.recorder.close()


async def working(core: Core, tmp_path) -> Report:
    """A poll of an engine that makes steps; what the other node writes stays there."""
    core.fake.running, core.fake.tokens = 1, core.fake.tokens + 100
    core.clock.advance(1.0)
    core.fake.end_step()
    for path in (tmp_path / "recorder").glob("*-4243.ring"):
        path.unlink()
    return await core.tick(0.0, spare_idle=True)


async def test_ranks_of_other_nodes_answer_the_call(core, tmp_path):
    for _ in range(3):
        report = await working(core, tmp_path)
    assert [(rank.rank, rank.used_bytes) for rank in report.ranks] == [(0, USED_READY), (1, USED_READY)]
    assert report.ranks[1].source == "rpc"
    assert (report.engine.state, report.stale, report.ranks_missing) == ("ready", False, ())
    assert "has the files of 1 of 2 workers" in (report.engine.hint or "")


async def test_they_are_asked_at_every_poll_while_the_engine_works(core, tmp_path):
    await working(core, tmp_path)
    core.fake.calls.clear()
    for _ in range(4):
        await working(core, tmp_path)
    assert core.fake.ops().count("memory") == 4


async def test_whether_it_moves_is_told_by_the_ranks_here(core, tmp_path):
    for _ in range(3):
        report = await working(core, tmp_path)
    assert (report.progress.verdict, len(report.progress.ranks)) == ("progressing", 1)


async def test_their_recorders_are_told_to_start_now_and_then(core, tmp_path):
    for _ in range(int(2 * RETRY_SECONDS)):
        await working(core, tmp_path)
    assert core.fake.ops().count("recorder_start") == 2
