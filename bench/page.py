"""docs/figures.md, docs/performance.md, the blocks of figures in docs/relief.md and docs/fleet.md, rendered."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tabulate import tabulate

from bench.dataplane.report import Report
from bench.figure import Figure

COLUMNS = ("what", "goal", "measured", "met")
# Within a page that is written by hand.
PERFORMANCE_HEAD = """# Performance

For whoever decides whether traffic may pass the sidecar: what it costs as a proxy, beside nginx, vllm-router and
litellm.
"""
# The sections of docs/performance.md, in their order; each is written anew by its own run.
SECTIONS = ("data-plane", "engine-proxy")
_BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)


def figures_table(figures: Sequence[Figure], layout: str) -> str:
    """What, goal, measured, met."""
    rows = [figure.row() for figure in figures]
    widths = [34, 14, 46, 8] if layout == "grid" else None
    return tabulate(rows, COLUMNS, tablefmt=layout, maxcolwidths=widths, disable_numparse=True)


def figures_page(figures: Sequence[Figure], *, command: str, machine: str, day: str, notes: Sequence[str]) -> str:
    """The whole page, Markdown."""
    methods = "\n".join(methods_list(figures))
    noted = "\n".join(f"- {note}" for note in notes)
    return (
        "# Figures\n\n"
        "For whoever asks what watching costs: the sidecar, the engine and its workers, measured.\n\n"
        f"Written by `{command}` on {day}; the same command measures them again.\n\n"
        f"Machine: {machine}.\n\n"
        f"{figures_table(figures, 'github')}\n\n"
        f"## Method\n\n{methods}\n" + (f"\n## Notes\n\n{noted}\n" if notes else "")
    )


def methods_list(figures: Sequence[Figure]) -> list[str]:
    """How each was measured, as a list in Markdown; figures that share a method share a line."""
    names: dict[str, list[str]] = {}
    for figure in figures:
        names.setdefault(figure.method, []).append(figure.what)
    return [f"- {'; '.join(whats)}: {method}" for method, whats in names.items()]


def with_block(
    page: str, figures: Sequence[Figure], *, command: str, machine: str, day: str, notes: Sequence[str]
) -> str:
    """A page with its block of figures written anew, Markdown; none of these has a goal."""
    rows = [(figure.what, figure.row()[2]) for figure in figures]
    table = tabulate(rows, ("what", "measured"), tablefmt="github", disable_numparse=True)
    methods = "\n".join(f"- {method}" for method in dict.fromkeys(figure.method for figure in figures))
    noted = "".join(f"- {note}\n" for note in notes)
    block = (
        f"\nWritten by `{command}` on {day}; the same command measures them again. Machine: {machine}.\n\n"
        f"{table}\n\n{methods}\n{noted}\n"
    )
    return _replaced(page, block)


def with_report(page: str, report: Report, *, command: str, machine: str, day: str, notes: Sequence[str]) -> str:
    """A page with its block written anew from a report, Markdown."""
    facts = "".join(f"\n{fact}\n" for fact in report.facts)
    bullets = "".join(f"- {method}\n" for method in report.methods)
    noted = "".join(f"- {note}\n" for note in notes)
    block = (
        f"\nWritten by `{command}` on {day}; the same command measures it again. Machine: {machine}.\n\n"
        f"{report_table(report, 'github')}\n{facts}\n{bullets}{noted}\n"
    )
    return _replaced(page, block)


def _replaced(page: str, block: str) -> str:
    text, count = _BLOCK.subn(lambda found: f"{found[1]}{block}{found[2]}", page)
    if count != 1:
        raise ValueError(f"the place of the figures is there {count} times, not once")
    return text


def report_table(report: Report, layout: str) -> str:
    """The table of one section."""
    return tabulate(report.rows, report.columns, tablefmt=layout, disable_numparse=True)


def performance_page(
    page: str, name: str, report: Report, *, command: str, machine: str, day: str, notes: Sequence[str]
) -> str:
    """docs/performance.md with one section written anew, Markdown.

    Args:
        page: As it was; empty where there is none.
        name: One of `SECTIONS`.
        report: What was measured.
        command: That measures it again.
        machine: In words.
        day: As YYYY-MM-DD.
        notes: What the reader must know of this run.
    """
    kept = {section: _section(page, section) for section in SECTIONS}
    bullets = "".join(f"- {method}\n" for method in report.methods)
    noted = "".join(f"- {note}\n" for note in notes)
    facts = "".join(f"\n{fact}\n" for fact in report.facts)
    kept[name] = (
        f"## {report.title}\n\n"
        f"Written by `{command}` on {day}; the same command measures it again. Machine: {machine}.\n\n"
        f"{report_table(report, 'github')}\n{facts}\n"
        f"How it is measured:\n\n{bullets}" + (f"\nOf this run:\n\n{noted}" if notes else "")
    )
    blocks = (_marked(section, text) for section, text in kept.items() if text)
    return PERFORMANCE_HEAD + "".join(f"\n{block}" for block in blocks)


def _marked(section: str, text: str) -> str:
    return f"<!-- {section} -->\n{text}<!-- end of {section} -->\n"


def _section(page: str, section: str) -> str:
    found = re.search(f"<!-- {section} -->\n(.*?)<!-- end of {section} -->", page, re.DOTALL)
    return found[1] if found else ""
