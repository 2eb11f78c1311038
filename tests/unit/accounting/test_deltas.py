"""The difference between two readings of the same ranks."""

from __future__ import annotations

from dataclasses import replace

from highwater.accounting.components import COMPONENT_NAMES, account
from highwater.accounting.growth import growth_since_ready
from highwater.accounting.totals import compare, freed, total
from highwater.readings.rank import Components
from tests.fakes.engine import IMAGE_BYTES, IMAGES, USED_AFTER, USED_READY
from tests.unit.accounting.story import story, worker

GIB = 1024**3


def on_one_card(ranks):
    return tuple(replace(rank, device=replace(rank.device, uuid="GPU-a")) for rank in ranks)


def test_the_growth_of_the_story_is_the_encoder_cache():
    """58,432 MiB after the benchmark: 3,782 MiB more, all of it encoder outputs."""
    (change, _) = compare(story(), story(images=True))
    assert change.used_bytes == USED_AFTER - USED_READY == 3_965_714_432
    assert change.components == Components(**dict.fromkeys(COMPONENT_NAMES, 0) | {"encoder_cache_bytes": 3_965_714_432})


def test_freed_is_before_less_after():
    """A reset's effect is positive when it gave back, negative when traffic took more."""
    before, after = story(images=True), story()
    assert total(freed(before, after))[0] == 2 * IMAGES * IMAGE_BYTES
    assert total(freed(after, before))[0] == -2 * IMAGES * IMAGE_BYTES


def test_only_ranks_seen_at_both_ends_are_compared():
    """A rank that came or went has no difference; data-parallel engines' ranks do not mix."""
    ranks = story()
    assert [delta.rank for delta in compare(ranks[:1], ranks)] == [0]
    other_engine = tuple(replace(rank, dp_rank=1) for rank in ranks)
    assert compare(ranks, other_engine) == ()
    assert other_engine[1].key == (1, 1)
    assert total(()) == (None, Components())


def test_a_shared_cards_growth_and_gain_count_once():
    """Each of two ranks shows the whole card; together they still hold no more than the card."""
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
    """Nothing is made of what is not known."""
    before = account(worker(used_bytes=100, weights_bytes=10))
    after = account(worker(used_bytes=150, weights_bytes=None))
    (delta,) = compare([before], [after])
    assert (delta.used_bytes, delta.components.weights_bytes) == (50, None)
