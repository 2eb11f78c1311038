"""``highwater explain``: why the memory of a running engine is as it is, and what moved between two starts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from highwater.client.options import examples, json_option, sidecar_at, url_option
from highwater.exit_codes import FAILED
from highwater.readings.schema import SCHEMA
from kvplan.errors import PlanError

if TYPE_CHECKING:
    from highwater.diagnose.budget import Explained
    from highwater.plan.beside import Answer

PATH: Final = "/memory/budget"
# Characters of one text: the paragraph to paste has some thousands.
_MAX_TEXT: Final = 20_000
_MAX_FILE_BYTES: Final = 20_000_000


@click.command(
    epilog=examples(
        "highwater explain",
        "highwater explain --json > before.json      keep this start, then restart with other flags",
        "highwater explain --against before.json     what moved",
        'highwater explain --against "vllm serve MODEL --max-num-seqs 64" --engine-python PATH',
    )
)
@url_option
@click.option(
    "--against",
    metavar="FILE|COMMAND",
    help="compares with another start: a file that `highwater explain --json` wrote, or a `vllm serve` command line"
    " that vLLM itself is asked about, for this engine's card",
)
@click.option("--engine-python", metavar="PATH", help="a Python that has the vLLM to ask  [default: this one]")
@json_option
def explain(url: str, against: str | None, engine_python: str | None, *, as_json: bool) -> None:
    """Show why the memory is as it is: the start's budget rank by rank, the KV cache, the encoder.

    A bar of the tightest rank with its budget line, tables that add up to the byte, what this version of vLLM counts
    nowhere, and a paragraph to paste. Exits with 1 where no rank's start is known.
    """
    with sidecar_at(url) as sidecar:
        answer = sidecar.get(PATH)
    after = _parsed(answer, url)
    try:
        if against is not None:
            _compare(after, against, engine_python, as_json=as_json)
        elif as_json:
            click.echo(json.dumps(answer, indent=2))
        else:
            _show(after)
    except PlanError as exc:
        raise click.ClickException(str(exc)) from exc
    if not after.explanation.ranks:
        raise click.exceptions.Exit(FAILED)


def _compare(after: Explained, against: str, engine_python: str | None, *, as_json: bool) -> None:
    from highwater.api.budget_text import comparison, comparison_text
    from highwater.plan.beside import beside, beside_text, is_command, why_not
    from highwater.plan.model_files import read_object

    if is_command(against):
        found = _asked(after, against, engine_python)
        if (why := why_not(found)) is not None:
            raise PlanError(why)
        rows = [asdict(row) for row in beside(after.explanation, found)]
        shown, text = {"command_line": against, "beside": rows, "answer": found}, beside_text(after.explanation, found)
    else:
        before = _parsed(read_object(Path(against), _MAX_FILE_BYTES, "a file of `highwater explain --json`"), against)
        names = ("what", "before", "after", "by")
        moved = [dict(zip(names, row, strict=True)) for row in comparison(before, after)]
        shown, text = {"moved": moved}, comparison_text(before, after)
    click.echo(json.dumps({"schema": SCHEMA, **shown}, indent=2) if as_json else text, nl=as_json)


def _asked(after: Explained, line: str, engine_python: str | None) -> Answer:
    """Return vLLM's answer to a command line for this engine's card. Raises PlanError: none can be asked."""
    from highwater.plan.beside import ask_beside, card_name
    from highwater.plan.command_line import read_line
    from highwater.plan.roads import VllmRoad, engine_here

    def say(words: str) -> None:
        click.echo(words, err=True)

    python, card, read = engine_python or engine_here(), card_name(after.explanation), read_line([line])
    if python is None:
        raise PlanError("no vLLM can be imported here; --engine-python PATH names a Python that has one")
    if card is None:
        say("this engine's card is not in the table of cards; what depends on its kind is an H100's")
    with VllmRoad(python, card or "H100", say) as road:
        return ask_beside(
            after.explanation, lambda total, measured: road.ask(read, device_bytes=total, measured=measured)
        )


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


def _show(answer: Explained) -> None:
    from rich.console import Console

    from highwater.api.budget_text import bar_of, budget_text
    from highwater.commands.budget_bar import draw
    from highwater.plan.explanation import tightest

    rank = tightest(answer.explanation.ranks)
    drawn = rank is not None and draw(Console(highlight=False), bar_of(rank))
    click.echo(budget_text(answer, with_bar=not drawn), nl=False)
