"""`python -m bench`: measure, print, and write docs/figures.md and the figures in docs/relief.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import click

from app.demo.environment import ensure_environment
from app.demo.errors import DemoError
from bench import idle, reaction, relief, scrape, throughput, worker_cost
from bench.figure import Figure
from bench.machine import busy_seconds, description
from bench.page import figures_page, figures_table, with_block
from bench.stage import Stage

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "figures.md"
RELIEF_PAGE = DOCS / "relief.md"
# Of other processes, in cores: from here on a reader must know.
DISTURBED_CORES = 0.2

RELIEF = "relief"
Measure: TypeAlias = Callable[..., list[Figure]]
# The one that needs no engine comes first, while there is none; those that fill the engine's cache last, and of them
# the one that puts a dict of ours in its place.
BENCHES: Mapping[str, Measure] = {
    "scrape": scrape.measure,
    "idle": idle.measure,
    "throughput": throughput.measure,
    "reaction": reaction.measure,
    "worker-cost": worker_cost.measure,
    RELIEF: relief.measure,
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--short", is_flag=True, help="Fewer rounds and shorter ones: a look, about a third of the time.")
@click.option(
    "--only",
    type=click.Choice(list(BENCHES)),
    multiple=True,
    help="Only these; docs/figures.md stays as it is. The figures in docs/relief.md are written where relief is run.",
)
def main(*, short: bool, only: tuple[str, ...]) -> None:
    """Measure the figures of docs/figures.md and docs/relief.md on this machine."""
    try:
        _run(short=short, only=only)
    except DemoError as exc:
        raise click.ClickException(str(exc)) from exc


def _run(*, short: bool, only: tuple[str, ...]) -> None:
    environment = ensure_environment(announce=click.echo)
    figures: dict[str, list[Figure]] = {}
    disturbed: dict[str, float] = {}
    with Stage(environment) as stage:
        for name in only or BENCHES:
            print(f"{name} ...", flush=True)
            began, others = time.monotonic(), busy_seconds() - stage.cpu_seconds()
            figures[name] = BENCHES[name](stage, short=short)
            seconds = time.monotonic() - began
            disturbed[name] = (busy_seconds() - stage.cpu_seconds() - others) / seconds
            taken = f"{seconds:.0f} s; others took {disturbed[name]:.1f} cores"
            print(f"{figures_table(figures[name], 'grid')}\n{taken}\n")
    print(figures_table([figure for found in figures.values() for figure in found], "grid"))
    _write(figures, disturbed, version=environment.version, short=short, only=only)


def _write(
    figures: Mapping[str, list[Figure]],
    disturbed: Mapping[str, float],
    *,
    version: str,
    short: bool,
    only: tuple[str, ...],
) -> None:
    """Docs/figures.md where everything was measured; relief's have a page of their own."""
    machine, day = description(version), datetime.now(UTC).date().isoformat()
    options = (" --short" if short else "") + "".join(f" --only {name}" for name in only)
    command = f".venv/bin/python -m bench{options}" if options else "make bench"
    if RELIEF in figures:
        page = RELIEF_PAGE.read_text(encoding="utf-8")
        notes = _notes({RELIEF: disturbed[RELIEF]})
        page = with_block(page, figures[RELIEF], command=command, machine=machine, day=day, notes=notes)
        RELIEF_PAGE.write_text(page, encoding="utf-8")
    if not only:
        rest = [figure for name, found in figures.items() if name != RELIEF for figure in found]
        notes = _notes({name: cores for name, cores in disturbed.items() if name != RELIEF})
        PAGE.write_text(figures_page(rest, command=command, machine=machine, day=day, notes=notes), encoding="utf-8")


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
