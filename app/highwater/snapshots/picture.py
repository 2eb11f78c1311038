"""A snapshot's segments as an SVG: a bar each, as long as the segment, with its used and free parts. Pure.

Bounded: the largest segments, each in a fixed number of cells at most; a line below counts what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, Final
from xml.sax.saxutils import escape

from highwater.snapshots.model import Segment, Snapshot
from highwater.units import size_text

MAX_BARS: Final = 120
MAX_CELLS: Final = 200
_WIDTH, _LEFT, _RIGHT, _BAR, _STEP, _TOP = 1200, 190, 150, 10, 13, 64
_COLOURS: Final = {"live": "#3b6ea5", "pending": "#d9a441", "free": "#e6e9ee"}
_NAMES: Final = {"live": "held by tensors", "pending": "freed, waits for a stream", "free": "free"}


def bars_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return the picture's data, as JSON: the largest segments, and the number and bytes of the others."""
    ranked = sorted(snapshot.segments, key=lambda one: (-one.size, one.device, one.address))
    shown = sorted(ranked[:MAX_BARS], key=lambda one: (one.device, one.pool, one.kind, -one.size, one.address))
    rest = ranked[MAX_BARS:]
    bars = [
        {
            "device": segment.device,
            "bytes": segment.size,
            "kind": segment.kind,
            "pool": list(segment.pool),
            "stream": segment.stream,
            "free_bytes": segment.free_bytes,
            "runs": [[state, size] for state, size in _runs(segment)],
        }
        for segment in shown
    ]
    return {
        "bars": bars,
        "left_out": {"segments": len(rest), "bytes": sum(segment.size for segment in rest)},
    }


def _runs(segment: Segment) -> list[tuple[str, int]]:
    """Return neighbours of one state as one run; if there are too many, cells in the state of most of their bytes."""
    neighbours = groupby(segment.blocks, key=lambda block: block.state)
    runs = [(state, sum(block.size for block in blocks)) for state, blocks in neighbours]
    return runs if len(runs) <= MAX_CELLS else list(_cells(runs, segment.size))


def _cells(runs: list[tuple[str, int]], size: int) -> Iterator[tuple[str, int]]:
    edges = [size * cell // MAX_CELLS for cell in range(MAX_CELLS + 1)]
    index, start = 0, 0
    for begin, end in pairwise(edges):
        within = dict.fromkeys(_COLOURS, 0)
        while index < len(runs):
            state, length = runs[index]
            within[state] += max(0, min(end, start + length) - max(begin, start))
            if start + length > end:
                break
            start, index = start + length, index + 1
        if end > begin:
            yield max(within, key=lambda state: within[state]), end - begin


def svg(picture: dict[str, Any], title: str) -> str:
    """Return the picture of what ``bars_of`` returned, with a title."""
    bars = picture["bars"]
    height = _TOP + _STEP * len(bars) + 34
    longest = max((bar["bytes"] for bar in bars), default=1) or 1
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="10" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="14" fill="#20242a">{escape(title)}</text>',
        *_legend(),
    ]
    for row, bar in enumerate(bars):
        parts += _drawn(bar, _TOP + row * _STEP, scale)
    parts.append(f'<text x="12" y="{height - 12}" fill="#20242a">{escape(_left_out(picture))}</text></svg>')
    return "\n".join(parts) + "\n"


def _legend() -> Iterator[str]:
    for index, (state, colour) in enumerate(_COLOURS.items()):
        x = 12 + index * 180
        yield f'<rect x="{x}" y="36" width="12" height="12" fill="{colour}" stroke="#8a929e" stroke-width="0.5"/>'
        yield f'<text x="{x + 18}" y="46" fill="#20242a">{_NAMES[state]}</text>'


def _drawn(bar: dict[str, Any], y: int, scale: float) -> Iterator[str]:
    pool = tuple(bar["pool"])
    whose = bar["kind"] if pool == (0, 0) else f"{bar['kind']}, private {pool[0]}.{pool[1]}"
    stream = f", stream {bar['stream']:x}" if bar["stream"] else ""
    yield f'<text x="{_LEFT - 6}" y="{y + 9}" text-anchor="end" fill="#20242a">{bar["device"]}: {whose}{stream}</text>'
    x = float(_LEFT)
    for state, size in bar["runs"]:
        width = size * scale
        yield f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{_COLOURS[state]}"/>'
        x += width
    yield (
        f'<rect x="{_LEFT}" y="{y}" width="{x - _LEFT:.2f}" height="{_BAR}" fill="none" stroke="#8a929e" '
        'stroke-width="0.5"/>'
    )
    yield (
        f'<text x="{x + 6:.2f}" y="{y + 9}" fill="#20242a">{size_text(bar["bytes"])}, '
        f"{size_text(bar['free_bytes'])} free</text>"
    )


def _left_out(picture: dict[str, Any]) -> str:
    rest = picture["left_out"]
    if not rest["segments"]:
        return f"All {len(picture['bars'])} segments."
    return f"The {len(picture['bars'])} largest segments. Left out: {rest['segments']:,}, {size_text(rest['bytes'])}."
