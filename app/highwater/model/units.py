"""Bytes, shares, spans of time and tables as people read them; numbers rounded up; sums of sizes, some unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from tabulate import tabulate

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
UNKNOWN: Final = "-"
HOUR_SECONDS: Final = 3600.0
_MINUTE, _DAY = 60.0, 86_400.0
# A span's larger unit and its name, the name of the smaller one, and its seconds.
_SPANS: Final = ((_DAY, "d", "h", HOUR_SECONDS), (HOUR_SECONDS, "h", "min", _MINUTE), (_MINUTE, "min", "s", 1.0))


def counted(count: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}es" if noun.endswith("ss") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def difference(now: int | None, was: int | None) -> int | None:
    return None if now is None or was is None else now - was


def sum_known(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def mib(size: float | None, *, signed: bool = False) -> str:
    """Return bytes as MiB with one decimal and thousands separators; what rounds to 0 has no sign."""
    if size is None:
        return UNKNOWN
    return f"{size / MIB:{'+' if signed else '-'}z,.1f}"


def gib(size: float | None, *, signed: bool = False) -> str:
    """Return bytes as GiB with two decimals, for a column; what rounds to 0 has no sign."""
    if size is None:
        return UNKNOWN
    return f"{size / GIB:{'+' if signed else '-'}z,.2f}"


def size_text(size: float | None, *, signed: bool = False) -> str:
    """Return bytes in the unit that fits: ``56.41 GiB``, ``268 MiB``, ``12 KiB``, ``0 B``."""
    if size is None:
        return UNKNOWN
    sign, small = "+" if signed else "", abs(size)
    # Beyond 999.5 MiB it would read as 1000 MiB.
    if small >= 999.5 * MIB:
        return f"{size / GIB:{sign}.2f} GiB"
    if small >= MIB:
        return f"{size / MIB:{sign}.{0 if small >= 100 * MIB else 1}f} MiB"
    if small >= KIB:
        return f"{size / KIB:{sign}.0f} KiB"
    return f"{size:{sign}.0f} B" if size else "0 B"


def gib_text(size: float | None, *, signed: bool = False) -> str:
    """Return bytes in GiB, so that sums can be checked by eye: ``57.91 GiB``, ``0.255 GiB``; under 1 MiB in KiB."""
    if size is None:
        return UNKNOWN
    if abs(size) < MIB:
        return size_text(size, signed=signed) if size else "0 GiB"
    sign = "+" if signed else ""
    whole = f"{size / GIB:{sign}.3f}" if abs(size) < GIB else f"{size / GIB:{sign}.2f}"
    return f"{whole[:-1] if abs(size) < GIB and whole.endswith('0') else whole} GiB"


def share_text(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.1%}".replace("%", " %")


def whole_span_text(seconds: float) -> str:
    """Return a span that goes on as time passes, without tenths of seconds: ``0 s``, ``4 s``, ``12 min 30 s``."""
    return f"{int(seconds)} s" if 0 <= seconds < _MINUTE else span_text(max(seconds, 0.0))


def span_text(seconds: float | None) -> str:
    """Return a span of time by its two largest units: ``4 s``, ``12 min 30 s``, ``1 h 20 min``, ``3 d 4 h``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    for unit, large, small, divisor in _SPANS:
        if seconds >= unit:
            rest = int(seconds % unit // divisor)
            return f"{int(seconds // unit)} {large} {rest} {small}" if rest else f"{int(seconds // unit)} {large}"
    return f"{max(seconds, 0.0):.{1 if seconds < 10 else 0}f} s"  # noqa: PLR2004 - one decimal while it matters


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 0) -> str:
    """Return a plain table: the first column and the last ``words`` columns left, the others right."""
    figures = len(headers) - 1 - words
    align = ("left", *("right" for _ in range(figures)), *("left" for _ in range(words)))
    return tabulate(rows, headers, tablefmt="simple", colalign=align if rows else None, disable_numparse=True)


def narrow_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, headers among them, without lines and padding: nine columns of sizes fit 80 cells."""
    align = ("left", *("right" for _ in rows[0][1:]))
    return tabulate(rows, tablefmt="plain", colalign=align, disable_numparse=True)
