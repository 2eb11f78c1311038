"""The host gives no more than it has, shared among the ranks that ask at the same moment."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from highwater_worker.devices import HostMemory
from highwater_worker.encoder_cache.mover import read_host_budget
from highwater_worker.errors import Notes, RefusedError


def budget(given=None, *, free=1000, taken=0, notes=None, **parallel):
    worker = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**parallel)))
    host = HostMemory(None, None, None, None, free)
    return read_host_budget(worker, given, taken, notes or Notes(), host)


def test_the_default_is_half_of_what_the_host_could_give():
    """What lies there already counts, so that trimming again and again does not take all of it."""
    assert budget().total == 500
    assert (budget(free=600, taken=400).total, budget(free=600, taken=400).left) == (500, 100)
    assert budget(free=500, taken=500).left == 0


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({}, 1),
        ({"world_size": 4}, 4),
        ({"world_size": 4, "local_world_size": 2}, 2),
        ({"world_size": 2, "data_parallel_size_local": 2}, 4),
        ({"world_size": 0, "data_parallel_size_local": 0}, 1),
    ],
)
def test_the_ranks_on_a_machine_share_it(parallel, ranks):
    assert budget(**parallel).total == 1000 // ranks // 2


def test_a_budget_holds_as_it_is_given():
    assert budget(900).total == 900
    assert budget(0).total == 0


def test_more_than_the_host_has_is_cut_and_named():
    """The kernel would end the worker's process, and with it the engine."""
    notes = Notes()
    assert budget(5000, taken=100, notes=notes).total == 1100
    assert [note["name"] for note in notes.as_list()] == ["host_budget_bytes"]


def test_an_unreadable_host_needs_a_budget():
    assert budget(300, free=None).total == 300
    with pytest.raises(RefusedError, match="give host_budget_bytes"):
        budget(free=None)
