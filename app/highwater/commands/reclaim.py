"""The request body of ``highwater reclaim``, and its result as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from highwater.accounting.components import COMPONENT_NAMES
from highwater.accounting.totals import compare
from highwater.client.answers import ranks_of, remedy_of, understood
from highwater.client.sidecar import reasons_of
from highwater.policy.rules import ALL_REMEDIES
from highwater.readings.rank import RankReading
from highwater.readings.remedy import RemedyResult
from highwater.text.table import component_title, table
from highwater.units import UNKNOWN, size_text

_TRIM: Final = "trim_encoder_cache"
_FAILURES: Final = frozenset({"refused", "failed"})


class Reclaimed(NamedTuple):
    result: RemedyResult
    before: tuple[RankReading, ...] = ()
    after: tuple[RankReading, ...] = ()


def known_remedies() -> list[str]:
    """Return the remedies of this version, for shell completion; a sidecar may have others."""
    return sorted(ALL_REMEDIES)


def wanted(remedies: Sequence[str], free_bytes: int | None) -> list[str | Mapping[str, Any]]:
    """Return the body's remedies, empty if none is given. Raises ValueError for a size without the trim it is for."""
    names = [name.replace("-", "_") for name in remedies]
    if free_bytes is None:
        return list(names)
    if names and _TRIM not in names:
        raise ValueError(f"--free is the size that {_TRIM} moves out, and {_TRIM} is not among the remedies")
    trim = {"remedy": _TRIM, "free_bytes": free_bytes}
    return [trim if name == _TRIM else name for name in names or [_TRIM]]


def reclaimed_of(answer: Any) -> list[Reclaimed]:  # noqa: ANN401 - JSON
    with understood("/memory/reclaim"):
        return [
            Reclaimed(remedy_of(each), ranks_of(each["before"]), ranks_of(each["after"])) for each in answer["results"]
        ]


def succeeded(results: Sequence[Reclaimed]) -> bool:
    return bool(results) and not any(each.result.outcome in _FAILURES for each in results)


def reclaim_text(results: Sequence[Reclaimed], *, dry_run: bool) -> str:
    if not results:
        return "nothing was done"
    headers = ["remedy", "would be" if dry_run else "outcome", "quiesced by"]
    headers += [] if dry_run else ["given back", "less in use now", "seconds", "held"]
    parts = [table(headers, [_row(each.result, dry_run=dry_run) for each in results])]
    parts += reasons_of((result.remedy, result.reason) for result, *_ in results if result.reason)
    if any(each.result.outcome == "done" for each in results):
        parts.append(_by_rank(results[0].before, results[-1].after))
    return "\n".join(part for part in parts if part)


def _row(result: RemedyResult, *, dry_run: bool) -> list[str]:
    outcome = "done" if dry_run and result.outcome == "observed" else result.outcome
    row = [result.remedy, outcome, result.quiesced_by or UNKNOWN]
    if dry_run:
        return row
    held = UNKNOWN if result.held_seconds is None else f"{result.held_seconds:.2f} s"
    return [*row, size_text(result.credited_bytes), size_text(result.freed_bytes), f"{result.seconds:.2f}", held]


def _by_rank(before: Sequence[RankReading], after: Sequence[RankReading]) -> str:
    freed = compare(after, before)
    if not freed:
        return ""
    in_use = {rank.key: rank.used_bytes for rank in after}
    rows = [
        [component_title(name), *(size_text(getattr(each.components, name)) for each in freed)]
        for name in COMPONENT_NAMES
        if any(getattr(each.components, name) for each in freed)
    ]
    rows.append(["all", *(size_text(each.used_bytes) for each in freed)])
    rows.append(["used now", *(size_text(in_use[each.key]) for each in freed)])
    return "\n" + table(["less in use now", *(each.name for each in freed)], rows)
