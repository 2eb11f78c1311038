"""What `release` would give back is told before it is asked, and is what it then gives."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater_worker.devices import FAMILIES, AllocatorFigures, Space
from highwater_worker.errors import Notes
from highwater_worker.memory.allocator import LOOK_AGAIN_SECONDS, LOOK_SHARE, MAX_BLOCKS, AllocatorReserve
from tests.unit.worker_ext.fake_allocator import DEFAULT_POOL, MIB, Block, FakeAllocator, Segment
from tests.unit.worker_ext.fakes import FakeTorch, ask, fake_worker, in_a_thread

GRAPHS = (0, 7)
"""The pool of captured graphs."""
PAGE = 20 * MIB
SPACE = Space(4_096 * MIB, 1_024 * MIB, 3_072 * MIB)


def used(size):
    return Block(size * MIB, is_used=True)


def free(size):
    return Block(size * MIB, is_used=False)


def on_device(allocator, kind, monkeypatch):
    torch = FakeTorch(kind)
    for name in ("memory_stats", "memory_snapshot", "empty_cache"):
        setattr(torch.device_module, name, getattr(allocator, name))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch.device_module


def releasable(worker):
    return ask(worker, "memory")["releasable_bytes"]


def engine():
    """An engine with graphs: a third of what its allocator keeps unused can be given back, the rest cannot."""
    return FakeAllocator(
        [
            Segment([used(6000)]),
            Segment([used(100), free(300), used(50), free(250)]),
            Segment([free(1024)]),
            Segment([free(512)], GRAPHS),
            Segment([used(10), free(790)], GRAPHS),
            Segment([free(4096)], device=0),
        ]
    )


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_it_is_what_a_release_gives(kind, monkeypatch):
    """Reserved less allocated would say 2.8 times as much: fragments and graphs' pools stay."""
    allocator, worker = engine(), fake_worker(kind)
    on_device(allocator, kind, monkeypatch)
    answer = ask(worker, "memory")
    unused = answer["torch"]["reserved_bytes"] - answer["torch"]["allocated_bytes"]
    assert (unused // MIB, answer["releasable_bytes"] // MIB) == (2876, 1024)
    allocator.segments = allocator._own()
    assert allocator.empty_cache() == answer["releasable_bytes"]


sizes = st.integers(1, 60)
blocks = st.lists(st.tuples(sizes, st.booleans()), min_size=1, max_size=6)
segments = st.builds(
    lambda parts, pool, is_expandable, kind: (parts, pool, is_expandable, kind),
    blocks,
    st.sampled_from([DEFAULT_POOL, DEFAULT_POOL, GRAPHS]),
    st.booleans(),
    st.sampled_from(["small", "large"]),
)


def made(parts, pool, is_expandable, kind):
    """A segment without two free blocks beside each other; one that can expand ends with a page."""
    segment = Segment([Block(size * MIB, is_used=True) for size, _ in parts], pool, is_expandable, kind)
    if is_expandable and segment.size % PAGE:
        segment.blocks.append(Block(PAGE - segment.size % PAGE, is_used=False))
    kept = [block for block, (_, is_used) in zip(segment.blocks, parts, strict=False) if not is_used]
    for block in kept:
        index = next((at for at, one in enumerate(segment.blocks) if one is block), None)
        if index is not None:
            segment.free(index)
    return segment


def device(allocator):
    torch = SimpleNamespace(**{name: getattr(allocator, name) for name in ("memory_stats", "memory_snapshot")})

    class OnAllocator(FAMILIES[0]):
        def _module(self):
            return torch

    return OnAllocator(1)


def figures(allocator) -> AllocatorFigures:
    return device(allocator).allocator(Notes())


@given(layout=st.lists(segments, max_size=8))
def test_a_look_foretells_every_release(layout):
    allocator = FakeAllocator([made(*one) for one in layout])
    reserve = AllocatorReserve()
    reserve.look(device(allocator))
    told = reserve.releasable_bytes(figures(allocator), SPACE)
    assert told == allocator.empty_cache()
    assert allocator.empty_cache() == 0, "the model itself gives everything at once"


@given(layout=st.lists(segments.filter(lambda one: not one[2]), min_size=1, max_size=8), data=st.data())
def test_what_a_release_left_foretells_the_next(layout, data):
    """Without a look at any segment: graphs' pools stay as they are, and fragments are counted by torch."""
    allocator, reserve = FakeAllocator([made(*one) for one in layout]), AllocatorReserve()
    assert reserve.releasable_bytes(figures(allocator), SPACE) is None
    allocator.empty_cache()
    reserve.learn_after_release(device(allocator), figures(allocator))
    assert reserve.releasable_bytes(figures(allocator), SPACE) == 0
    for size in data.draw(st.lists(sizes, max_size=4)):
        allocator.segments.append(Segment([used(size), used(size), free(size)]))
    places = [(one, at) for one in allocator.segments for at, block in enumerate(one.blocks) if block.is_used]
    in_default = [place for place in places if place[0].pool == DEFAULT_POOL]
    if in_default:
        segment, at = data.draw(st.sampled_from(in_default))
        segment.free(at)
    assert reserve.releasable_bytes(figures(allocator), SPACE) == allocator.empty_cache()


def test_a_release_corrects_what_a_look_told(monkeypatch):
    allocator, worker = engine(), fake_worker("cuda")
    module = on_device(allocator, "cuda", monkeypatch)
    assert releasable(worker) == 1024 * MIB
    allocator.segments.append(Segment([free(256)], GRAPHS))
    assert releasable(worker) == (1024 + 256) * MIB
    module.empty_cache = allocator.empty_cache
    ask(worker, "release")
    assert releasable(worker) == 0
    allocator.segments.append(Segment([free(64)]))
    assert releasable(worker) == 64 * MIB


def test_segments_that_cannot_expand_are_walked_once(torch_device):
    """The engine stands still meanwhile, and what is kept hardly changes."""
    module, worker = torch_device("npu"), fake_worker()
    for _ in range(3):
        ask(worker, "memory")
    assert module.looks == 1
    ask(worker, "release")
    assert module.looks == 1


@given(before=st.lists(segments, max_size=8), after=st.lists(segments, max_size=8))
def test_expandable_segments_are_looked_at_again(before, after):
    now = [0.0]
    reserve = AllocatorReserve(clock=lambda: now[0])
    mapped = Segment([used(PAGE // MIB)], is_expandable=True)
    reserve.look(device(FakeAllocator([mapped, *(made(*one) for one in before)])))
    allocator = FakeAllocator([mapped, *(made(*one) for one in after)])
    now[0] = LOOK_AGAIN_SECONDS
    reserve.look(device(allocator))
    assert reserve.releasable_bytes(figures(allocator), SPACE) == allocator.empty_cache()


@pytest.mark.parametrize(("look_seconds", "pause"), [(0.001, LOOK_AGAIN_SECONDS), (0.05, 0.05 * LOOK_SHARE)])
def test_a_look_costs_at_most_a_thousandth_of_the_engines_time(look_seconds, pause):
    now, looks = [0.0], []
    allocator = FakeAllocator([Segment([used(20)], is_expandable=True)])
    walk = allocator.memory_snapshot

    def slow(pool=None, include_traces=True):
        looks.append(now[0])
        now[0] += look_seconds
        return walk(pool, include_traces)

    allocator.memory_snapshot = slow
    reserve = AllocatorReserve(clock=lambda: now[0])
    for at in (0.0, 1.0, pause - 0.001, pause + 0.001):
        now[0] = at
        reserve.look(device(allocator))
    assert looks == [0.0, pause + 0.001]


def test_looks_end_where_a_release_proves_them_wrong():
    """With pages of 128 MiB, say: what the release showed stays until the next one, as where nothing is expandable."""
    now = [0.0]
    reserve = AllocatorReserve(clock=lambda: now[0])
    allocator = FakeAllocator([Segment([used(20), free(200), used(20)], is_expandable=True)])
    reserve.look(device(allocator))
    assert reserve.releasable_bytes(figures(allocator), SPACE) == 200 * MIB
    left = FakeAllocator([Segment([used(20), free(80), used(20)], is_expandable=True)])  # all that such a release gave
    reserve.learn_after_release(device(left), figures(left))
    now[0] = LOOK_AGAIN_SECONDS
    reserve.look(device(left))
    assert reserve.releasable_bytes(figures(left), SPACE) == 0


def test_a_release_off_the_main_thread_walks_nothing():
    reserve = AllocatorReserve()
    allocator = FakeAllocator([Segment([used(20), free(200), used(20)], is_expandable=True)])
    reserve.look(device(allocator))
    left = FakeAllocator([Segment([used(20), free(80), used(20)], is_expandable=True)])
    seen = []

    def walked(include_traces=True):
        return seen.append(include_traces) or []

    left.memory_snapshot = walked
    in_a_thread(lambda: reserve.learn_after_release(device(left), figures(left)))
    assert (reserve.kept_bytes, seen) == (80 * MIB, [])


def test_a_first_look_does_not_overrule_a_release():
    """Only a release shows how much PyTorch really keeps."""
    reserve, allocator = AllocatorReserve(), FakeAllocator([Segment([free(64)])])
    reserve.learn_after_release(device(allocator), figures(allocator))
    reserve.look(device(allocator))
    assert reserve.kept_bytes == 64 * MIB


def test_a_look_that_fails_leaves_what_is_known():
    now = [0.0]
    allocator = FakeAllocator([Segment([used(7), free(33)], is_expandable=True)])
    reserve = AllocatorReserve(clock=lambda: now[0])
    reserve.look(device(allocator))
    known = reserve.kept_bytes
    allocator.segments += [Segment([used(20)] * MAX_BLOCKS, is_expandable=True)]
    now[0] = LOOK_AGAIN_SECONDS
    reserve.look(device(allocator))
    assert (reserve.kept_bytes, "too many" in reserve.unknown_because) == (known, True)
    allocator.segments.pop()
    now[0] = 2 * LOOK_AGAIN_SECONDS
    reserve.look(device(allocator))
    assert (reserve.kept_bytes, reserve.unknown_because) == (known, None)


def noted(worker):
    answer = ask(worker, "memory")
    assert answer["releasable_bytes"] is None
    return [note["reason"] for note in answer["notes"] if note["name"] == "releasable_bytes"]


def test_an_allocator_with_many_blocks_is_not_walked(torch_device):
    """It would hold the engine for longer than a call may; the first release tells the figure instead."""
    module, worker = torch_device("npu"), fake_worker()
    module.stats["active.all.current"] = MAX_BLOCKS
    assert noted(worker) == noted(worker)
    assert "too many to walk" in noted(worker)[0]
    assert module.looks == 0
    ask(worker, "release")
    assert ask(worker, "memory")["releasable_bytes"] == 0


def test_the_history_of_allocations_is_never_asked_for(torch_device, monkeypatch):
    """Where it is recorded, and this torch cannot leave it out, the look is left out."""
    module, worker = torch_device("npu"), fake_worker()
    monkeypatch.setattr(sys.modules["torch"]._C, "_npu_isHistoryEnabled", lambda: True)
    assert "torch records the history" in noted(worker)[0]
    assert module.looks == 0


def test_a_torch_that_does_not_tell_the_pool_tells_no_figure(torch_device):
    """A guess would promise graphs' memory."""
    module = torch_device("npu")
    module.segments = [{"total_size": 5, "blocks": [{"size": 5, "state": "inactive"}]}]
    assert "does not show the pool" in noted(fake_worker())[0]


def test_off_the_main_thread_nothing_is_walked(torch_device):
    """A step may be running beside the call; the main thread may still look later."""
    module, worker = torch_device("npu"), fake_worker()
    assert in_a_thread(lambda: ask(worker, "memory"))["releasable_bytes"] is None
    assert module.looks == 0
    assert releasable(worker) == 260


def test_on_cpu_nothing_is_known():
    """torch keeps no figures of host memory."""
    assert noted(fake_worker("cpu", None)) == []
