"""Plain tables for a terminal, and the words for components, devices, ranks, signals and remedies' reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tabulate import tabulate

from highwater.model.components import BY_NAME
from highwater.model.engine import MissingRank
from highwater.model.rank import Device
from highwater.model.units import gib_text, share_text


def component_title(name: str) -> str:
    return BY_NAME[name].title if name in BY_NAME else name.removesuffix("_bytes").replace("_", " ")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 0) -> str:
    """Return a plain table: the first column and the last ``words`` columns left, the others right."""
    figures = len(headers) - 1 - words
    align = ("left", *("right" for _ in range(figures)), *("left" for _ in range(words)))
    return tabulate(rows, headers, tablefmt="simple", colalign=align if rows else None, disable_numparse=True)


def narrow_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, headers among them, without lines and padding: nine columns of sizes fit 80 cells."""
    align = ("left", *("right" for _ in rows[0][1:]))
    return tabulate(rows, tablefmt="plain", colalign=align, disable_numparse=True)


def device_title(device: Device) -> str:
    kind = device.type or "unknown"
    return kind if device.index is None else f"{kind}:{device.index}"


def names_text(labels: Sequence[str]) -> str:
    """Return the names of equal ranks: ``3``, ``0-3 6 (x5)``."""
    runs: list[list[str]] = []
    for label in labels:
        follows = bool(runs) and label.isdecimal() and runs[-1][-1].isdecimal() and int(label) == int(runs[-1][-1]) + 1
        runs[-1:] = [[*runs[-1], label]] if follows else [*runs[-1:], [label]]
    few = " ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:3])
    return f"{few}{' ..' if len(runs) > 3 else ''}{f' x{len(labels)}' if len(labels) > 1 else ''}"  # noqa: PLR2004


def missing_text(ranks: Sequence[MissingRank]) -> str:
    """Missing ranks by their place, which is known of those too that never reported: ``dp 1 pp 0 tp 0 (dead)``."""
    return ", ".join(f"dp {rank.dp_rank} pp {rank.pp_rank} tp {rank.tp_rank} ({rank.status})" for rank in ranks)


_SIGNALS = {
    "device_free_bytes": "free",
    "device_used_ratio": "used",
    "device_growth_bytes": "grown since ready",
    "encoder_cache_bytes": "encoder cache",
    "host_used_ratio": "host memory used",
    "host_growth_bytes": "host memory grown",
}


def signal_title(signal: str) -> str:
    return _SIGNALS.get(signal, signal)


def signal_text(signal: str, value: float | None) -> str:
    return share_text(value) if signal.endswith("_ratio") else gib_text(value)


class _HasWaters(Protocol):
    @property
    def signal(self) -> str: ...
    @property
    def high_water(self) -> float | None: ...
    @property
    def low_water(self) -> float | None: ...


def waters_text(rule: _HasWaters) -> str:
    if rule.high_water is None or rule.low_water is None:
        return ""
    # Of what is free, a rule acts on less, and stops at more.
    acts = "acts below" if rule.high_water < rule.low_water else "acts at"
    high, low = signal_text(rule.signal, rule.high_water), signal_text(rule.signal, rule.low_water)
    return f"{acts} {high}, stops at {low}"


def reasons_of(results: Iterable[tuple[str, str]]) -> list[str]:
    """Return each reason once, behind the remedies that have it, from pairs of remedy and reason."""
    remedies: dict[str, list[str]] = {}
    for remedy, reason in results:
        remedies.setdefault(reason, []).append(remedy)
    return [f"{', '.join(names)}: {reason}" for reason, names in remedies.items()]
