"""An explanation's sums are the allocator's, and its words say what is too small, what pins it, and what goes back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from highwater.snapshots.explanation import explain, kind_for, new_segment, rounded
from highwater.snapshots.model import parse
from highwater.snapshots.words import explanation_text
from tests.unit.snapshots.made import MIB, block, fragmented, frames, segment, snapshot, snapshots

FREE = [block(64 * MIB, "free")]


def one(raw, want=None):
    """The explanation's only device."""
    (device,) = explain(parse(raw), want)["devices"]
    return device


def said(raw, want=None):
    return explanation_text(explain(parse(raw), want), "some.pickle")


def test_the_reported_pattern_is_named():
    """59.38 GiB reserved, 54.77 allocated, 180 MiB refused: the free memory lies in holes that are too small."""
    text = said(fragmented(), 180 * MIB)
    assert "59.38 GiB reserved in 58 segments, 54.76 GiB allocated, 4.62 GiB free." in text
    wanted = (
        "180 MiB is wanted: 4.62 GiB is free in 57 segments, and the largest hole among the large blocks of stream 0 "
        "is 83.0 MiB < 180 MiB wanted."
    )
    assert wanted in text
    assert "release would give back 0 B (0 whole segments)." in text
    assert "57 segments with 4.62 GiB free, held by 969 MiB from site-packages/vllm/model_runner.py:7 encode" in text


@settings(max_examples=settings.default.max_examples * 6 // 10)
@given(snapshots())
def test_every_byte_is_counted_once(raw):
    """Allocated, pending and free make up what is reserved, on each device and over its pools."""
    found = explain(parse(raw))["devices"]
    assert sum(device["reserved_bytes"] for device in found) == sum(each["total_size"] for each in raw["segments"])
    for device in found:
        for sums in (device, *device["pools"]):
            parts = sums["allocated_bytes"] + sums["pending_bytes"] + sums["free_bytes"]
            assert parts == sums["reserved_bytes"]
            assert (
                sums["held_free_bytes"] + sums["whole_free_bytes"] == sums["free_bytes"] >= sums["largest_free_bytes"]
            )
        for key in ("reserved_bytes", "allocated_bytes", "free_bytes", "segments"):
            assert sum(pool[key] for pool in device["pools"]) == device[key]
        assert device["release_bytes"] + device["kept_whole_bytes"] <= device["free_bytes"]
        expandable = device["expandable"]
        assert (
            expandable["pages_bytes"] <= expandable["at_most_bytes"] <= device["free_bytes"] - device["release_bytes"]
        )


@settings(max_examples=30)
@given(snapshots())
def test_any_snapshot_has_a_text(raw):
    """Every layout is explained."""
    assert said(raw, 3 * MIB)


def test_release_gives_back_whole_segments_and_keeps_private_pools():
    """A graph's pool keeps its free segments as long as the graph lives."""
    whole, held = segment(FREE), segment([block(MIB), *FREE])
    device = one(snapshot([whole, held, segment(FREE, segment_pool_id=(0, 7))]))
    assert (device["release_bytes"], device["release_segments"], device["kept_whole_bytes"]) == (64 * MIB, 1, 64 * MIB)
    assert "64.0 MiB more is free in private pools" in said(snapshot([whole, segment(FREE, segment_pool_id=(0, 7))]))


def test_an_expandable_segment_gives_back_whole_pages():
    """20 MiB each, counted from its start: of 50 MiB free behind 10 MiB in use, two."""
    blocks = [block(10 * MIB), block(50 * MIB, "free")]
    assert one(snapshot([segment(blocks, is_expandable=True)]))["release_bytes"] == 40 * MIB
    fixed = one(snapshot([segment(blocks)]))
    assert (fixed["release_bytes"], fixed["expandable"]["pages_bytes"]) == (0, 40 * MIB)
    assert fixed["expandable"]["at_most_bytes"] == 50 * MIB


def test_a_hole_serves_its_own_pool_alone():
    """Neither a graph's, nor another stream's, nor a small block serves a large request of the default pool."""
    elsewhere = [
        segment(FREE, segment_pool_id=(0, 7)),
        segment(FREE, stream=5),
        segment(FREE, segment_type="small"),
        segment([block(32 * MIB, "free"), block(100 * MIB)]),
    ]
    wanted = one(snapshot(elsewhere), 48 * MIB)["wanted"]
    assert (wanted["stream"], wanted["largest_free_bytes"], wanted["fits"]) == (0, 32 * MIB, False)
    assert one(snapshot([*elsewhere, segment(FREE)]), 48 * MIB)["wanted"]["fits"]


@pytest.mark.parametrize(
    ("size", "kind", "taken"),
    [
        (1, "small", 2 * MIB),
        (MIB, "small", 2 * MIB),
        (MIB + 1, "large", 20 * MIB),
        (10 * MIB - 512, "large", 20 * MIB),
        (10 * MIB, "large", 10 * MIB),
        (181 * MIB, "large", 182 * MIB),
    ],
)
def test_requests_are_rounded_as_pytorch_rounds_them(size, kind, taken):
    """To 512 bytes; and a segment for them to 2 MiB, 20 MiB, or steps of 2 MiB."""
    assert (kind_for(size), new_segment(size), rounded(size) % 512) == (kind, taken, 0)


def test_the_history_names_the_largest_request():
    """The last one that failed comes before any that did not."""
    trace = [
        {"action": "alloc", "size": 96 * MIB, "stream": 0, "addr": 1, "frames": []},
        {"action": "alloc", "size": 8, "stream": 0, "addr": 2, "frames": []},
    ]
    raw = snapshot([segment(FREE)], trace)
    assert (one(raw)["wanted"]["from"], one(raw)["wanted"]["bytes"]) == ("history", 96 * MIB)
    assert "The largest request in the history has 96.0 MiB: 64.0 MiB is free in 1 segment" in said(raw)
    failed = {"action": "oom", "size": 70 * MIB, "stream": 0, "device_free": 12 * MIB, "frames": []}
    text = said(snapshot([segment(FREE)], [*trace, failed]))
    assert "The last request that failed has 70.0 MiB" in text
    assert "The driver had 12.0 MiB free when it failed." in text


def test_without_history_it_says_how_to_ask_and_how_to_turn_it_on():
    """Nothing is guessed."""
    text = said(snapshot([segment([block(MIB), *FREE])]))
    assert "is not known: the snapshot has no history. Ask with --want 180MiB." in text
    assert "--record-stacks 10" in text


def test_a_pin_names_the_place_outside_pytorch():
    """The innermost frame is always PyTorch's own; who called it is of interest."""
    raw = snapshot([segment([block(MIB, "live", frames("encode", "run")), *FREE])])
    (pin,) = one(raw)["pins"]
    assert pin["stack"] == ["site-packages/vllm/model_runner.py:7 encode", "site-packages/vllm/model_runner.py:7 run"]
    assert (pin["free_bytes"], pin["held_blocks"], pin["held_bytes"]) == (64 * MIB, 1, MIB)


def test_what_is_shown_is_bounded():
    """A snapshot of ten thousand segments gives an answer of a few kilobytes, which says what it left out."""
    device = one(snapshot([segment([block(MIB), *FREE], address=index, stream=index) for index in range(10_000)]))
    assert (len(device["pins"]), device["pins_left_out"]) == (20, 9_980)
    assert (len(device["pools"]), device["pools_left_out"]) == (200, 9_800)
