"""What grew between two snapshots is named by its stack, and what makes them hard to compare is said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from highwater.snapshots.difference import differ
from highwater.snapshots.model import parse
from highwater.snapshots.words import difference_text
from tests.unit.snapshots.made import MIB, block, frames, segment, snapshot, snapshots

LEAK, WEIGHTS = frames("encode", "run"), frames("load_model")
NAME = "highwater-snapshot-{}-{}-{}-{}.pickle"
FIRST, SECOND = NAME.format("20260101T000000000Z", 0, 1, 42), NAME.format("20260101T010000000Z", 0, 1, 42)


def leaking(count, *, stack=LEAK):
    return snapshot(
        [
            segment([block(500 * MIB, "live", WEIGHTS if stack else None)]),
            *(segment([block(8 * MIB, "live", stack), block(12 * MIB, "free")], address=at) for at in range(count)),
        ]
    )


def said(before, after, names=(FIRST, SECOND)):
    return difference_text(differ(parse(before), parse(after)), *names)


def test_a_leak_is_named_by_its_stack():
    """Unchanged stacks are not mentioned."""
    text = said(leaking(2), leaking(12))
    assert "allocated 516 MiB → 596 MiB (+80.0 MiB)" in text
    assert "+80.0 MiB in +10 blocks: site-packages/vllm/model_runner.py:7 encode ← " in text
    assert "load_model" not in text


def test_without_history_sizes_are_compared_and_it_says_how_to_turn_it_on():
    """Ten blocks of 8 MiB are a clue, if not a place."""
    text = said(leaking(2, stack=None), leaking(12, stack=None))
    assert "+80.0 MiB in +10 blocks: blocks of 8.0 MiB" in text
    assert "highwater snapshot take --record-stacks 10" in text


@settings(max_examples=30)
@given(snapshots(), snapshots())
def test_what_grew_sums_to_the_whole(before, after):
    """By stack and by size alike: every byte held, on each device, that one has and the other has not."""
    for device in differ(parse(before), parse(after))["devices"]:
        held = [device[key]["allocated_bytes"] + device[key]["pending_bytes"] for key in ("before", "after")]
        for key in ("by_stack", "by_size"):
            shown = sum(row["bytes"] for row in device[key]) + device[f"{key}_left_out"]["bytes"]
            assert shown == held[1] - held[0]


@settings(max_examples=20)
@given(snapshots())
def test_a_snapshot_differs_from_itself_in_nothing(raw):
    """And so it is said."""
    assert all(not device["by_stack"] and not device["by_size"] for device in differ(parse(raw), parse(raw))["devices"])


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        (NAME.format("20260101T010000000Z", 0, 2, 42), "of different ranks, 1 and 2"),
        (NAME.format("20260101T010000000Z", 3, 1, 42), "of different data-parallel ranks, 0 and 3"),
        (NAME.format("20260101T010000000Z", 0, 1, 43), "of different processes, 42 and 43"),
        (NAME.format("20250101T010000000Z", 0, 1, 42), "the first is the younger one"),
    ],
)
def test_what_cannot_be_compared_is_warned_of(name, warning):
    """Another rank's memory differs without having grown."""
    assert f"warning: {'' if 'younger' in warning else 'they are '}{warning}" in said(
        leaking(1), leaking(2), (FIRST, name)
    )
    assert "warning" not in said(leaking(1), leaking(2))


def test_another_device_and_missing_stacks_are_warned_of():
    """Neither is growth."""
    elsewhere = snapshot([segment([block(MIB)], device=1)])
    text = said(leaking(1), elsewhere)
    assert "warning: device 0 is in the first alone" in text
    assert "warning: device 1 is in the second alone" in text
    assert "warning: only one of them has stacks" in text
