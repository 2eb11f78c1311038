"""An entry that the engine asks for comes back, whatever has become of the room on its device."""

from __future__ import annotations

import json
import weakref
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from highwater_worker.devices import HostMemory
from highwater_worker.encoder_cache.spilling_dict import Spilled
from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import HOST, ask, fake_runner, fake_worker, imported_as, wanted
from tests.unit.worker_ext.full_device import DeviceFullError, DeviceStorage, FullDevice


class Bench:
    """A worker on a device of so many bytes."""

    def __init__(self, capacity: int = 1000, host: HostMemory = HOST) -> None:
        self.torch = FullDevice(capacity)
        self.is_owed = False
        self.worker = fake_worker(model_runner=fake_runner(encoder_cache={}))
        self._patches = ExitStack()
        self._patches.enter_context(imported_as("torch", self.torch))
        self._patches.enter_context(mock.patch("highwater_worker.encoder_cache.mover.read_host", return_value=host))

    def close(self) -> None:
        self._patches.close()

    @property
    def cache(self):
        return self.worker.model_runner.encoder_cache

    @property
    def block(self):
        return ask(self.worker, "memory")["encoder_cache"]

    def encode(self, *names, elements=50):
        """Put entries of one batch into the cache, as views of one storage."""
        storage = DeviceStorage(2 * elements * len(names), self.torch)
        self.cache.update({name: self.torch.tensor(elements, content=name, storage=storage) for name in names})

    def need(self, *names):
        """Have a running request that needs these."""
        request = SimpleNamespace(mm_features=wanted(*names), num_computed_tokens=0)
        self.worker.model_runner.requests = {"r": request}

    def access(self, name):
        """As a step does: look, use, let go."""
        return self.cache.get(name).content

    def fill(self):
        """Somebody else takes whatever the device has left, the allocator's unused blocks included."""
        self.torch._empty_cache()
        self.torch.foreign += self.torch.free

    def away(self):
        return [key for key, value in dict.items(self.cache) if type(value) is Spilled]


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.close()


def test_idle_entries_make_room(bench):
    for name in "abcd":
        bench.encode(name)
    ask(bench.worker, "trim", '{"keep_bytes": 300}')
    bench.access("b")
    bench.fill()
    assert bench.away() == ["a"]
    assert bench.access("a") == "a"
    assert bench.away() == ["c"]
    assert bench.block["restore_reserve_bytes"] == 100


def test_the_reserve_is_the_last_room(bench):
    """Nothing idle is left: the block that was kept is where the entry goes."""
    for name in "abc":
        bench.encode(name)
    ask(bench.worker, "trim")
    bench.fill()
    assert (bench.torch.free, bench.block["restore_reserve_bytes"]) == (0, 100)
    for name in "abcab":
        assert bench.access(name) == name


def test_what_a_request_needs_makes_no_room(bench):
    """It would be asked for next. What a step needs at once must find room, at most that of one group is kept."""
    for name in "abc":
        bench.encode(name)
    ask(bench.worker, "trim")
    bench.fill()
    bench.need("a", "b")
    assert bench.access("a") == "a"
    with pytest.raises(DeviceFullError):
        bench.access("b")
    bench.need("b")
    assert bench.access("b") == "b"


def test_all_of_one_group_comes_back(bench):
    """What was encoded together is used together: the reserve holds all of it."""
    bench.encode("a", "b", "c")
    bench.encode("d")
    ask(bench.worker, "trim")
    bench.fill()
    assert bench.block["restore_reserve_bytes"] == 300
    bench.need("a", "b", "c")
    held = [bench.cache.get(name) for name in "abc"]
    assert [tensor.content for tensor in held] == ["a", "b", "c"]


def test_siblings_do_not_make_room_for_each_other():
    bench = Bench()
    try:
        bench.worker.model_runner.requests = None
        bench.encode("a", "b")
        bench.encode("c")
        ask(bench.worker, "trim")
        bench.fill()
        bench.access("a")
        bench.access("b")
        assert bench.away() == ["c"]
    finally:
        bench.close()


def test_the_hosts_budget_holds_for_what_makes_room():
    """A full host is the end of the engine too: then the reserve is all there is."""
    bench = Bench()
    try:
        for name in "abcd":
            bench.encode(name)
        ask(bench.worker, "trim", '{"keep_bytes": 200, "host_budget_bytes": 256}')
        bench.fill()
        assert bench.access("a") == "a"
        assert bench.away() == ["b"]
        assert bench.block["restore_reserve_bytes"] == 0
    finally:
        bench.close()


def test_a_copy_that_is_not_waited_for_keeps_its_source(bench):
    """The device reads it while Python goes on; the step waits for nothing but its own stream."""
    done = []
    bench.torch.device_module.Event = lambda: SimpleNamespace(record=lambda: None, query=lambda: bool(done))
    for name in "abc":
        bench.encode(name)
    ask(bench.worker, "trim")
    source = weakref.ref(dict.__getitem__(bench.cache, "a").host)
    bench.torch.device_module.calls.clear()
    assert bench.access("a") == "a"
    assert bench.torch.device_module.calls == [("copy", ("cpu", "npu"))]
    bench.access("b")
    assert source() is not None
    done.append(True)
    bench.access("c")
    assert source() is None


def test_release_gives_the_reserve_to_nobody(bench):
    for name in "abc":
        bench.encode(name)
    ask(bench.worker, "trim")
    ask(bench.worker, "release")
    assert (bench.torch.live, bench.torch.cached) == (100, 0)
    assert bench.block["restore_reserve_bytes"] == 100


def test_a_way_back_that_empties_the_cache_learns_what_stays(bench):
    kept = 64

    def stats(_index: object) -> dict[str, object]:
        reserved = bench.torch.live + bench.torch.cached + kept
        bytes_of = {"reserved_bytes.all.current": reserved, "allocated_bytes.all.current": bench.torch.live}
        return bench.torch.device_module.stats | bytes_of | {"inactive_split_bytes.all.current": 0}

    def releasable() -> int:
        return ask(bench.worker, "memory")["releasable_bytes"]

    bench.torch.device_module.memory_stats = stats
    for name in "abc":
        bench.encode(name)
    ask(bench.worker, "trim")
    assert bench.torch.live == bench.block["restore_reserve_bytes"] == 100
    assert releasable() == bench.torch.cached + kept, "nobody has emptied the cache yet"
    bench.fill()
    bench.access("a")
    assert (bench.torch.cached, releasable()) == (0, 0)
    bench.torch.cached += 30
    assert releasable() == 30


def test_nothing_is_moved_where_the_device_would_gain_nothing(bench):
    bench.encode("a", "b")
    answer = ask(bench.worker, "trim")
    assert (answer["spilled_entries"], answer["encoder_cache"]["restore_reserve_bytes"]) == (0, 0)
    assert answer["notes"][0]["name"] == "spilled_entries"
    assert "would gain nothing" in answer["notes"][0]["reason"]


def test_bytes_that_are_kept_are_not_bytes_let_go(bench):
    for name in "abcde":
        bench.encode(name)
    before = bench.torch.live
    ask(bench.worker, "trim", '{"free_bytes": 200}')
    assert before - bench.torch.live == 200
    ask(bench.worker, "trim", '{"free_bytes": 100}')
    assert before - bench.torch.live == 300


def test_a_reserve_that_finds_no_room_is_noted(bench, monkeypatch):
    bench.encode("a")
    bench.encode("b")

    monkeypatch.setattr(bench.torch, "empty", raising(DeviceFullError))
    answer = ask(bench.worker, "trim")
    assert (answer["spilled_entries"], answer["encoder_cache"]["restore_reserve_bytes"]) == (2, 0)
    assert [note["name"] for note in answer["notes"]] == ["encoder_cache.restore_reserve_bytes"]


def test_restore_uses_the_reserve_at_its_end_and_drops_it(bench):
    for name in "abcdefghij":
        bench.encode(name)
    ask(bench.worker, "trim")
    answer = ask(bench.worker, "restore")
    assert (answer["restored_entries"], answer["left_entries"], bench.torch.live) == (10, 0, 1000)
    assert answer["encoder_cache"]["restore_reserve_bytes"] == 0


def test_restore_takes_room_from_nobody(bench):
    for name in "abcdef":
        bench.encode(name)
    ask(bench.worker, "trim", '{"keep_bytes": 200}')
    ask(bench.worker, "release")
    bench.torch.foreign = bench.torch.free - 150
    copies = bench.torch.copies_to_the_host
    answer = ask(bench.worker, "restore")
    assert (answer["restored_entries"], answer["left_entries"], answer["complete"]) == (1, 3, True)
    assert (bench.torch.copies_to_the_host, answer["encoder_cache"]["restore_reserve_bytes"]) == (copies, 100)


def test_a_cache_that_goes_takes_its_reserve_along(bench):
    """The engine may make its cache anew."""
    for name in "abc":
        bench.encode(name)
    ask(bench.worker, "trim")
    bench.worker.model_runner.encoder_cache = {}
    assert bench.torch.live == 0


NAMES = [f"{letter}{number}" for letter in "abcde" for number in range(3)]
BATCH = st.tuples(st.integers(1, 3), st.integers(1, 150))
STEPS = st.one_of(
    st.tuples(st.just("use"), st.sampled_from(NAMES)),
    st.tuples(st.sampled_from(["use", "use", "free"]), st.sampled_from(NAMES)),
    st.tuples(st.just("encode"), st.sampled_from("abcde"), BATCH),
    st.tuples(st.sampled_from(["free_bytes", "keep_bytes"]), st.integers(0, 1500)),
    st.tuples(st.sampled_from(["trim", "restore", "somebody takes", "somebody leaves"])),
)


def missing_bytes(bench: Bench) -> int:
    """What the way back of the largest group has neither in the reserve nor in entries that can make room."""
    away = [value for value in dict.values(bench.cache) if type(value) is Spilled]
    largest = max((value.group.nbytes for value in away), default=0)
    here = {id(value._storage): value._storage for value in dict.values(bench.cache) if type(value) is not Spilled}
    return max(0, largest - bench.cache.restorer.reserve_bytes - sum(storage.nbytes() for storage in here.values()))


def take_the_rest(bench: Bench) -> None:
    """Have somebody else take all that is left of the device, but for what the engine dropped of the reserve's."""
    bench.torch._empty_cache()
    rest = bench.torch.free + bench.torch.foreign
    # An entry that came back into the reserve takes it along when the engine drops it, until the next trim.
    bench.is_owed = bench.is_owed and missing_bytes(bench) > 0
    bench.torch.foreign = rest - (min(missing_bytes(bench), rest) if bench.is_owed else 0)


def changed(bench: Bench) -> list[str]:
    """Entries that are not what was encoded."""
    raw = dict.items(bench.cache)
    return [key for key, value in raw if (value.host if type(value) is Spilled else value).content != key]


def carry_out(bench: Bench, name: str, *arguments: Any) -> None:
    """One step of an engine, of ours, or of somebody else on the device."""
    if name == "use" and arguments[0] in bench.cache:
        bench.need(arguments[0])
        assert bench.access(arguments[0]) == arguments[0]
    elif name == "free":
        bench.cache.pop(arguments[0], None)
        bench.is_owed = True
    elif name == "encode":
        bench.is_owed = True
        letter, (count, elements) = arguments
        with suppress(DeviceFullError):  # an allocation of the engine's own
            bench.encode(*(f"{letter}{number}" for number in range(count)), elements=elements)
    elif name in {"free_bytes", "keep_bytes"}:
        ask(bench.worker, "trim", json.dumps({name: arguments[0]}))
    elif name in {"trim", "restore"}:
        bench.need()
        ask(bench.worker, name)
    elif name == "somebody leaves":
        bench.torch.foreign = 0
    if name == "somebody takes" or bench.torch.foreign:
        take_the_rest(bench)


@pytest.mark.parametrize("again", ["a0", "a1", "b0", "b1"])
def test_a_trim_on_a_full_device_keeps_what_it_freed_for_the_way_back(bench, again):
    bench.encode("a0", "a1", elements=3)
    bench.encode("b0", "b1", elements=4)
    ask(bench.worker, "trim")
    take_the_rest(bench)
    for step in (("use", "a0"), ("use", "a1"), ("free_bytes", 1), ("free_bytes", 1), ("use", again)):
        carry_out(bench, *step)
    assert changed(bench) == []


@settings(
    max_examples=3 * settings.default.max_examples // 2, suppress_health_check=[HealthCheck.too_slow], deadline=None
)
@given(batches=st.lists(BATCH, min_size=2, max_size=5), steps=st.lists(STEPS, min_size=8, max_size=24))
def test_no_access_fails_whatever_was_before_it(batches, steps):
    bench = Bench(capacity=5000)
    try:
        for letter, (count, elements) in zip("abcde", batches, strict=False):
            bench.encode(*(f"{letter}{number}" for number in range(count)), elements=elements)
        ask(bench.worker, "trim")
        take_the_rest(bench)
        for name, *arguments in steps:
            carry_out(bench, name, *arguments)
            assert changed(bench) == []
    finally:
        bench.close()
