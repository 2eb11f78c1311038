"""Who is measured when, and where."""

import os
from contextlib import suppress

import pytest

from bench.dataplane.cores import Cores, on_core, spread
from bench.rounds import order

PROXIES = ("sidecar", "nginx", "vllm-router")


def test_each_round_has_all_of_them_and_each_begins_as_often():
    """Nobody always runs behind the same other one."""
    rounds = [order(PROXIES, turn) for turn in range(6)]
    assert all(sorted(one) == sorted(PROXIES) for one in rounds)
    assert sorted(one[0] for one in rounds) == sorted(PROXIES * 2)
    assert len({tuple(one) for one in rounds}) == 6


@pytest.mark.parametrize(
    ("usable", "expected"),
    [([3], Cores(3, 3, 3)), ([1, 0], Cores(0, 1, 1)), ([4, 5, 6, 7], Cores(4, 5, 6))],
)
def test_the_proxy_has_a_core_for_itself_where_there_are_two(usable: list[int], expected: Cores):
    """Upstream and load share the second one of two."""
    assert spread(usable) == expected


def test_a_core_is_lent_and_given_back():
    """Also when what ran there failed."""
    before = os.sched_getaffinity(0)
    with suppress(ZeroDivisionError), on_core(min(before)):
        assert os.sched_getaffinity(0) == {min(before)}
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before
