"""The card of a plan: names, sizes, labels."""

from __future__ import annotations

import pytest

from highwater.plan.card import read_device
from highwater_worker.plan.cards import CARDS


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
    assert device.note is not None
    assert f"one like an {pretended}" in device.note


@pytest.mark.parametrize("text", ["24GiB", "24GB", "48GiB", "80GiB", "80GB", "141GB"])
def test_a_label_is_called_so(text: str) -> None:
    note = read_device(text).note
    assert note is not None
    assert note.startswith(f"{text} is a label; drivers show less, in GiB: ")


def test_without_a_card_nothing_is_compared() -> None:
    assert read_device(None).total_bytes is None
