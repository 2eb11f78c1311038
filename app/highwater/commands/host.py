"""``highwater host``: the pod's memory by process and kind."""

from __future__ import annotations

import json

import click

from highwater.client.options import examples, json_option, sidecar_at, url_option
from highwater.exit_codes import ATTENTION


@click.command(
    epilog=examples(
        "highwater host",
        "highwater host --json | jq '.parts.rows[:5]'      the five largest parts",
    ),
)
@url_option
@json_option
def host(url: str, *, as_json: bool) -> None:
    """Show who has the host memory: API servers, EngineCore, workers, /dev/shm, page cache, the kernel.

    The parts sum to what the kernel counts for the engine's container. Exits with 1 where something is wrong.
    """
    from pydantic import TypeAdapter

    from highwater.client.answers import understood
    from highwater.host.report import HostReport
    from highwater.host.text import host_text
    from highwater.text.printable import cleaned

    with sidecar_at(url) as sidecar:
        answer = sidecar.get("/memory/host")
        with understood("/memory/host"):
            report = TypeAdapter(HostReport).validate_python(cleaned(answer))
    click.echo(json.dumps(answer, indent=2) if as_json else host_text(report), nl=as_json)
    if any(one.level == "warning" for one in report.findings):
        raise click.exceptions.Exit(ATTENTION)
