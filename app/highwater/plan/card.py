"""The room on a card beside a KV cache that was given: vLLM takes bytes and blocks without a look at the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from highwater.units import size_text
from kvplan.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCard:
    """The room that a card has for a start, where vLLM does not size the KV cache by what is left of the card."""

    fits: bool | None  # None: between the bounds of an estimate, or not known
    why: str  # the figures, in a sentence


def judge_card(
    total: int,
    used: int,
    cache: int,
    weights: Figure | None,
    rest: Figure | None,
    *,
    why_unknown: str | None = None,
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
