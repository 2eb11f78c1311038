"""How a command asks a sidecar and shows the answer, and how it ends where none answers.

The token comes from the environment or from the sidecar's own file, and is no flag: a command line can be read by every
user of a machine. What reads sends none: it cannot leak.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import click

from highwater.process.admin_token import FoundToken, find_token
from highwater.process.errors import NO_SIDECAR, SettingsError, SidecarError, SidecarUnreachable
from highwater.process.untrusted import printable
from highwater.terminal.client import Answer, SidecarClient, report_of

# For reading; remedies may have to wait for running requests.
ASK_SECONDS = 8.0
# What `status` and `check` ask of an engine that has no sidecar.
ALONE_PATHS: Final = ("/memory", "/memory/events", "/memory/findings")
_JSON: Final = "application/json"
_TEXTS: Final = ("text/", "application/openmetrics-text")


class NoSidecar(click.ClickException):
    exit_code = NO_SIDECAR


@contextmanager
def sidecar_at(url: str, *, timeout_seconds: float | None = None, with_token: bool = False) -> Iterator[SidecarClient]:
    """Connect to the sidecar; an error ends the command with one line and an exit status."""
    seconds = ASK_SECONDS if timeout_seconds is None else timeout_seconds
    found = find_token(url, os.environ) if with_token else FoundToken(None, "")
    with (
        ending_well(),
        SidecarClient(url, token=found.value, token_source=found.source, timeout_seconds=seconds) as sidecar,
    ):
        yield sidecar


class Asked(Protocol):
    """A sidecar, or what one would answer."""

    @property
    def url(self) -> str: ...
    def get(self, path: str, params: Mapping[str, str] | None = None) -> Any: ...  # noqa: ANN401 - JSON


@contextmanager
def asked_at(url: str, engine_url: str | None) -> Iterator[Asked]:
    """Ask the sidecar, or the engine itself by the parts that a sidecar has, in this process; ends as `sidecar_at`."""
    if engine_url is None:
        with sidecar_at(url) as sidecar:
            yield sidecar
        return
    from highwater.server.main import read_once
    from highwater.server.settings import load

    try:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HIGHWATER_ADMIN_TOKEN")}
        settings = load({"engine_url": engine_url, "proxy.enabled": "false"}, environ=environ)
    except SettingsError as exc:
        raise click.UsageError("; ".join(exc.problems)) from exc
    logging.disable()  # the answer says it
    try:
        yield asyncio.run(read_once(settings, ALONE_PATHS))
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def control_of(url: str, *, timeout_seconds: float | None = None) -> Iterator[SidecarClient]:
    """Connect with the admin token, once a sidecar of this version has answered at ``url``; ends as `sidecar_at`."""
    with sidecar_at(url) as sidecar:  # before it gets the token, or a long call
        report_of(sidecar.get("/memory"))
    with sidecar_at(url, timeout_seconds=timeout_seconds, with_token=True) as sidecar:
        yield sidecar


@contextmanager
def ending_well() -> Iterator[None]:
    """End the command with one line and an exit status; raises click.ClickException where a sidecar fails within."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model's name may have letters that the terminal has not
    try:
        yield
    except SidecarUnreachable as exc:
        raise NoSidecar(str(exc)) from exc
    except SidecarError as exc:
        raise click.ClickException(str(exc)) from exc


def ask_and_show(
    sidecar: SidecarClient,
    path: str,
    *,
    method: str = "GET",
    params: Mapping[str, str] | None = None,
    body: Any = None,  # noqa: ANN401 - JSON
    as_json: bool,
) -> None:
    """Print the sidecar's own text, or its JSON, and end as it says; raises SidecarUnreachable where it says nothing.

    Raises click.exceptions.Exit with a status that is not 0.
    """
    accept = _JSON if as_json else "text/plain"
    answer = sidecar.ask(method, path, params=params, body=body, accept=accept)
    if answer.exit_status is None or answer.media_type != accept:
        what = "a web page" if "html" in answer.media_type else "what no sidecar of this version answers"
        raise SidecarUnreachable(f"{sidecar.url} answered {path} with {what}; upgrade the older one, or name another")
    print_answer(answer)
    if answer.exit_status:
        raise click.exceptions.Exit(answer.exit_status)


def print_answer(answer: Answer) -> None:
    """Print JSON indented, text without what a terminal would obey, and anything else into a file or a pipe only.

    Raises click.ClickException for what is no JSON though it says so, and for bytes at a terminal.
    """
    if answer.media_type == _JSON:
        try:
            click.echo(json.dumps(json.loads(answer.content), indent=1))
        except (ValueError, RecursionError) as exc:
            raise click.ClickException("the answer says that it is JSON, and is not") from exc
    elif answer.media_type.startswith(_TEXTS):
        text = printable(answer.content.decode(errors="replace"), keep="\n\t")
        click.echo(text, nl=not answer.content.endswith(b"\n"))
    elif sys.stdout.isatty():
        what = answer.media_type or "no type"
        raise click.ClickException(f"it is {len(answer.content):,} bytes of {what}: send them into a file")
    else:
        sys.stdout.buffer.write(answer.content)
