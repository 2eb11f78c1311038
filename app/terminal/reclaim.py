"""What ``highwater reclaim`` asks for, and what came of it as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from app.attribution import COMPONENTS
from app.policy import ALL_REMEDIES
from app.table import component_title, table
from app.units import UNKNOWN, size_text

_TRIM: Final = "trim_encoder_cache"
_FAILURES: Final = frozenset({"refused", "failed"})


def known_remedies() -> list[str]:
    """Those that this version knows, for shell completion. What there is, the sidecar says."""
    return sorted(ALL_REMEDIES)


def succeeded(results: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether something was done (or would be), and nothing refused or failed."""
    return bool(results) and not any(result.get("outcome") in _FAILURES for result in results)


def wanted(remedies: Sequence[str], free_bytes: int | None) -> list[str | Mapping[str, Any]]:
    """The remedies as ``POST /memory/reclaim`` takes them; none for what the sidecar itself would choose.

    Raises:
        ValueError: A size was given, and no trim that it would be for.
    """
    names = [name.replace("-", "_") for name in remedies]
    if free_bytes is None:
        return list(names)
    if names and _TRIM not in names:
        raise ValueError(f"--free says how much {_TRIM} lets go, and {_TRIM} is not among the remedies")
    trim = {"remedy": _TRIM, "free_bytes": free_bytes}
    return [trim if name == _TRIM else name for name in names or [_TRIM]]


def reclaim_text(results: Sequence[Mapping[str, Any]], *, dry_run: bool) -> str:
    """Return what came of each remedy, what it freed by component and rank, and why not."""
    if not results:
        return "nothing was done"
    headers = ["remedy", "would be" if dry_run else "outcome", "moment"]
    headers += [] if dry_run else ["freed", "seconds", "held"]
    rows = []
    for result in results:
        row = [str(result.get("remedy")), _outcome(result, dry_run=dry_run), str(result.get("moment") or UNKNOWN)]
        if not dry_run:
            held = result.get("held_seconds")
            row += [size_text(_freed(result).get("total")), f"{result.get('seconds', 0.0):.2f}"]
            row += [UNKNOWN if held is None else f"{held:.2f} s"]
        rows.append(row)
    parts = [table(headers, rows)]
    parts += [f"{r.get('remedy')}: {r['reason']}" for r in results if r.get("reason")]
    if any(result.get("outcome") == "done" for result in results):
        parts.append(_by_rank(results))
    return "\n".join(part for part in parts if part)


def _outcome(result: Mapping[str, Any], *, dry_run: bool) -> str:
    outcome = str(result.get("outcome"))
    return "done" if dry_run and outcome == "observed" else outcome


def _freed(result: Mapping[str, Any]) -> Mapping[str, Any]:
    freed = result.get("freed_bytes")
    return freed if isinstance(freed, dict) else {}


def _by_rank(results: Sequence[Mapping[str, Any]]) -> str:
    """Return what all remedies together freed, by component and rank, and what is in use now."""
    before, after = results[0].get("before") or [], results[-1].get("after") or []
    was = {_key(rank): rank for rank in before}
    both = [(was[_key(rank)], rank) for rank in after if _key(rank) in was]
    if not both:
        return ""
    headers = ["freed in all", *(f"rank {_name(rank, both)}" for _, rank in both)]
    rows = []
    for name in COMPONENTS:
        sizes = [_less(old["components"].get(name), new["components"].get(name)) for old, new in both]
        if any(sizes):
            rows.append([component_title(name), *(size_text(size) for size in sizes)])
    used = [_less(old.get("used_bytes"), new.get("used_bytes")) for old, new in both]
    rows.append(["all", *(size_text(size) for size in used)])
    rows.append(["used now", *(size_text(new.get("used_bytes")) for _, new in both)])
    return "\n" + table(headers, rows)


def _key(rank: Mapping[str, Any]) -> tuple[Any, Any]:
    return rank.get("dp_rank"), rank.get("rank")


def _name(rank: Mapping[str, Any], among: Sequence[tuple[Any, Mapping[str, Any]]]) -> str:
    several = any(other.get("dp_rank") for _, other in among)
    return f"{rank.get('dp_rank') or 0}.{rank.get('rank')}" if several else str(rank.get("rank"))


def _less(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else before - after
