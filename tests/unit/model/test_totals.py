"""The difference between two readings of the same ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.model.components import COMPONENT_NAMES, account
from highwater.model.growth import growth_since_ready
from highwater.model.rank import Components, Device
from highwater.model.remedies import compare, device_total, freed, total, used_total
from tests.fakes.engine import IMAGE_BYTES, IMAGES, USED_AFTER, USED_READY
from tests.unit.model.story import cpu, story, worker

GIB = 1024**3


def on_one_card(ranks):
    return tuple(replace(rank, device=replace(rank.device, uuid="GPU-a")) for rank in ranks)


def test_the_growth_of_the_story_is_the_encoder_cache():
    """58,432 MiB after the benchmark: 3,782 MiB more, all of it encoder outputs."""
    (change, _) = compare(story(), story(images=True))
    assert change.used_bytes == USED_AFTER - USED_READY == 3_965_714_432
    assert change.components == Components(**dict.fromkeys(COMPONENT_NAMES, 0) | {"encoder_cache_bytes": 3_965_714_432})


def test_freed_is_before_less_after():
    before, after = story(images=True), story()
    assert total(freed(before, after))[0] == 2 * IMAGES * IMAGE_BYTES
    assert total(freed(after, before))[0] == -2 * IMAGES * IMAGE_BYTES


def test_only_ranks_seen_at_both_ends_are_compared():
    ranks = story()
    assert [delta.rank for delta in compare(ranks[:1], ranks)] == [0]
    other_engine = tuple(replace(rank, dp_rank=1) for rank in ranks)
    assert compare(ranks, other_engine) == ()
    assert other_engine[1].key == (1, 1)
    assert total(()) == (None, Components())


def test_a_shared_cards_growth_and_gain_count_once():
    before, after = on_one_card(story()), on_one_card(story(images=True))
    before = tuple(replace(rank, used_bytes=20 * GIB) for rank in before)
    # Rank 0's outputs are its own, and stand under rank 1's non_torch; rank 1's likewise.
    grown_bytes = 2 * IMAGES * IMAGE_BYTES
    after = tuple(
        replace(
            rank,
            used_bytes=20 * GIB + grown_bytes,
            components=replace(rank.components, non_torch_bytes=rank.components.non_torch_bytes + IMAGES * IMAGE_BYTES),
        )
        for rank in after
    )
    used, parts = total(compare(before, after))
    assert used == grown_bytes
    assert (parts.encoder_cache_bytes, parts.non_torch_bytes) == (grown_bytes, 0)
    assert sum(getattr(parts, name) or 0 for name in COMPONENT_NAMES) == used
    assert growth_since_ready(before, after).since_ready_bytes == grown_bytes
    assert [delta.used_bytes for delta in compare(before, after)] == [grown_bytes, grown_bytes]


def test_a_component_unknown_at_either_end_has_no_difference():
    before = account(worker(used_bytes=100, weights_bytes=10))
    after = account(worker(used_bytes=150, weights_bytes=None))
    (delta,) = compare([before], [after])
    assert (delta.used_bytes, delta.components.weights_bytes) == (50, None)


# --- devices that ranks share, or do not ---


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        ({"uuid": "GPU-a", "index": 0}, {"uuid": "GPU-a", "index": 1}, True),
        ({"uuid": "GPU-a", "index": 0}, {"uuid": "GPU-b", "index": 0}, False),
        ({"index": 0, "physical_index": 4}, {"index": 1, "physical_index": 4}, True),
        ({"index": 0, "physical_index": 4}, {"index": 0, "physical_index": 5}, False),
        ({"index": 0}, {"index": 0}, False),
    ],
)
def test_a_card_is_known_by_its_identity_or_its_number_on_the_machine(first, second, is_one):
    """Not by the index that a process gives it: two engines each see their own device as 0."""
    ranks = [
        account(worker(rank=rank, device=Device(type="cuda", **device), used_bytes=10))
        for rank, device in enumerate((first, second))
    ]
    assert (ranks[0].card == ranks[1].card) is is_one
    assert used_total(ranks) == (10 if is_one else 20)
    assert device_total([replace(rank, total_bytes=50) for rank in ranks]) == (50 if is_one else 100)
    elsewhere = replace(ranks[1], host="node-b")
    assert ranks[0].card != elsewhere.card


def test_workers_on_a_cpu_never_share_a_device():
    assert used_total([replace(account(cpu()), rank=rank) for rank in (0, 1)]) == 4 * GIB
