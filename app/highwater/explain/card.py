"""The room on a card beside a KV cache that was given: vLLM takes bytes and blocks without a look at the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from highwater.explain.command_line import size_of
from highwater.model.units import GIB, size_text
from highwater_worker.plan.cards import CARDS, Figure
from kvplan import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCard:
    """The room that a card has for a start, where vLLM does not size the KV cache by what is left of the card."""

    fits: bool | None  # None: between the bounds of an estimate, or not known
    why: str  # the figures, in a sentence


def judge_card(
    total: int, used: int, cache: int, weights: Figure | None, rest: Figure | None, *, why_unknown: str | None
) -> OnCard:
    """Judge one card of ``total`` bytes, of which others use ``used``; all in bytes.

    The least weights alone prove that it is too full. ``rest`` are activation, graphs and memory outside torch; where
    that or the weights are not known, for ``why_unknown``, nothing proves that it fits.
    """
    joined, others = (", ", f" and the {size_text(used)} in use by others") if used else (" and ", "")
    free, of_card = total - used - cache, f"the card's {size_text(total)}"
    kept = f"the KV cache ({size_text(cache)}){others}"
    least = 0 if weights is None else weights.low
    if free < least:
        shown = f"the weights (at least {size_text(least)}){joined}" if least else ""
        return OnCard(fits=False, why=f"vLLM runs out of memory: {of_card} do not hold {shown}{kept}.")
    if weights is None:
        return OnCard(fits=None, why=f"What a start takes of {of_card} beside {kept} is not known: {why_unknown}.")
    if rest is None:
        need = f"a size that is not known: {why_unknown}"
    elif rest.low == rest.high:
        need = f"{size_text(rest.bytes)}, as measured"
    elif rest.high >= total:
        need = "unknown size, as that of the largest image, video or sound is"
    else:
        need = f"{size_text(rest.low)} to {size_text(rest.high)}, likely {size_text(rest.bytes)}"
    return OnCard(
        fits=(rest is not None and free - weights.high >= rest.high) or None,
        why=(
            f"Of {of_card}, {size_text(max(free - weights.bytes, 0))} are left beside the weights"
            f" ({size_text(weights.bytes)}, {weights.grade}){joined}{kept} for activations, graphs and memory outside"
            f" torch of {need}."
        ),
    )


def judge_given(answer: Mapping[str, Any], total: int, others: int) -> OnCard | None:
    """Judge a card by an answer of docs/plan-by-vllm.md; None: no bytes were given for its KV cache, or no weights."""
    given = (answer.get("kv_cache") or {}).get("available_bytes")
    weights = [Figure(*rank["weights"]) for rank in answer.get("ranks") or () if rank["weights"]]
    if answer.get("budget") or given is None or not weights:
        return None
    heaviest, why = max(weights, key=lambda one: one.low), "vLLM takes these bytes without a look at the card"
    return judge_card(total, others, given, heaviest, None, why_unknown=why)


def fullest(cards: Iterable[OnCard]) -> OnCard:
    return min(cards, key=lambda card: (False, None, True).index(card.fits))


# --- The card of a plan, by its name or by the size that its driver shows ---

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
