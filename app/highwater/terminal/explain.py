"""``highwater explain``: why the memory of a running engine is as it is, and what moved between two starts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from pydantic import TypeAdapter, ValidationError

from highwater.diagnose.rules.book import Explained
from highwater.explain.beside import ask_beside, beside, beside_text, card_name, is_command, why_not
from highwater.explain.command_line import read_line
from highwater.explain.roads import VllmRoad, engine_here, read_object
from highwater.http.text.budget import comparison, comparison_text
from highwater.model.report import SCHEMA
from highwater.process.errors import FAILED
from highwater.process.untrusted import cleaned, flaw
from highwater.terminal.asking import ask_and_show, sidecar_at
from highwater.terminal.cli import examples, json_option, url_option
from kvplan import PlanError

PATH: Final = "/memory/budget"
# Characters of one text: the paragraph to paste has some thousands.
_MAX_TEXT: Final = 20_000
_MAX_FILE_BYTES: Final = 20_000_000
_EXPLAINED: Final = TypeAdapter(Explained)


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
        if against is None:
            ask_and_show(sidecar, PATH, as_json=as_json)
            return
        after = _parsed(sidecar.get(PATH), url)
    try:
        shown, text = _compared(after, against, engine_python)
    except PlanError as exc:
        raise click.ClickException(str(exc)) from exc
    click.echo(json.dumps({"schema": SCHEMA, **shown}, indent=2) if as_json else text, nl=as_json)
    if not after.explanation.ranks:
        raise click.exceptions.Exit(FAILED)


def _compared(after: Explained, against: str, engine_python: str | None) -> tuple[dict[str, Any], str]:
    """Return the comparison for programs and as text. Raises PlanError: there is nothing to compare with, or to ask."""
    now = after.explanation
    if not is_command(against):
        file = read_object(Path(against), _MAX_FILE_BYTES, "a file of `highwater explain --json`")
        before, names = _parsed(file, against), ("what", "before", "after", "by")
        moved = [dict(zip(names, row, strict=True)) for row in comparison(before, after)]
        return {"moved": moved}, comparison_text(before, after)

    def say(words: str) -> None:
        click.echo(words, err=True)

    python, card, line = engine_python or engine_here(), card_name(now), read_line([against])
    if python is None:
        raise PlanError("no vLLM can be imported here; --engine-python PATH names a Python that has one")
    if card is None:
        say("this engine's card is not in the table of cards; what depends on its kind is an H100's")
    with VllmRoad(python, card or "H100", say) as road:
        found = ask_beside(now, lambda total, measured: road.ask(line, device_bytes=total, measured=measured))
    if (why := why_not(found)) is not None:
        raise PlanError(why)
    rows = [asdict(row) for row in beside(now, found)]
    return {"command_line": against, "beside": rows, "answer": found}, beside_text(now, found)


def _parsed(answer: Any, where: str) -> Explained:  # noqa: ANN401 - JSON
    try:
        return _EXPLAINED.validate_python(cleaned(answer, most=_MAX_TEXT))
    except ValidationError as exc:
        flaws = flaw(exc.errors(include_url=False, include_input=False))
        raise click.ClickException(f"{where}: no explanation that this version understands: {flaws}") from exc
