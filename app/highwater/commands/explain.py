"""``highwater explain``: why the memory of a running engine is as it is, and what moved between two starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from highwater.client.options import examples, json_option, sidecar_at, url_option
from highwater.exit_codes import FAILED
from highwater.readings.schema import SCHEMA

if TYPE_CHECKING:
    from rich.console import Console

    from highwater.diagnose.budget import Explained
    from highwater.plan.budget import RankBudget

PATH: Final = "/memory/budget"
# Of the bar, by the parts' keys; the same meaning has the same colour as on the dashboard.
_COLOURS: Final = {
    "weights": "blue",
    "process": "magenta",
    "persistent": "cyan",
    "consumed": "cyan",
    "activation": "yellow",
    "non_torch": "magenta",
    "graphs": "bright_blue",
    "profiled": "yellow",
    "mm_ipc": "bright_yellow",
    "rescaled": "bright_yellow",
    "kv_cache": "green",
    "unexplained": "red",
}
_MIN_BAR, _MAX_BAR = 40, 120
# Characters of one text: the paragraph to paste has some thousands.
_MAX_TEXT: Final = 20_000


@click.command(
    epilog=examples(
        "highwater explain",
        "highwater explain --json > before.json      keep this start, then restart with other flags",
        "highwater explain --against before.json     what moved",
    )
)
@url_option
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="compares with another start: a file that `highwater explain --json` wrote",
)
@json_option
def explain(url: str, against: Path | None, *, as_json: bool) -> None:
    """Show why the memory is as it is: the start's budget rank by rank, the KV cache, the encoder.

    A bar of the tightest rank with its budget line, tables that add up to the byte, what this version of vLLM counts
    nowhere, and a paragraph to paste. Exits with 1 where no rank's start is known.
    """
    with sidecar_at(url) as sidecar:
        answer = sidecar.get(PATH)
    after = _parsed(answer, url)
    before = None if against is None else _read(against)
    if as_json and before is None:
        click.echo(json.dumps(answer, indent=2))
    elif before is not None:
        _compare(before, after, as_json=as_json)
    else:
        _show(after)
    if not after.explanation.ranks:
        raise click.exceptions.Exit(FAILED)


def _read(path: Path) -> Explained:
    from highwater.plan.measured import read_answer
    from kvplan.errors import PlanError

    try:
        return _parsed(read_answer(path), str(path))
    except PlanError as exc:
        raise click.ClickException(str(exc)) from exc


def _parsed(answer: Any, where: str) -> Explained:  # noqa: ANN401 - JSON
    from pydantic import TypeAdapter, ValidationError

    from highwater.diagnose.budget import Explained
    from highwater.flaws import flaw
    from highwater.text.printable import cleaned

    try:
        return TypeAdapter(Explained).validate_python(cleaned(answer, most=_MAX_TEXT))
    except ValidationError as exc:
        flaws = flaw(exc.errors(include_url=False, include_input=False))
        raise click.ClickException(f"{where}: no explanation that this version understands: {flaws}") from exc


def _compare(before: Explained, after: Explained, *, as_json: bool) -> None:
    from highwater.api.budget_text import comparison, comparison_text

    if as_json:
        names = ("what", "before", "after", "by")
        rows = [dict(zip(names, row, strict=True)) for row in comparison(before, after)]
        click.echo(json.dumps({"schema": SCHEMA, "moved": rows}, indent=2))
    else:
        click.echo(comparison_text(before, after), nl=False)


def _show(answer: Explained) -> None:
    from rich.console import Console

    from highwater.api.budget_text import budget_text
    from highwater.plan.explanation import tightest

    console = Console(highlight=False)
    rank = tightest(answer.explanation.ranks)
    has_colours = console.color_system is not None and not console.no_color
    if has_colours and rank is not None and rank.parts:
        _draw(console, rank)
    click.echo(budget_text(answer, with_bar=not has_colours), nl=False)


def _draw(console: Console, rank: RankBudget) -> None:
    from rich.text import Text

    from highwater.api.budget_text import bar_segments
    from highwater.units import gib_text

    segments = bar_segments(rank, max(_MIN_BAR, min(console.width - 2, _MAX_BAR)))
    bar, legend, inside = Text(), Text(), 0
    for key, cells in segments:
        style = _COLOURS.get(key, "bright_black")
        bar.append(("█" if key != "outside" else "░") * cells, style)
        inside += cells if key != "outside" else 0
        part = rank.part(key)
        title, size = ("outside the budget", rank.outside_bytes) if part is None else (part.title, part.bytes)
        legend.append("■ ", style).append(f"{title} {gib_text(size)}   ")
    if rank.requested_bytes is not None:
        console.print(Text(f"{'budget ' + gib_text(rank.requested_bytes) + ' ▼':>{inside}}"))
    console.print(bar, no_wrap=True, overflow="crop")
    console.print(legend)
    console.print()
