"""docs/figures.md, rendered from the figures."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from bench.figure import Figure

COLUMNS = ("what", "goal", "measured", "met")


def figures_table(figures: Sequence[Figure], layout: str) -> str:
    """What, goal, measured, met."""
    rows = [figure.row() for figure in figures]
    widths = [34, 14, 46, 8] if layout == "grid" else None
    return tabulate(rows, COLUMNS, tablefmt=layout, maxcolwidths=widths, disable_numparse=True)


def figures_page(figures: Sequence[Figure], *, command: str, machine: str, day: str, notes: Sequence[str]) -> str:
    """The whole page, Markdown."""
    methods = "\n".join(f"- {figure.what}: {figure.method}" for figure in figures)
    noted = "\n".join(f"- {note}" for note in notes)
    return (
        "# Figures\n\n"
        f"Written by `{command}` on {day}; the same command measures them again.\n\n"
        f"Machine: {machine}.\n\n"
        f"{figures_table(figures, 'github')}\n\n"
        f"## Method\n\n{methods}\n" + (f"\n## Notes\n\n{noted}\n" if notes else "")
    )
