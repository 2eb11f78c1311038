"""A card beside bytes that were given for the KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from highwater.explain.card import judge_given, read_device
from highwater_worker.plan.cards import CARDS

GIB = 1 << 30


def answer(**changed: Any) -> dict[str, Any]:
    return {
        "kv_cache": {"available_bytes": 5 * GIB},
        "ranks": [{"weights": [15 * GIB, 14 * GIB, 16 * GIB, "estimated", ""]}],
        **changed,
    }


def test_given_bytes_are_judged_by_the_least_weights_and_what_others_use() -> None:
    enough = judge_given(answer(), 20 * GIB, 0)
    assert enough.fits is None
    assert "0 B are left beside the weights" in enough.why
    too_full = judge_given(answer(), 20 * GIB, 2 * GIB)
    assert too_full.fits is False
    assert (
        "do not hold the weights (at least 14.00 GiB), the KV cache (5.00 GiB) and the 2.00 GiB in use" in too_full.why
    )


@pytest.mark.parametrize("changed", [{"budget": {"total_bytes": 1}}, {"kv_cache": {}}, {"ranks": []}])
def test_a_share_or_unknown_weights_are_not_judged(changed: dict[str, Any]) -> None:
    assert judge_given(answer(**changed), 20 * GIB, 0) is None


@pytest.mark.parametrize("text", ["L4", "l4", " RTX 4090 "])
def test_a_card_is_found_by_its_name_whose_size_was_read_somewhere(text: str) -> None:
    device = read_device(text)
    card = CARDS[device.pretended]
    assert (device.total_bytes, device.note) == (card.total_bytes, None)
    assert card.read_in
    assert device.title.startswith(f"{card.name}, ")


@pytest.mark.parametrize(
    ("text", "pretended"),
    [("22.5GiB", "L4"), ("44GiB", "L40S"), ("79GiB", "H100"), ("139GiB", "H200"), ("178GiB", "B200")],
)
def test_a_size_gets_a_card_with_the_same_defaults(text: str, pretended: str) -> None:
    device = read_device(text)
    assert (device.pretended, device.is_named) == (pretended, False)
    assert f"one like an {pretended}" in device.note


@pytest.mark.parametrize("text", ["24GiB", "24GB", "48GiB", "80GiB", "80GB", "141GB"])
def test_a_label_is_called_so(text: str) -> None:
    note = read_device(text).note
    assert note.startswith(f"{text} is a label; drivers show less, in GiB: ")


def test_without_a_card_nothing_is_compared() -> None:
    assert read_device(None).total_bytes is None
