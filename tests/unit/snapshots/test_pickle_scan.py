"""A pickle is judged before anything of it is made: plain data passes, and what is refused is named."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.snapshots import SnapshotError, UnsafePickle
from highwater.snapshots.pickle_scan import BOUNDS, Bounds, scan
from highwater.snapshots.reading import load
from tests.unit.snapshots.made import snapshots

_ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=300)
)
_KEYS = st.one_of(st.text(), st.integers(), st.binary(), st.tuples(st.integers(), st.text()))
PLAIN = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner, max_size=5).map(tuple), st.dictionaries(_KEYS, inner, max_size=5)
    ),
    max_leaves=30,
)


class Runs:
    """A foreign file whose unpickling calls something."""

    def __init__(self, call, *arguments):
        self.made = call, arguments

    def __reduce__(self):
        return self.made


class HasState:
    """An ordinary object."""


def said(data, bounds=BOUNDS):
    with pytest.raises(UnsafePickle) as raised:
        scan(data, bounds)
    return str(raised.value)


@settings(max_examples=60)
@given(PLAIN, st.integers(3, 5))
def test_plain_data_comes_back_as_it_was(value, protocol):
    """Every pickle of the allowed types, shared values included, in each protocol that has bytes."""
    assert load(pickle.dumps([value, value], protocol)) == [value, value]


@settings(max_examples=20)
@given(snapshots(), st.integers(2, 5))
def test_a_snapshot_passes_in_every_protocol(raw, protocol):
    """PyTorch writes Python's default, which has changed and will."""
    assert load(pickle.dumps(raw, protocol)) == raw


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "harm",
    [
        Runs(os.system, "touch /tmp/harm"),
        Runs(eval, "1"),
        HasState(),
        collections.OrderedDict(a=1),
        print,
        {1, 2},
        frozenset({1}),
        bytearray(b"1"),
        1j,
    ],
    ids=lambda harm: type(harm).__name__,
)
def test_what_is_no_plain_data_is_refused(harm, protocol):
    """Before it is built, also deep within plain data."""
    text = said(pickle.dumps({"segments": [{"blocks": [harm]}]}, protocol))
    assert text.startswith("instruction ")


@pytest.mark.parametrize(
    ("protocol", "instruction"), [(2, "GLOBAL (posix.system)"), (4, "STACK_GLOBAL (posix.system)")]
)
def test_a_function_is_refused_by_its_name(protocol, instruction):
    """An operator sees what somebody tried."""
    assert f"instruction {instruction} at byte " in said(pickle.dumps(Runs(os.system, "true"), protocol))


@pytest.mark.parametrize(
    "code", [b"R", b"b", b"\x81", b"\x92", b"i", b"o", b"Q", b"P", b"\x82", b"\x83", b"\x84", b"\x96", b"\x97", b"2"]
)
def test_no_other_instruction_passes(code):
    """Calls, states, extensions, outside values and buffers, copies on the stack."""
    assert said(b"\x80\x04" + code + bytes(20)).startswith("instruction ")


def test_a_name_cannot_write_on_the_terminal():
    """The name is foreign text."""
    assert "\x1b" not in said(b"\x80\x02cos\x1b[2J\nsystem\n.")


def _nested(depth, wrap):
    return reduce(lambda inner, _: wrap(inner), range(depth), 1)


@pytest.mark.parametrize("wrap", [lambda one: [one], lambda one: (one,), lambda one: {1: one}, lambda one: (1, one)])
def test_deep_nesting_is_refused(wrap):
    """A reader that follows it would run out of stack; up to the bound all is well."""
    load(pickle.dumps(_nested(BOUNDS.depth - 1, wrap)))
    assert "nested more than 32 deep" in said(pickle.dumps(_nested(200, wrap)))


def test_nesting_without_end_is_refused_where_it_begins():
    """A hundred thousand lists, each to be put into the one before."""
    assert "wait for a container" in said(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".")
    assert "wait for a container" in said(b"\x80\x04" + b"(" * 100_000 + b".")


def test_a_memo_bomb_is_refused():
    """One instruction of five bytes would have Python make room for four billion entries."""
    assert "refers back to more than" in said(b"\x80\x04]r\xff\xff\xff\xff.")
    assert "refers to a value that it does not hold" in said(b"\x80\x04h\x01.")


def test_a_length_bomb_is_refused():
    """A text of a terabyte in a file of twelve bytes."""
    for code, form in ((b"X", "<I"), (b"\x8d", "<Q"), (b"\x8e", "<Q"), (b"B", "<I")):
        assert said(b"\x80\x04" + code + struct.pack(form, 2**31 - 1) + b".").startswith("the file ends")


def test_counts_are_bounded():
    """Of bytes, and of instructions."""
    data = pickle.dumps(list(range(100)))
    assert "at most 10 are read" in said(data, Bounds(nbytes=10))
    assert "more than 50 instructions" in said(data, Bounds(instructions=50))


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_never_raises_otherwise(data):
    """Bytes of any kind, with and without a pickle's first ones."""
    said_: list[str] = []
    for given_ in (data, b"\x80\x04" + data, b"\x80\x05\x95" + data):
        try:
            load(given_)
        except SnapshotError as exc:
            said_.append(str(exc))
    assert all(said_)


@settings(max_examples=40)
@given(snapshots(), st.data())
def test_a_broken_snapshot_is_refused_or_read(raw, data):
    """A file cut or changed in one place is never more than an error with a sentence."""
    whole = pickle.dumps(raw)
    at = data.draw(st.integers(0, len(whole) - 1))
    said_: list[str] = []
    for broken in (whole[:at], whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]):
        try:
            load(broken)
        except SnapshotError as exc:
            said_.append(str(exc))
    assert all(said_)


def test_what_follows_a_pickle_is_refused():
    """A second one could be read by another tool."""
    assert "1 bytes follow" in said(pickle.dumps([1]) + b".")


def test_the_unpickler_itself_knows_no_names():
    """Even if a name passed the scan, it would not be found."""
    from highwater.snapshots.reading import _NoNames  # noqa: PLC0415 - the second lock, tried without the first

    with pytest.raises(UnsafePickle, match=r"it names posix\.system"):
        _NoNames(io.BytesIO(pickle.dumps(Runs(os.system, "true")))).load()


@pytest.mark.parametrize("many", [False, True])
def test_a_key_that_takes_hours_to_hash_is_refused(many):
    """Thirty tuples, each of the one before twice, are a billion to a reader that hashes it: SETITEM, SETITEMS."""
    nested = b"K\x01\x85\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(29))
    assert "key" in said(b"\x80\x04}" + (b"(" if many else b"") + nested + b"K\x01" + (b"u." if many else b"s."))
