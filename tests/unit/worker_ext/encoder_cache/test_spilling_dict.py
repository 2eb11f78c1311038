"""The dict that spills is a dict: whatever is done to it, it holds and answers what a plain one would."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from highwater_worker.encoder_cache.spilling_dict import Ledger, Spilled, SpilledGroup, SpillingDict

KEYS = st.sampled_from("abcdef")


class NoRoomError(RuntimeError):
    """What a device without room raises."""


class Bench:
    """A spilling dict whose device holds texts and whose host holds them in lists."""

    def __init__(self, contents: dict[Any, Any] | None = None) -> None:
        self.ledger = Ledger()
        self.brought: list[Any] = []
        self.has_room = True
        self.now = 100.0
        self.cache = SpillingDict(contents or {}, self, self.ledger, clock=lambda: self.now)
        self.reserve_bytes = 0

    def bring(self, cache: SpillingDict, spilled: Spilled, *, is_urgent: bool) -> Any:
        del cache, is_urgent
        if not self.has_room:
            raise NoRoomError
        self.brought.append(spilled.host[0])
        return spilled.host[0]

    def settle(self, cache: SpillingDict, notes: object) -> None:
        """For the engine's sleep alone."""

    def drop_reserve(self) -> None:
        self.reserve_bytes = 0

    def spill(self, *keys: Any) -> Bench:
        away = {key: value for key, value in dict.items(self.cache) if key in keys and type(value) is not Spilled}
        group = SpilledGroup(1)
        self.cache.put_away({key: Spilled([value], "device", 1, ("device", 7), group) for key, value in away.items()})
        self.reserve_bytes = 1 if self.away() else 0
        return self

    def away(self) -> int:
        return sum(type(value) is Spilled for value in dict.values(self.cache))


@pytest.fixture
def bench():
    """Three entries, all of them in host memory."""
    return Bench({"a": "A", "b": "B", "c": "C"}).spill("a", "b", "c")


PLAIN = {"a": "A", "b": "B", "c": "C"}
# Each way to read a value, with what a plain dict answers.
READS = {
    "[]": lambda d: d["b"],
    "get": lambda d: d.get("b"),
    "get with a default": lambda d: d.get("b", 1),
    "get of what is not there": lambda d: d.get("z", 1),
    "pop": lambda d: d.pop("b"),
    "pop with a default": lambda d: d.pop("b", None),
    "pop of what is not there": lambda d: d.pop("z", None),
    "popitem": lambda d: d.popitem(),
    "setdefault": lambda d: d.setdefault("b", 1),
    "setdefault of what is not there": lambda d: d.setdefault("z", 1),
    "items": lambda d: list(d.items()),
    "values": lambda d: list(d.values()),
    "keys": lambda d: list(d.keys()),
    "keys as a set": lambda d: d.keys() - {"a"},
    "items contain": lambda d: ("b", "B") in d.items(),
    "values contain": lambda d: "B" in d.values(),
    "lengths": lambda d: (len(d), len(d.items()), len(d.values()), bool(d)),
    "in": lambda d: ("b" in d, "z" in d),
    "iter": list,
    "copy": lambda d: d.copy(),
    "dict()": dict,
    "dict() with names": lambda d: dict(d, z=1),
    "**": lambda d: {**d},
    "call with **": lambda d: _named(**d),
    "update another": lambda d: _updated({"z": 1}, d),
    "|": lambda d: d | {"b": 1, "z": 2},
    "| from the right": lambda d: {"b": 1, "z": 2} | d,
    "|= of another": lambda d: _ior({"b": 1}, d),
    "==": lambda d: (d == PLAIN, d == {"a": 1}, d == dict(PLAIN), d == 3),
    "!=": lambda d: (d != PLAIN, d != {"a": 1}, d != dict(PLAIN), d != 3),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda d: pickle.loads(pickle.dumps(d)),  # noqa: S301 - our own
}


def _named(**named):
    return named


def _updated(target, source):
    target.update(source)
    return target


def _ior(target, source):
    target |= source
    return target


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_way_to_a_value_brings_it_back(read, bench):
    plain = dict(PLAIN)
    expected = read(plain)
    assert read(bench.cache) == expected
    assert dict(bench.cache) == plain
    assert list(bench.cache) == list(plain)


@pytest.mark.parametrize(
    "ask",
    [len, list, bool, repr, lambda d: "a" in d, lambda d: d.keys() | {"x"}, lambda d: d.get("z"), set],
)
def test_what_asks_for_no_value_moves_nothing(ask, bench):
    """vLLM asks `in` and for the keys; a log line prints."""
    ask(bench.cache)
    assert bench.brought == []


def test_one_access_brings_back_one_entry_once(bench):
    assert [bench.cache["b"], bench.cache.get("b")] == ["B", "B"]
    assert bench.brought == ["B"]
    assert (bench.ledger.spills, bench.ledger.restores) == (3, 1)
    assert repr(bench.cache) == "<SpillingDict of 3 entries, 2 of them in host memory>"


def test_overwriting_or_dropping_an_entry_brings_nothing_back(bench):
    bench.cache["a"] = "new"
    bench.cache.update({"b": "new"})
    del bench.cache["c"]
    assert (bench.brought, dict(bench.cache)) == ([], {"a": "new", "b": "new"})
    bench.spill("a").cache.clear()
    assert (bench.brought, len(bench.cache)) == ([], 0)


def test_an_entry_that_is_freed_is_not_brought_back_first(bench):
    """vLLM frees with pop and ignores the answer: that must neither wait for the device nor allocate on it."""
    with bench.cache.freeing():
        bench.cache.pop("a", None)
        with bench.cache.freeing():
            bench.cache.pop("b")
        bench.cache.pop("c", None)
    assert (bench.brought, len(bench.cache), bench.ledger.restores) == ([], 0, 0)


def test_other_code_that_pops_gets_the_value_from_its_device(bench):
    with pytest.raises(KeyError), bench.cache.freeing():
        bench.cache.pop("z")
    assert [bench.cache.pop("a"), bench.cache.pop("b", None)] == bench.brought == ["A", "B"]


def _freed(cache):
    with cache.freeing():
        for key in "abc":
            cache.pop(key)


@pytest.mark.parametrize(
    "leave",
    [
        lambda cache: [cache.pop(key) for key in "abc"],
        _freed,
        lambda cache: [cache.popitem() for _ in "abc"],
        lambda cache: [cache.__delitem__(key) for key in "abc"],
        lambda cache: cache.clear(),
        lambda cache: cache.update(dict.fromkeys("abc", 1)),
        lambda cache: list(cache.values()),
    ],
    ids=["popped", "freed", "taken", "deleted", "cleared", "overwritten", "used"],
)
def test_nothing_is_kept_for_the_way_back_once_nothing_is_away(leave, bench):
    bench.cache["a"]
    assert bench.reserve_bytes == 1
    leave(bench.spill("a").cache)
    assert (bench.away(), bench.reserve_bytes) == (0, 0)


def test_a_freed_entry_goes_also_when_the_device_is_full(bench):
    bench.has_room = False
    assert bench.cache.pop("a") == ["A"]
    assert bench.cache.popitem() == ("c", ["C"])
    assert (list(bench.cache), bench.ledger.restores) == (["b"], 0)


def test_an_entry_for_which_there_is_no_room_stays_spilled(bench):
    """The access fails as an allocation does; the next one may not."""
    bench.has_room = False
    with pytest.raises(NoRoomError):
        bench.cache["b"]
    assert ("b" in bench.cache, bench.ledger.restores) == (True, 0)
    bench.has_room = True
    assert bench.cache["b"] == "B"


def test_missing_keys_are_missing(bench):
    for ask in (lambda d: d["z"], lambda d: d.pop("z"), lambda d: d.__delitem__("z")):
        with pytest.raises(KeyError):
            ask(bench.cache)
    with pytest.raises(KeyError):
        Bench().cache.popitem()
    with pytest.raises(TypeError):
        bench.cache.update({}, {})
    with pytest.raises(TypeError):
        hash(bench.cache)


def test_update_takes_what_a_dicts_takes_one_by_one():
    """vLLM hands in a zip, and a generator that encodes while it is read."""
    bench = Bench()
    seen = []

    def encode():
        for key in "ab":
            seen.append(len(bench.cache))
            yield key, key.upper()

    bench.cache.update(encode())
    bench.cache.update(zip("c", "C", strict=True), d="D")
    bench.cache |= {"e": "E"}
    assert dict(bench.cache) == {"a": "A", "b": "B", "c": "C", "d": "D", "e": "E"}
    assert seen == [0, 1]


def test_an_operand_that_is_no_dict_is_refused(bench):
    with pytest.raises(TypeError):
        bench.cache | [("a", 1)]
    with pytest.raises(TypeError):
        [("a", 1)] | bench.cache


def test_copies_are_plain(bench):
    copies = (bench.cache.copy(), copy.copy(bench.cache), copy.deepcopy(bench.cache), bench.cache | {})
    assert {type(made) for made in copies} == {dict}


def test_the_last_use_is_counted_not_timed():
    bench = Bench(dict(PLAIN))
    assert [bench.cache.last_use(key) for key in "abc"] == [0, 0, 0]
    bench.cache.get("b")
    bench.cache["d"] = "D"
    bench.cache["a"]
    assert [bench.cache.last_use(key) for key in "abcd"] == [3, 1, 0, 2]
    bench.cache.pop("a")
    bench.cache["a"] = "A"
    assert bench.cache.last_use("a") == 4


def test_moving_an_entry_is_no_use_of_it():
    bench = Bench(dict(PLAIN)).spill("a", "b", "c")
    for key, value in list(dict.items(bench.cache)):
        bench.cache.bring_back(key, value)
    assert [bench.cache.last_use(key) for key in "abc"] == [0, 0, 0]


def test_idle_time_counts_from_the_last_use_or_from_when_it_was_first_watched():
    bench = Bench(dict(PLAIN))
    bench.now += 5
    bench.cache["a"]
    bench.now += 2
    assert [bench.cache.idle_seconds(key) for key in "ab"] == [2.0, 7.0]


def test_an_entry_that_came_back_is_not_one_made_anew():
    bench = Bench(dict(PLAIN)).spill("a", "b", "c")
    assert (bench.cache["a"], bench.cache.origin("a")) == ("A", ("device", 7))
    again = Spilled(["A"], "device", 1, ("device", 8), SpilledGroup(1))
    bench.cache.put_away({"a": again})
    assert (bench.cache["a"], bench.cache.origin("a")) == ("A", ("device", 7)), "the first, however often it comes back"
    bench.cache["a"] = "new"
    assert bench.cache.origin("a") is None


STEPS: dict[str, Callable[[dict[Any, Any], str, int], Any]] = {
    "set": lambda d, key, value: d.__setitem__(key, value),
    "[]": lambda d, key, _: d[key],
    "get": lambda d, key, value: d.get(key, value),
    "pop": lambda d, key, value: d.pop(key, value),
    "pop!": lambda d, key, _: d.pop(key),
    "del": lambda d, key, _: d.__delitem__(key),
    "in": lambda d, key, _: key in d,
    "setdefault": lambda d, key, value: d.setdefault(key, value),
    "popitem": lambda d, *_: d.popitem(),
    "clear": lambda d, *_: d.clear(),
    "copy": lambda d, *_: d.copy(),
    "items": lambda d, *_: list(d.items()),
    "values": lambda d, *_: list(d.values()),
    "keys": lambda d, *_: list(d.keys()),
    "len": lambda d, *_: len(d),
    "update": lambda d, key, value: d.update({key: value, "a": 1}),
    "|": lambda d, key, value: (d | {key: value}, {key: value} | d),
    "|=": lambda d, key, value: _ior(d, {key: value}) and None,
    "==": lambda d, key, value: d == {key: value},
}
MOVES = ("spill", "spill all", "restore")


@settings(max_examples=3 * settings.default.max_examples, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["set", *STEPS, *MOVES]), KEYS, st.integers(0, 99)), max_size=40))
def test_it_behaves_as_a_plain_dict_under_any_operations(steps):
    bench, plain = Bench(), {}
    for name, key, value in steps:
        if name.startswith("spill"):
            bench.spill(*(plain if name == "spill all" else key))
            continue
        if name == "restore":
            for held, raw in list(dict.items(bench.cache)):
                if type(raw) is Spilled:
                    bench.cache.bring_back(held, raw)
            continue
        outcomes = []
        for target in (plain, bench.cache):
            try:
                outcomes.append(STEPS[name](target, key, value))
            except KeyError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        assert bench.reserve_bytes == (bench.away() > 0)
        raw = {held: kept.host[0] if type(kept) is Spilled else kept for held, kept in dict.items(bench.cache)}
        assert list(raw.items()) == list(plain.items())
