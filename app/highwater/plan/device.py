"""The card of a plan, by its name or by the size that its driver shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from highwater.plan.command_line import size_of
from highwater.units import GIB, size_text
from highwater_worker.plan.cards import CARDS
from kvplan.errors import PlanError

# What a card is called is no size: its driver shows less, but at least so much of it.
_LABELS: Final = frozenset({16, 24, 32, 40, 48, 80, 96, 141, 180, 192})
_LABEL_SHOWS: Final = 0.9
# A size alone says which defaults vLLM takes (70 and 160 GiB); for the rest a common card of that size is taken.
_OF_SIZE: Final = ((160, "B200"), (120, "H200"), (70, "H100"), (30, "L40S"), (0, "L4"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    pretended: str  # the card that vLLM is made to believe in, by its short name
    total_bytes: int | None = None  # None: no card was named, nothing is compared
    is_named: bool = False
    note: str | None = None

    @property
    def title(self) -> str:
        size = size_text(self.total_bytes)
        return f"{CARDS[self.pretended].name}, {size}" if self.is_named else f"a card of {size}"


def read_device(text: str | None) -> Device:
    """Read `--device`. Raises PlanError: it is neither a card's name nor a size that one has."""
    if text is None:
        return Device(pretended="H100")
    for name, card in CARDS.items():
        if name.lower() == text.strip().lower().replace(" ", ""):
            return Device(pretended=name, total_bytes=card.total_bytes, is_named=True)
    try:
        total = size_of(text)
    except ValueError:
        total = 0
    if total < GIB:
        meant = f"{text.strip()}GiB, or " if text.strip().isdecimal() else ""
        raise PlanError(f"--device: {text!r} must be {meant}a size such as 22.5GiB, or one of {', '.join(CARDS)}")
    pretended = next(name for gib, name in _OF_SIZE if total >= gib * GIB)
    note = f"a card of {size_text(total)} is taken for one like an {pretended}; --device takes names too"
    label = float("".join(letter for letter in text if letter.isdigit() or letter == "."))
    sizes = {name: card.total_bytes / GIB for name, card in CARDS.items()}
    alike = {name: size for name, size in sizes.items() if _LABEL_SHOWS * label < size < label}
    if label in _LABELS and alike:
        shown = ", ".join(f"{name} {size:.2f}" for name, size in alike.items())
        meant = pretended if pretended in alike else next(iter(alike))
        note = f"{text} is a label; drivers show less, in GiB: {shown}; as in --device {meant}"
    return Device(pretended=pretended, total_bytes=total, note=note)
