"""A remedy's row says all that the policy and the accounting ask about it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from highwater.act import decision as core_module
from highwater.act import pressure
from highwater.act.decision import decide
from highwater.act.pressure import Facts
from highwater.act.rules import SIGNAL_REMEDIES, Rule
from highwater.act.state import LifeMemory
from highwater.model import remedies
from highwater.model.components import COMPONENT_NAMES, account
from highwater.model.growth import growth_since_ready
from highwater.model.policy import RankPressure
from highwater.model.rank import Components, Device, RankReading
from highwater.model.remedies import (
    GAIN_FIELDS,
    TRAITS,
    PossibleGain,
    RemedyTraits,
    compare,
    credit,
    device_total,
    freed,
    total,
    used_total,
)
from tests.fakes.engine import CACHED, IMAGE_BYTES, IMAGES, USED_AFTER, USED_READY, core_on
from tests.fakes.ranks import GIB, H100, reading, report
from tests.unit.model.story import cpu, story, worker


@pytest.mark.parametrize("row", TRAITS.values(), ids=list(TRAITS))
def test_a_row_agrees_with_itself(row: RemedyTraits):
    """Its components and signals are known; what measures itself or needs a release has a component for the bytes."""
    named = (row.components, *row.components_on.values())
    assert {component for components in named for component in components} <= set(COMPONENT_NAMES)
    assert set(row.lowers) <= set(SIGNAL_REMEDIES)
    assert all(named) or not row.has_own_figure
    assert not row.needs_release or len(row.components) == 1


def test_every_gain_that_a_rank_shows_is_of_one_remedy():
    shown = [field.name for field in fields(RankPressure) if field.name.startswith("can_")]
    assert list(GAIN_FIELDS.values()) == shown


@pytest.mark.parametrize(
    ("remedy", "given", "gain"),
    [
        ("trim_encoder_cache", {"encoder": 9, "trimmable": 4}, PossibleGain(4, is_certain=True)),
        ("trim_encoder_cache", {"encoder": 9, "trimmable": 0}, PossibleGain(0, is_certain=True)),
        ("trim_encoder_cache", {"encoder": 9, "trimmable": None}, PossibleGain(9, is_certain=False)),
        ("reset_encoder_cache", {"encoder": 9, "trimmable": 4}, PossibleGain(9, is_certain=True)),
        ("release", {"cached": 9, "releasable": 4}, PossibleGain(4, is_certain=True)),
        ("release", {"cached": 9, "releasable": 0}, PossibleGain(0, is_certain=True)),
        ("release", {"cached": 9, "releasable": None, "split": 2}, PossibleGain(7, is_certain=False)),
        ("release", {"cached": 9, "releasable": None, "split": 10}, PossibleGain(0, is_certain=False)),
        ("release", {"cached": 9, "device": "cpu"}, PossibleGain(None)),
        ("reset_mm_cache", {"encoder": 9, "cached": 9}, PossibleGain(None)),
    ],
)
def test_what_a_remedy_can_give_is_the_workers_figure_or_a_bound(
    remedy: str, given: dict[str, Any], gain: PossibleGain
):
    """Without the worker's figure it is an upper bound, and not certain: the policy does not act on a bound alone."""
    assert TRAITS[remedy].can_give(reading(**given)) == gain


def test_a_row_is_all_that_the_policy_needs_of_a_new_remedy(monkeypatch: pytest.MonkeyPatch):
    row = RemedyTraits(
        name="drop_graphs",
        frees="captured graphs",
        does_not_free="the rest",
        lowers=("device_free_bytes",),
        can_give=lambda reading: PossibleGain(reading.components.other_tensors_bytes),
        components=("other_tensors_bytes",),
    )
    for module in (core_module, pressure, remedies):
        monkeypatch.setattr(module, "TRAITS", {**TRAITS, row.name: row})
    rule = Rule(name="device", signal="device_free_bytes").model_copy(update={"remedies": (row.name,)})
    full = reading(rest=H100 - 2 * GIB - 100, other=2 * GIB)
    _, decision = decide([rule], report(full), Facts(), LifeMemory(), 1.0)
    assert (decision.action.remedy, decision.action.ranks[0, 0][0]) == (row.name, 2 * GIB)
    after = replace(full, components=replace(full.components, other_tensors_bytes=GIB))
    assert credit(row.name, [full], [after]).components == Components(other_tensors_bytes=GIB)


# --- what a remedy is credited with: its own component, by the worker's word where it has one ---


RULE = Rule(
    name="device", signal="device_used_ratio", high_water=0.93, low_water=0.85, remedies=("reset_encoder_cache",)
)


def rank(device: str = "cuda", number: int = 0, **parts: int) -> RankReading:
    return replace(reading(number, device=device), components=Components(**parts))


@pytest.mark.parametrize(
    ("device", "freed"),
    [
        ("cuda", {"torch_cached_bytes": 700}),
        ("npu", {"torch_cached_bytes": 700, "non_torch_bytes": 50}),
        ("cpu", {"non_torch_bytes": 50}),
    ],
)
def test_a_release_gives_back_what_its_device_keeps(device, freed):
    before = rank(device, torch_cached_bytes=1_000, non_torch_bytes=90)
    after = rank(device, torch_cached_bytes=300, non_torch_bytes=40)
    found = credit("release", [before], [after])
    assert found.components == Components(**freed)
    assert found.freed_bytes == sum(freed.values())


@pytest.mark.parametrize("said", [0, 400, 720, 1_200])
@pytest.mark.parametrize("device", ["cuda", "npu", "cpu"])
def test_a_release_is_credited_with_the_workers_own_word(device, said):
    before = rank(device, torch_cached_bytes=1_000, non_torch_bytes=50_000)
    after = rank(device, torch_cached_bytes=300, non_torch_bytes=0)
    found = credit("release", [before], [after], [{"rank": 0, "dp_rank": 0, "freed_bytes": said}])
    parts = found.components
    assert found.freed_bytes == (parts.torch_cached_bytes or 0) + (parts.non_torch_bytes or 0) == said
    assert min(parts.torch_cached_bytes or 0, parts.non_torch_bytes or 0) >= 0


@pytest.mark.parametrize("remedy", ["release", "trim_encoder_cache", "reset_encoder_cache"])
def test_what_traffic_took_is_no_negative_gain(remedy):
    few, many = {"torch_cached_bytes": 1, "encoder_cache_bytes": 1}, {"torch_cached_bytes": 9, "encoder_cache_bytes": 9}
    found = credit(remedy, [rank(**few), rank(number=1, **many)], [rank(**many), rank(number=1, **few)])
    assert [one.freed_bytes for one in found.ranks] == [0, 8]
    assert found.freed_bytes == 8


@pytest.mark.parametrize("remedy", ["reset_prefix_cache", "reset_mm_cache"])
def test_noise_is_not_counted_as_freed(remedy):
    before, after = rank(torch_cached_bytes=9, encoder_cache_bytes=9), rank(torch_cached_bytes=1, encoder_cache_bytes=1)
    found = credit(remedy, [before], [after])
    assert (found.freed_bytes, found.components) == (0, Components())


def test_what_went_to_the_allocator_is_not_given_back():
    """A drop-in reset without a release: the device has gained nothing yet."""
    before = rank(encoder_cache_bytes=1_000, torch_cached_bytes=0)
    after = rank(encoder_cache_bytes=0, torch_cached_bytes=900)
    assert credit("reset_encoder_cache", [before], [after], is_released=False).freed_bytes == 100
    assert credit("reset_encoder_cache", [before], [after]).freed_bytes == 1_000


def test_without_a_reading_after_it_nothing_is_known():
    assert credit("release", [rank(torch_cached_bytes=1)], []).freed_bytes is None


async def test_the_event_the_policy_and_the_metric_show_one_figure():
    """A reset beside a reserve, which the release after it gives back too: that is not the reset's."""
    core = core_on(rules=[RULE])
    await core.tick()
    core.fake.serve_images()
    await core.tick()
    (result,) = [event.result for event in core.history.events() if event.result is not None]
    (remedy,) = core.governor.status().rules[0].remedies
    counted = sum(getattr(result.credited_components, field.name) or 0 for field in fields(Components))
    assert remedy.last_freed_bytes == result.credited_bytes == counted
    assert result.freed_bytes == counted + 2 * CACHED


# --- the difference between two readings of the same ranks ---


def on_one_card(ranks):
    return tuple(replace(rank, device=replace(rank.device, uuid="GPU-a")) for rank in ranks)


def test_the_growth_of_the_story_is_the_encoder_cache():
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
