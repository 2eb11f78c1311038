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
    from highwater.diagnose.budget import Explained

PATH: Final = "/memory/budget"
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

    from highwater.api.budget_text import bar_of, budget_text
    from highwater.commands.budget_bar import draw
    from highwater.plan.explanation import tightest

    rank = tightest(answer.explanation.ranks)
    drawn = rank is not None and draw(Console(highlight=False), bar_of(rank))
    click.echo(budget_text(answer, with_bar=not drawn), nl=False)
