"""Sizes, shares and spans of time, read and typed."""

from __future__ import annotations

import pytest

from highwater.explain.command_line import size_of
from highwater.model.policy import SIGNALS, RuleStatus, signal_text, waters_text
from highwater.model.units import counted, share_text, size_text, span_text
from highwater.terminal.verbs import size_given

MIB, GIB = 1024**2, 1024**3


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (12, "12 B"),
        (4096, "4 KiB"),
        (5 * MIB, "5.0 MiB"),
        (268 * MIB, "268 MiB"),
        (1024 * MIB - 1, "1.00 GiB"),
        (int(60.96 * GIB), "60.96 GiB"),
        (-3 * GIB, "-3.00 GiB"),
    ],
)
def test_a_size_is_in_the_unit_that_fits(size, text):
    """Never 1000 MiB, and never 0 for what is not known."""
    assert size_text(size) == text


def test_a_change_has_its_sign():
    assert [size_text(size, signed=True) for size in (GIB, -GIB, 0)] == ["+1.00 GiB", "-1.00 GiB", "0 B"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0.4, "0.4 s"), (3, "3.0 s"), (59, "59 s"), (60, "1 min"), (750, "12 min 30 s"),
        (4800, "1 h 20 min"), (-1.0, "0.0 s"), (float("inf"), "-"), (float("nan"), "-"),
        (7200, "2 h"), (86_400 * 3 + 4 * 3600, "3 d 4 h"),
    ],
)  # fmt: skip
def test_a_span_has_its_two_largest_units(seconds, text):
    assert span_text(seconds) == text


def test_a_share_is_in_percent():
    assert [share_text(0.939), share_text(None)] == ["93.9 %", "-"]


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_signal_is_told_in_its_unit(signal):
    assert signal_text(signal, 0.5).endswith("%") == SIGNALS[signal].is_ratio


def waters(signal: str, high: float | None, low: float | None) -> str:
    return waters_text(RuleStatus(name="mine", signal=signal, phase="calm", high_water=high, low_water=low))


def test_waters_are_told_in_the_direction_in_which_the_signal_is_worse():
    """Less free memory is worse; what is not known yet is left out."""
    assert waters("device_free_bytes", GIB, 2 * GIB) == "acts below 1.00 GiB, stops at 2.00 GiB"
    assert waters("device_used_ratio", 0.9, 0.8) == "acts at 90.0 %, stops at 80.0 %"
    assert waters("device_free_bytes", None, None) == ""


@pytest.mark.parametrize(("text", "size"), [("1GiB", GIB), ("512 MiB", 512 * MIB), ("1.5GB", 1_500_000_000), ("7", 7)])
def test_a_size_is_typed_as_people_type_it(text, size):
    assert size_given(text) == size


@pytest.mark.parametrize("text", ["", "x", "1Gigs", "-1GiB", "0", "nan"])
def test_what_is_no_size_is_said(text):
    with pytest.raises(ValueError, match="1GiB"):
        size_given(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("17", 17),
        ("64GiB", 64 << 30),
        ("1.5GiB", 3 << 29),
        ("24GB", 24_000_000_000),
        ("10G", 10 << 30),
        ("10g", 10_000_000_000),
        ("8k", 8000),
        ("8K", 8192),
        ("21540531712", 21_540_531_712),
    ],
)
def test_sizes_are_read_as_vllm_reads_them(text: str, size: int):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1iB", "-1", "1e9", "1 2", "nan", "0"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ValueError, match=r"is not a size; write it as 64GiB|is zero"):
        size_of(text)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "request", "1 request"),
        (0, "request", "0 requests"),
        (2, "entry", "2 entries"),
        (3, "process", "3 processes"),
    ],
)
def test_a_count_has_the_nouns_number(count, noun, text):
    assert counted(count, noun) == text
