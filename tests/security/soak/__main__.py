"""Run the soak, print its figures, and write JSON and docs/figures.md; the exit status is 1 if a goal is missed."""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import click

from bench.machine import description
from bench.page import figures_table
from highwater.terminal.demo.process import DemoError
from tests.security.soak.attackers import ATTACKS
from tests.security.soak.page import document, facts, figures, with_run
from tests.security.soak.sidecar import ROOT
from tests.security.soak.soak import Options, run

PAGE = ROOT / "docs" / "figures.md"
ALL_CLIENTS = 200


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--minutes", default=30.0, show_default=True, type=click.FloatRange(min=0.5))
@click.option("--clients", default=ALL_CLIENTS, show_default=True, type=click.IntRange(1, 1000), help="ordinary ones")
@click.option("--seed", default=1, show_default=True, help="of lengths, pauses and attacks")
@click.option(
    "--attack", "attacks", multiple=True, type=click.Choice([attack.name for attack in ATTACKS]), help="only these"
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="write what was found there")
@click.option("--no-docs", is_flag=True, help="leave docs/figures.md as it is")
def main(
    *, minutes: float, clients: int, seed: int, attacks: tuple[str, ...], json_path: Path | None, no_docs: bool
) -> None:
    """Run ordinary clients and attackers against one sidecar; the number of attackers follows that of the clients."""
    options = Options(seconds=60 * minutes, clients=clients, scale=clients / ALL_CLIENTS, seed=seed, attacks=attacks)
    try:
        with tempfile.TemporaryDirectory(prefix="highwater-soak-") as folder:
            measured = run(options, Path(folder))
    except DemoError as exc:
        raise click.ClickException(str(exc)) from exc
    machine, day = description(None), datetime.now(UTC).date().isoformat()
    found = figures(measured)
    print("\n".join((figures_table(list(found.values()), "grid"), *facts(measured), *measured.service.failures[:5])))
    if json_path is not None:
        found_json = document(options, measured, machine=machine, day=day)
        json_path.write_text(json.dumps(found_json, indent=1), encoding="utf-8")
    if not (no_docs or attacks):
        command = f"python -m tests.security.soak --minutes {minutes:g} --clients {clients} --seed {seed}"
        text = with_run(PAGE.read_text(), options, measured, command=command, machine=machine, day=day)
        PAGE.write_text(text, encoding="utf-8")
    if any(figure.goal is not None and not figure.goal.is_met(figure.value) for figure in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
