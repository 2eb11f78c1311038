"""The blocks of docs/figures.md and docs/relief.md that a measurement writes, rendered."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tabulate import tabulate

from bench.dataplane.report import Report
from bench.figure import Figure

COLUMNS = ("what", "goal", "measured", "met")


def figures_table(figures: Sequence[Figure], layout: str) -> str:
    """Return a table of figures with goal, value and verdict; on a page only the first of a figure's other numbers."""
    rows = [figure.row(is_short=layout == "github") for figure in figures]
    widths = [34, 14, 46, 8] if layout == "grid" else None
    return tabulate(rows, COLUMNS, tablefmt=layout, maxcolwidths=widths, disable_numparse=True)


def with_figures(
    page: str, name: str, figures: Sequence[Figure], *, command: str, machine: str, day: str, notes: Sequence[str]
) -> str:
    """A page with one block of figures written anew, Markdown. Where none has a goal, there are no columns for it."""
    if any(figure.goal for figure in figures):
        table = figures_table(figures, "github")
    else:
        rows = [(figure.what, figure.row(is_short=True)[2]) for figure in figures]
        table = tabulate(rows, ("what", "measured"), tablefmt="github", disable_numparse=True)
    methods = "\n".join(f"- {method}" for method in dict.fromkeys(figure.method for figure in figures))
    noted = "".join(f"- {note}\n" for note in notes)
    block = f"\n{_written(page, command, day, machine)}\n\n{table}\n\n{methods}\n{noted}\n"
    return replaced(page, name, f"end of {name}", block)


def with_section(
    page: str, name: str, report: Report, *, command: str, machine: str, day: str, notes: Sequence[str]
) -> str:
    """A page with one section written anew from a report, Markdown; the rest of the page stays.

    Args:
        page: As it was.
        name: Of the section, in its marks.
        report: What was measured.
        command: That measures it again.
        machine: In words.
        day: As YYYY-MM-DD.
        notes: What the reader must know of this run.
    """
    bullets = "".join(f"- {method}\n" for method in report.methods)
    noted = "".join(f"- {note}\n" for note in notes)
    facts = "".join(f"\n{fact}\n" for fact in report.facts)
    section = (
        f"## {report.title}\n\n"
        f"{_written(page, command, day, machine)}\n\n"
        f"{report_table(report, 'github')}\n{facts}\n"
        f"{bullets}" + (f"\nOf this run:\n\n{noted}" if notes else "")
    )
    return replaced(page, name, f"end of {name}", section)


def _written(page: str, command: str, day: str, machine: str) -> str:
    """Return how to measure a block again, and where it was measured if the page does not begin with that machine."""
    written = f"`{command}`, {day}."
    is_usual = f"{machine}." in page.partition("<!-- ")[0].replace("\n", " ")
    return written if is_usual else f"{written} Machine: {machine}."


def replaced(page: str, begin: str, end: str, block: str) -> str:
    """A page with what is between two marks written anew."""
    marks = re.compile(rf"(<!-- {begin} -->\n).*?(<!-- {end} -->)", re.DOTALL)
    text, count = marks.subn(lambda found: f"{found[1]}{block}{found[2]}", page)
    if count != 1:
        raise ValueError(f"the place of {begin} is there {count} times, not once")
    return text


def report_table(report: Report, layout: str) -> str:
    """The table of one section."""
    return tabulate(report.rows, report.columns, tablefmt=layout, disable_numparse=True)
