"""The accounting: exclusive components that sum to what is used, whatever the workers say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.accounting.components import COMPONENT_NAMES, account
from highwater.readings.rank import Components, EncoderCache, Note, RankReading, TorchMemory
from tests.fakes.engine import CACHED, KV_POOL, NON_TORCH, OTHER_TENSORS, USED_READY, WEIGHTS
from tests.unit.accounting.story import cpu, story, worker

GIB = 1024**3
sizes = st.none() | st.integers(-GIB, 80 * GIB)


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
