"""The accounting: exclusive components that sum to what is used, whatever the workers say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.accounting.attribution import (
    COMPONENT_NAMES,
    account,
    card,
    compare,
    device_total,
    encoder_totals,
    freed,
    growth,
    host_share,
    host_used,
    rank_key,
    seconds_until,
    total,
    used_total,
)
from highwater.readings.rank import (
    Components,
    Device,
    EncoderCache,
    HostMemory,
    Note,
    RankReading,
    TorchMemory,
    WorkerMemory,
)
from tests.fakes.engine import (
    CACHED,
    IMAGE_BYTES,
    IMAGES,
    KV_POOL,
    NON_TORCH,
    OTHER_TENSORS,
    USED_AFTER,
    USED_READY,
    WEIGHTS,
    FakeEngine,
)

GIB = 1024**3
sizes = st.none() | st.integers(-GIB, 80 * GIB)


def worker(**changes) -> WorkerMemory:
    return replace(WorkerMemory(rank=0, taken_at=100.0, device=Device(type="npu", index=0)), **changes)


def story(*, images: bool = False) -> tuple[RankReading, ...]:
    fake = FakeEngine()
    if images:
        fake.serve_images()
    return fake.readings()


def cpu(**changes) -> WorkerMemory:
    memory = worker(device=Device(type="cpu"), total_bytes=24 * GIB, free_bytes=19 * GIB, used_bytes=2 * GIB)
    return replace(memory, weights_bytes=GIB // 4, kv_cache_bytes=GIB // 2, **changes)


def parts(reading: RankReading) -> dict[str, int | None]:
    return {name: getattr(reading.components, name) for name in COMPONENT_NAMES}


@given(
    used=st.integers(0, 80 * GIB),
    weights=sizes,
    kv=sizes,
    encoder=sizes,
    allocated=sizes,
    reserved=sizes,
)
def test_known_components_sum_to_used_exactly(*, used, weights, kv, encoder, allocated, reserved):
    """Whatever is unknown, negative or too large: no byte is counted twice, and none is lost."""
    cache = None if encoder is None else EncoderCache(entries=1, device_bytes=encoder)
    torch = TorchMemory(allocated_bytes=allocated, reserved_bytes=reserved)
    reading = account(
        worker(used_bytes=used, weights_bytes=weights, kv_cache_bytes=kv, encoder_cache=cache, torch=torch)
    )
    known = [size for size in parts(reading).values() if size is not None]
    assert sum(known) == used
    assert all(size >= 0 for size in known)


def test_the_story_is_accounted_for_when_up():
    """54,650 MiB in use: weights, KV pool, live tensors, allocator's reserve and the rest, each as it is."""
    reading = story()[0]
    assert reading.used_bytes == USED_READY
    assert parts(reading) == {
        "weights_bytes": WEIGHTS,
        "kv_cache_bytes": KV_POOL,
        "encoder_cache_bytes": 0,
        "other_tensors_bytes": OTHER_TENSORS,
        "torch_cached_bytes": CACHED,
        "non_torch_bytes": NON_TORCH,
    }
    assert reading.notes == ()


def test_the_growth_of_the_story_is_the_encoder_cache():
    """58,432 MiB after the benchmark: 3,782 MiB more, all of it encoder outputs."""
    (change, _) = compare(story(), story(images=True))
    assert change.used_bytes == USED_AFTER - USED_READY == 3_965_714_432
    assert change.components == Components(**dict.fromkeys(COMPONENT_NAMES, 0) | {"encoder_cache_bytes": 3_965_714_432})


def test_a_part_that_does_not_fit_is_cut_and_noted():
    """A sleeping engine's pools are unmapped though PyTorch counts them."""
    reading = account(worker(used_bytes=100, weights_bytes=70, kv_cache_bytes=50))
    assert (reading.components.weights_bytes, reading.components.kv_cache_bytes) == (70, 30)
    assert reading.components.non_torch_bytes == 0
    assert Note(name="kv_cache_bytes", reason="50 bytes counted, of which only 30 fit into used") in reading.notes


@pytest.mark.parametrize("name", ["weights_bytes", "kv_cache_bytes"])
def test_an_unknown_part_is_null_and_said_so(name):
    """Absent knowledge is None, never 0; other tensors cannot be told from it."""
    known = {"weights_bytes": 20, "kv_cache_bytes": 30} | {name: None}
    torch = TorchMemory(allocated_bytes=60, reserved_bytes=80)
    reading = account(worker(used_bytes=100, torch=torch, **known))
    assert getattr(reading.components, name) is None
    assert reading.components.other_tensors_bytes is None
    assert reading.components.torch_cached_bytes == 20
    assert [note.name for note in reading.notes] == [name]


def test_without_used_bytes_nothing_is_summed():
    """The known parts stay, the rest is None, and a note says why."""
    reading = account(worker(weights_bytes=70, total_bytes=100))
    assert reading.components == Components(weights_bytes=70)
    assert reading.used_ratio is None
    assert [note.name for note in reading.notes] == ["used_bytes"]


def test_on_cpu_the_parts_sum_to_the_rss():
    """No allocator statistics there: other tensors and reserve are None, the heap stands under non_torch."""
    reading = account(cpu(encoder_cache=EncoderCache(entries=2, device_bytes=GIB // 8)))
    assert reading.components.other_tensors_bytes is None
    assert reading.components.torch_cached_bytes is None
    assert reading.components.non_torch_bytes == 2 * GIB - GIB // 4 - GIB // 2 - GIB // 8
    assert reading.used_ratio == 2 / 24


def test_what_the_workers_noted_stays():
    """Notes of both sides are shown."""
    noted = Note(name="torch", reason="torch.npu has no memory_stats")
    assert account(cpu(notes=(noted,))).notes[0] == noted


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
    assert rank_key(other_engine[1]) == (1, 1)
    assert total(()) == (None, Components())


def on_one_card(ranks):
    return tuple(replace(rank, device=replace(rank.device, uuid="GPU-a")) for rank in ranks)


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
    assert (card(ranks[0]) == card(ranks[1])) is is_one
    assert used_total(ranks) == (10 if is_one else 20)
    assert device_total([replace(rank, total_bytes=50) for rank in ranks]) == (50 if is_one else 100)
    elsewhere = replace(ranks[1], host="node-b")
    assert card(ranks[0]) != card(elsewhere)


def test_workers_on_a_cpu_never_share_a_device():
    """What each uses is its own process's memory."""
    assert used_total([replace(account(cpu()), rank=rank) for rank in (0, 1)]) == 4 * GIB


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
    assert growth(before, after, []).since_ready_bytes == grown_bytes
    assert [delta.used_bytes for delta in compare(before, after)] == [grown_bytes, grown_bytes]


def test_a_component_unknown_at_either_end_has_no_difference():
    """Nothing is made of what is not known."""
    before = account(worker(used_bytes=100, weights_bytes=10))
    after = account(worker(used_bytes=150, weights_bytes=None))
    (delta,) = compare([before], [after])
    assert (delta.used_bytes, delta.components.weights_bytes) == (50, None)


def test_growth_is_counted_from_the_baseline():
    """The sum counts from ready, over all ranks; the slope is taken from the recent points."""
    recent = [(10.0 + second, 1000.0 + 64 * second) for second in range(10)]
    grown = growth(story(), story(images=True), recent)
    assert grown.since_ready_bytes == 2 * 3_965_714_432
    assert grown.bytes_per_second == pytest.approx(64.0)
    assert grown.host_since_ready_bytes == 0


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 1.0), (2.0, 9.0)], [(1.0, 1.0)] * 3])
def test_too_few_points_have_no_slope(points):
    """Two points, or none apart in time, would only show noise."""
    assert growth((), (), points).bytes_per_second is None


def test_encoder_totals_count_entries_once_and_bytes_on_every_rank():
    """Every tensor-parallel rank holds a full copy; a text model has none at all."""
    totals = encoder_totals(story(images=True))
    assert totals is not None
    assert (totals.entries, totals.device_bytes) == (IMAGES, 2 * IMAGES * IMAGE_BYTES)
    assert encoder_totals([account(worker(used_bytes=1))]) is None


@pytest.mark.parametrize(
    ("host", "share"),
    [
        (HostMemory(cgroup_used_bytes=1, cgroup_limit_bytes=4, node_total_bytes=100, node_available_bytes=50), (1, 4)),
        (HostMemory(cgroup_used_bytes=1, node_total_bytes=100, node_available_bytes=40), (60, 100)),
        (HostMemory(rss_bytes=5), (None, None)),
    ],
)
def test_host_memory_is_the_limits_where_there_is_one(host, share):
    """Else the node's, else not known."""
    reading = account(worker(host_memory=host))
    assert host_share(reading) == share
    assert host_used([reading]) == share[0]


def test_each_device_is_full_at_its_own_pace():
    """The first one is the report's; one that does not fill, or was watched for moments only, foretells nothing."""
    ranks = story(images=True)
    pace = 16 * 1024 * 1024
    fast = [(10.0 * number, float(pace * 10 * number)) for number in range(7)]
    grown = growth((), ranks, [], {(0, 0): fast, (0, 1): [(at, 5.0) for at, _ in fast]})
    first, second = grown.ranks
    assert first.seconds_to_full == pytest.approx(ranks[0].free_bytes / pace)
    assert (second.bytes_per_second, second.seconds_to_full) == (0.0, None)
    assert grown.seconds_to_full == first.seconds_to_full
    moments = growth((), ranks, [], {(0, 0): [(at / 100, used) for at, used in fast]})
    assert (moments.ranks[0].bytes_per_second, moments.seconds_to_full) == (None, None)


@pytest.mark.parametrize("pace", [None, -1e9, 0.0, 1000.0, 70_000.0])
def test_what_is_noise_or_far_away_is_no_forecast(pace):
    """A day is as far as anybody looks."""
    assert seconds_until(10**12, pace) is None
    assert seconds_until(None, 1e9) is None
    assert seconds_until(10**12, 1e9) == 1_000.0
