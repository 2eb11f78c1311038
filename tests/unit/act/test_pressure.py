"""Where the default rule acts, on any device and any utilization."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.act.pressure import MIN_SLACK_BYTES, at_rest_bytes, derive, requested_bytes, slack_bytes
from highwater.model.rank import Launch
from tests.fakes.ranks import ASCEND, GIB, H100, MIB, reading


def gib(size: int) -> float:
    return round(size / GIB, 2)


@pytest.mark.parametrize(
    ("total", "utilization", "waters"),
    [
        pytest.param(ASCEND, 0.90, (1.52, 3.05), id="the story's 32B"),
        pytest.param(ASCEND, 0.95, (0.76, 1.52), id="the story's 8B"),
        pytest.param(H100, 0.90, (1.98, 3.96), id="H100"),
        pytest.param(H100, 0.92, (1.58, 3.16), id="H100, vLLM's default"),
        pytest.param(H100, 0.95, (0.99, 1.98), id="H100, tight"),
        pytest.param(int(139.8 * GIB), 0.90, (2.0, 4.0), id="H200"),
        pytest.param(22 * GIB, 0.90, (0.55, 1.1), id="L4"),
        pytest.param(22 * GIB, 0.98, (0.22, 0.4), id="L4, very tight"),
        pytest.param(8 * GIB, 0.92, (0.32, 0.58), id="8 GiB"),
        pytest.param(int(9.75 * GIB), 0.92, (0.39, 0.7), id="a MIG slice"),
    ],
)
def test_the_waters_follow_from_the_plan(total, utilization, waters):
    """Free bytes, not a share: 0.93 of an H200 would leave 9.9 GiB, of an L4 1.6."""
    one = reading(total=total, rest=total // 2, requested=int(total * utilization))
    found = derive(slack_bytes(one, None) or 0)
    assert (gib(found.high), gib(found.low)) == waters


@given(slack=st.integers(MIN_SLACK_BYTES, 200 * GIB))
def test_the_waters_can_always_be_reached(slack):
    found = derive(slack)
    assert 0 < found.high < found.low <= slack * 0.9


def test_with_next_to_no_slack_there_is_no_rule():
    """Nothing that could be given back would last there."""
    assert derive(MIN_SLACK_BYTES - 1) is None
    assert derive(-GIB) is None


def test_what_moves_is_no_rest():
    assert at_rest_bytes(reading(rest=60 * GIB, encoder=2 * GIB, cached=3 * GIB, other=GIB)) == 60 * GIB


def test_reserve_that_release_cannot_give_back_is_rest():
    assert at_rest_bytes(reading(rest=60 * GIB, cached=3 * GIB, releasable=GIB)) == 62 * GIB
    assert at_rest_bytes(reading(rest=60 * GIB, cached=3 * GIB, releasable=None, split=GIB)) == 61 * GIB


def test_a_neighbour_that_grows_does_not_lower_the_waters():
    """The beginning of the engine's life counts, or the rule would shrink away without a word."""
    start = reading(rest=60 * GIB, requested=70 * GIB)
    grown = reading(rest=75 * GIB, requested=70 * GIB)
    assert slack_bytes(grown, start) == H100 - 70 * GIB
    assert slack_bytes(grown, None) == H100 - 75 * GIB


@pytest.mark.parametrize(
    ("device", "utilization", "requested", "found"),
    [
        ("cuda", 0.9, 70 * GIB, 70 * GIB),
        pytest.param("cuda", 0.92, None, None, id="--kv-cache-memory-bytes: the share sized nothing"),
        pytest.param("npu", 0.9, None, int(H100 * 0.9), id="old vllm-ascend does not say what it asked for"),
        ("npu", None, None, None),
    ],
)
def test_what_the_engine_asked_for(device, utilization, requested, found):
    assert requested_bytes(reading(device=device, utilization=utilization, requested=requested)) == found


def test_an_npu_whose_kv_cache_was_given_has_asked_for_no_share():
    """vllm-ascend from 0.19 on takes the bytes as they are: what is at rest is the plan."""
    one = replace(reading(device="npu", utilization=0.9, rest=40 * GIB), launch=Launch(kv_cache_given=True))
    assert requested_bytes(one) is None
    assert slack_bytes(one, None) == H100 - 40 * GIB


def test_without_a_request_rest_counts():
    assert slack_bytes(reading(rest=70 * GIB, utilization=0.92), None) == H100 - 70 * GIB


def test_unknown_use_is_no_plan():
    assert slack_bytes(reading(total=None), None) is None


def test_an_eight_gib_card_has_a_rule():
    one = reading(total=8 * GIB, rest=7 * GIB, requested=int(8 * GIB * 0.92))
    found = derive(slack_bytes(one, None) or 0)
    assert (found.high // MIB, found.low // MIB) == (327, 589)
