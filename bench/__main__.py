"""`python -m bench`: measure, print, and write the figures of docs/: figures, performance and relief."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import click

from app.demo.environment import DEFAULT_VERSION
from app.demo.errors import DemoError
from bench import idle, reaction, recorder_cost, recorder_readers, relief, scrape, throughput, worker_cost
from bench.dataplane import engine_proxy
from bench.dataplane import measure as data_plane
from bench.dataplane.report import Report
from bench.figure import Figure
from bench.machine import busy_seconds, description
from bench.page import figures_page, figures_table, report_table, with_block, with_section
from bench.stage import Stage

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "figures.md"
RELIEF_PAGE = DOCS / "relief.md"
PERFORMANCE_PAGE = DOCS / "performance.md"
# Of other processes, in cores: from here on a reader must know.
DISTURBED_CORES = 0.2

RELIEF = "relief"
Result: TypeAlias = list[Figure] | Report
Measure: TypeAlias = Callable[..., Result]
# Those that need no engine come first, while there is none; those that fill the engine's cache last, and of them the
# one that puts a dict of ours in its place. Those that return a report have their section in docs/performance.md.
WITHOUT_ENGINE: Mapping[str, Measure] = {
    "data-plane": data_plane.measure,
    "scrape": scrape.measure,
    "recorder-readers": recorder_readers.measure,
}
BENCHES: Mapping[str, Measure] = {
    **WITHOUT_ENGINE,
    "idle": idle.measure,
    "throughput": throughput.measure,
    "recorder-cost": recorder_cost.measure,
    "engine-proxy": engine_proxy.measure,
    "reaction": reaction.measure,
    "worker-cost": worker_cost.measure,
    RELIEF: relief.measure,
}
# Those that docs/figures.md shows; the others have pages of their own.
ON_PAGE = frozenset(BENCHES) - {"data-plane", "engine-proxy", RELIEF}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--short", is_flag=True, help="Fewer rounds and shorter ones: a look, about a third of the time.")
@click.option(
    "--only",
    type=click.Choice(list(BENCHES)),
    multiple=True,
    help="Only these. docs/figures.md is written where all that it shows is measured, the figures in docs/relief.md "
    "where relief is run, the sections of docs/performance.md where they are.",
)
@click.option("--no-docs", is_flag=True, help="Print only.")
def main(*, short: bool, only: tuple[str, ...], no_docs: bool) -> None:
    """Measure the figures of docs/figures.md, docs/performance.md and docs/relief.md on this machine."""
    try:
        _run(short=short, only=only, no_docs=no_docs)
    except DemoError as exc:
        raise click.ClickException(str(exc)) from exc


def _run(*, short: bool, only: tuple[str, ...], no_docs: bool) -> None:
    results: dict[str, Result] = {}
    disturbed: dict[str, float] = {}
    with Stage() as stage:
        for name in only or BENCHES:
            print(f"{name} ...", flush=True)
            began, others = time.monotonic(), busy_seconds() - stage.cpu_seconds()
            results[name] = BENCHES[name](stage, short=short)
            seconds = time.monotonic() - began
            disturbed[name] = (busy_seconds() - stage.cpu_seconds() - others) / seconds
            print(f"{_shown(results[name])}\n{seconds:.0f} s; others took {disturbed[name]:.1f} cores\n")
    figures = _figures(results)
    if figures:
        print(figures_table([figure for found in figures.values() for figure in found], "grid"))
    if not no_docs:
        _write(results, disturbed, short=short, only=only)


def _figures(results: Mapping[str, Result]) -> dict[str, list[Figure]]:
    return {name: found for name, found in results.items() if not isinstance(found, Report)}


def _shown(result: Result) -> str:
    if isinstance(result, Report):
        return "\n".join((report_table(result, "simple"), *result.facts, *result.notes))
    return figures_table(result, "grid")


def _write(
    results: Mapping[str, Result], disturbed: Mapping[str, float], *, short: bool, only: tuple[str, ...]
) -> None:
    """Docs/figures.md where all of it was measured; relief's figures and the reports have pages of their own."""
    day, figures = datetime.now(UTC).date().isoformat(), _figures(results)
    machine = description(DEFAULT_VERSION)
    options = (" --short" if short else "") + "".join(f" --only {name}" for name in only)
    command = f".venv/bin/python -m bench{options}" if options else "make bench"
    if RELIEF in figures:
        page = RELIEF_PAGE.read_text(encoding="utf-8")
        notes = _notes({RELIEF: disturbed[RELIEF]})
        page = with_block(page, figures[RELIEF], command=command, machine=machine, day=day, notes=notes)
        RELIEF_PAGE.write_text(page, encoding="utf-8")
    for name, report in results.items():
        if isinstance(report, Report):
            page = PERFORMANCE_PAGE.read_text(encoding="utf-8")
            of = description(None if name in WITHOUT_ENGINE else DEFAULT_VERSION)
            notes = [*report.notes, *_notes({name: disturbed[name]})]
            page = with_section(page, name, report, command=command, machine=of, day=day, notes=notes)
            PERFORMANCE_PAGE.write_text(page, encoding="utf-8")
    if set(results) >= ON_PAGE:
        rest = {name: found for name, found in figures.items() if name in ON_PAGE}
        notes = _notes({name: disturbed[name] for name in rest})
        listed = [figure for found in rest.values() for figure in found]
        PAGE.write_text(figures_page(listed, command=command, machine=machine, day=day, notes=notes), encoding="utf-8")


def _notes(disturbed: Mapping[str, float]) -> list[str]:
    busy = {name: cores for name, cores in disturbed.items() if cores >= DISTURBED_CORES}
    if not busy:
        return []
    listed = ", ".join(f"{name} {cores:.1f}" for name, cores in busy.items())
    return [
        "Other processes kept the machine busy: times are too long and rates too low. Cores that they took "
        f"meanwhile: {listed}."
    ]


if __name__ == "__main__":
    main()
