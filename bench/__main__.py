"""`python -m bench`: measure, print, and write the figures of docs/figures.md and docs/relief.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import click

from bench import door, idle, recorder_cost, relief, scrape, throughput, watching, worker_cost
from bench.dataplane import measure as data_plane
from bench.dataplane.report import Report
from bench.figure import Figure
from bench.machine import busy_seconds, description
from bench.page import figures_table, report_table, with_figures, with_section
from bench.stage import Stage
from highwater.terminal.demo.engine import DEFAULT_VERSION
from highwater.terminal.demo.process import DemoError

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
    "door": door.measure,
    "scrape": scrape.measure,
    "idle": idle.measure,
    "watching": watching.measure,
    "throughput": throughput.measure,
    "recorder-cost": recorder_cost.measure,
    "worker-cost": worker_cost.measure,
    RELIEF: relief.measure,
}
# The others are on docs/figures.md.
PAGES: Mapping[str, str] = {RELIEF: "relief.md"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--short", is_flag=True, help="Fewer rounds and shorter ones: a look, about a third of the time.")
@click.option(
    "--only",
    type=click.Choice(list(BENCHES)),
    multiple=True,
    help="Only these: their blocks of docs/figures.md and docs/relief.md are written anew.",
)
@click.option("--no-docs", is_flag=True, help="Print only.")
def main(*, short: bool, only: tuple[str, ...], no_docs: bool) -> None:
    """Measure the figures of docs/figures.md and docs/relief.md on this machine."""
    try:
        _run(short=short, only=only, no_docs=no_docs)
    except DemoError as exc:
        raise click.ClickException(str(exc)) from exc


def _run(*, short: bool, only: tuple[str, ...], no_docs: bool) -> None:
    with Stage() as stage:
        for name in only or BENCHES:
            print(f"{name} ...", flush=True)
            began, others = time.monotonic(), busy_seconds() - stage.cpu_seconds()
            result = BENCHES[name](stage, short=short)
            seconds = time.monotonic() - began
            cores = (busy_seconds() - stage.cpu_seconds() - others) / seconds
            print(f"{_shown(result)}\n{seconds:.0f} s; others took {cores:.1f} cores\n")
            if not no_docs:
                _write(name, result, cores, short=short)


def _shown(result: Result) -> str:
    if isinstance(result, Report):
        return "\n".join((report_table(result, "simple"), *result.facts, *result.notes))
    return figures_table(result, "grid")


def _write(name: str, result: Result, other_cores: float, *, short: bool) -> None:
    """Write what was measured into the page that shows it, with the command that measures it again."""
    day, notes = datetime.now(UTC).date().isoformat(), _notes(other_cores)
    command = f".venv/bin/python -m bench{' --short' if short else ''} --only {name}"
    page = DOCS / PAGES.get(name, "figures.md")
    text = page.read_text()
    if isinstance(result, Report):
        machine, notes = description(None), [*result.notes, *notes]
        text = with_section(text, name, result, command=command, machine=machine, day=day, notes=notes)
    else:
        machine = description(DEFAULT_VERSION)
        text = with_figures(text, name, result, command=command, machine=machine, day=day, notes=notes)
    page.write_text(text)


def _notes(cores: float) -> list[str]:
    if cores < DISTURBED_CORES:
        return []
    return [f"Other processes took {cores:.1f} cores meanwhile: times are too long, and rates too low."]


if __name__ == "__main__":
    main()
