"""`python -m bench`: measure, print, and write the figures of docs/: figures, performance and relief."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import click

from bench import idle, recorder_cost, relief, scrape, throughput, watching, worker_cost
from bench.dataplane import measure as data_plane
from bench.dataplane.report import Report
from bench.figure import Figure
from bench.machine import busy_seconds, description
from bench.page import figures_page, figures_table, report_table, with_block, with_section
from bench.stage import Stage
from highwater.demo.environment import DEFAULT_VERSION
from highwater.demo.errors import DemoError

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Of other processes, in cores: from here on a reader must know.
DISTURBED_CORES = 0.2

DATA_PLANE, RELIEF = "data-plane", "relief"
Result: TypeAlias = list[Figure] | Report
Measure: TypeAlias = Callable[..., Result]
# Those that need no engine come first, while there is none; those that fill the engine's cache last, and of them the
# one that puts a dict of ours in its place.
BENCHES: Mapping[str, Measure] = {
    DATA_PLANE: data_plane.measure,
    "scrape": scrape.measure,
    "idle": idle.measure,
    "watching": watching.measure,
    "throughput": throughput.measure,
    "recorder-cost": recorder_cost.measure,
    "worker-cost": worker_cost.measure,
    RELIEF: relief.measure,
}
# Those that docs/figures.md shows; the others have pages of their own.
ON_PAGE = tuple(name for name in BENCHES if name not in {DATA_PLANE, RELIEF})


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--short", is_flag=True, help="Fewer rounds and shorter ones: a look, about a third of the time.")
@click.option(
    "--only",
    type=click.Choice(list(BENCHES)),
    multiple=True,
    help="Only these. docs/figures.md is written where all that it shows is measured, the figures in docs/relief.md "
    "where relief is run, the section of docs/performance.md where data-plane is.",
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
    if not no_docs:
        options = (" --short" if short else "") + "".join(f" --only {name}" for name in only)
        _write(results, disturbed, command=f".venv/bin/python -m bench{options}" if options else "make bench")


def _shown(result: Result) -> str:
    if isinstance(result, Report):
        return "\n".join((report_table(result, "simple"), *result.facts, *result.notes))
    return figures_table(result, "grid")


def _write(results: Mapping[str, Result], disturbed: Mapping[str, float], *, command: str) -> None:
    """Write docs/figures.md where all of it was measured, and the parts of other pages that were."""
    run = {"command": command, "day": datetime.now(UTC).date().isoformat()}
    machine = description(DEFAULT_VERSION)
    for name, result in results.items():
        if isinstance(result, Report):
            page, notes = DOCS / "performance.md", [*result.notes, *_notes({name: disturbed[name]})]
            page.write_text(with_section(page.read_text(), name, result, machine=description(None), notes=notes, **run))
        elif name == RELIEF:
            page, notes = DOCS / "relief.md", _notes({name: disturbed[name]})
            page.write_text(with_block(page.read_text(), result, machine=machine, notes=notes, **run))
    if set(results) >= set(ON_PAGE):
        listed = [figure for name in ON_PAGE for figure in results[name] if isinstance(figure, Figure)]
        notes = _notes({name: disturbed[name] for name in ON_PAGE})
        (DOCS / "figures.md").write_text(figures_page(listed, machine=machine, notes=notes, **run))


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
