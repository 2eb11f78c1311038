"""`python -m bench`: measure, print, and write docs/figures.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import click

from app.demo.environment import ensure_environment
from app.demo.errors import DemoError
from bench import idle, reaction, scrape, throughput, worker_cost
from bench.figure import Figure
from bench.machine import busy_seconds, description
from bench.page import figures_page, figures_table
from bench.stage import Stage

PAGE = Path(__file__).resolve().parent.parent / "docs" / "figures.md"
# Of other processes, in cores: from here on a reader must know.
DISTURBED_CORES = 0.2

Measure: TypeAlias = Callable[..., list[Figure]]
# The one that needs no engine comes first, while there is none; the one that fills the engine's cache last.
BENCHES: Mapping[str, Measure] = {
    "scrape": scrape.measure,
    "idle": idle.measure,
    "throughput": throughput.measure,
    "reaction": reaction.measure,
    "worker-cost": worker_cost.measure,
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--short", is_flag=True, help="Fewer rounds and shorter ones: a look, about a third of the time.")
@click.option(
    "--only", type=click.Choice(list(BENCHES)), multiple=True, help="Only these; docs/figures.md stays as it is."
)
def main(*, short: bool, only: tuple[str, ...]) -> None:
    """Measure the figures of docs/figures.md on this machine."""
    try:
        _run(short=short, only=only)
    except DemoError as exc:
        raise click.ClickException(str(exc)) from exc


def _run(*, short: bool, only: tuple[str, ...]) -> None:
    environment = ensure_environment(announce=click.echo)
    figures: list[Figure] = []
    disturbed: dict[str, float] = {}
    with Stage(environment) as stage:
        for name in only or BENCHES:
            print(f"{name} ...", flush=True)
            began, others = time.monotonic(), busy_seconds() - stage.cpu_seconds()
            found = BENCHES[name](stage, short=short)
            seconds = time.monotonic() - began
            disturbed[name] = (busy_seconds() - stage.cpu_seconds() - others) / seconds
            figures += found
            print(f"{figures_table(found, 'grid')}\n{seconds:.0f} s; others took {disturbed[name]:.1f} cores\n")
    print(figures_table(figures, "grid"))
    if not only:
        PAGE.parent.mkdir(exist_ok=True)
        page = figures_page(
            figures,
            command="make bench" if not short else ".venv/bin/python -m bench --short",
            machine=description(environment.version),
            day=datetime.now(UTC).date().isoformat(),
            notes=_notes(disturbed),
        )
        PAGE.write_text(page, encoding="utf-8")


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
