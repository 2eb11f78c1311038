"""``highwater get``: any path of the control plane, with the token, for runbooks without curl."""

from __future__ import annotations

import json
import sys

import click

from highwater.client.options import control_of, examples, url_option
from highwater.text.printable import printable

GET_SECONDS = 60.0
_TEXT = ("text/", "application/openmetrics-text")


@click.command(
    epilog=examples(
        "highwater get /memory/host",
        "highwater get '/memory?format=text'",
        "highwater get /metrics | grep highwater_engine_up",
        "highwater get /memory/snapshots/NAME > NAME",
    )
)
@click.argument("path")
@url_option
def get(path: str, url: str) -> None:
    """Print what the sidecar's control plane answers to GET PATH.

    JSON is indented; text loses what a terminal would obey; anything else is written as it is, into a file or a pipe.
    Exits with 0, with 1 if the sidecar refuses, 3 if no sidecar answers.
    """
    wanted = path if path.startswith("/") else f"/{path}"
    if not wanted.isascii() or not wanted.isprintable() or " " in wanted:
        raise click.UsageError("PATH has a letter that a URL cannot have; write it as %XX")
    with control_of(url, timeout_seconds=GET_SECONDS) as sidecar:
        media_type, content = sidecar.get_content(wanted)
    if media_type == "application/json":
        try:
            click.echo(json.dumps(json.loads(content), indent=1))
        except (ValueError, RecursionError) as exc:
            raise click.ClickException("the answer says that it is JSON, and is not") from exc
    elif media_type.startswith(_TEXT):
        click.echo(printable(content.decode(errors="replace"), keep="\n\t"), nl=not content.endswith(b"\n"))
    elif sys.stdout.isatty():
        raise click.ClickException(f"it is {len(content):,} bytes of {media_type or 'no type'}: send them into a file")
    else:
        sys.stdout.buffer.write(content)
