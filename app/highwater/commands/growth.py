"""``highwater growth``: the verdict on every series of memory, with rates of leaks and when they fill it."""

from __future__ import annotations

import json

import click

from highwater.client.options import examples, json_option, sidecar_at, url_option
from highwater.exit_codes import ATTENTION


@click.command(
    epilog=examples(
        "highwater growth",
        "highwater growth --json | jq '.series[] | select(.verdict == \"leak\")'",
        "highwater growth --series 'EngineCore anonymous_bytes' --json     with the data behind its verdict",
    )
)
@url_option
@click.option("--series", metavar="NAME", help="one series alone, with the idle floors behind its verdict")
@json_option
def growth(url: str, series: str | None, *, as_json: bool) -> None:
    """Show what grows between requests: a verdict on every series of memory.

    Flat, plateau, step, leak (with its rate, what drives it and when the memory is used up) or not known (with what
    would settle it). Exits with 1 where something leaks.
    """
    from pydantic import TypeAdapter

    from highwater.client.answers import understood
    from highwater.readings.growth import SeriesGrowth
    from highwater.text.growth import growth_table, leaks
    from highwater.text.printable import cleaned

    with sidecar_at(url) as sidecar:
        answer = sidecar.get("/memory/growth", {} if series is None else {"series": series})
        with understood("/memory/growth"):
            verdicts = TypeAdapter(tuple[SeriesGrowth, ...]).validate_python(cleaned(answer["series"]))
            causes = TypeAdapter(tuple[str, ...]).validate_python(cleaned(answer.get("causes", ())))
    click.echo(json.dumps(answer, indent=1) if as_json else growth_table(verdicts, causes), nl=as_json)
    if any(not one.is_over for one in leaks(verdicts)):
        raise click.exceptions.Exit(ATTENTION)
