"""Options of the commands that call a sidecar: its URL, and how they end without it.

The token comes from the environment or from the sidecar's own file, and is no flag: a command line can be read by every
user of a machine.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import click

from highwater.errors import SidecarError, SidecarUnreachable
from highwater.exit_codes import NO_SIDECAR
from highwater.files.admin_token import FoundToken, find_token

if TYPE_CHECKING:
    from highwater.client.sidecar import SidecarClient

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_URL: Final = "http://127.0.0.1:8001"
URL_VARIABLE: Final = "HIGHWATER_URL"
# For reading; remedies may have to wait for running requests.
ASK_SECONDS = 8.0

# Where a sidecar with this environment serves its control plane; the first that is set. Kubernetes writes tcp://...
# into variables of these names, for Services called highwater and highwater-control.
PORT_VARIABLES: Final = ("HIGHWATER_CONTROL_PORT", "HIGHWATER_PORT")
_EVERYWHERE: Final = {"", "0.0.0.0", "::"}  # noqa: S104 - compared with, not bound to


def own_port(environ: Mapping[str, str]) -> int:
    given = (environ.get(name, "") for name in PORT_VARIABLES)
    return next((int(port) for port in given if port.isdecimal()), urlsplit(DEFAULT_URL).port or 0)


def own_url(environ: Mapping[str, str]) -> str:
    """Return where a sidecar with these environment variables serves its control plane, as seen from its machine."""
    host = environ.get("HIGHWATER_HOST", "")
    scheme = "https" if environ.get("HIGHWATER_TLS__CERT_FILE") else "http"
    name = str(urlsplit(DEFAULT_URL).hostname) if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{own_port(environ)}"


def url_option_of(text: str) -> Callable[[Command], Command]:
    return click.option(
        "--url",
        envvar=URL_VARIABLE,
        default=lambda: own_url(os.environ),
        show_default="the port that HIGHWATER_CONTROL_PORT or HIGHWATER_PORT names on this machine, else 8001",
        show_envvar=True,
        metavar="URL",
        help=text,
    )


url_option: Final = url_option_of("the sidecar; its admin token is found as `highwater token` finds it")
json_option: Final = click.option("--json", "as_json", is_flag=True, help="as JSON")


class NoSidecar(click.ClickException):
    exit_code = NO_SIDECAR


@contextmanager
def sidecar_at(url: str, *, timeout_seconds: float | None = None, with_token: bool = False) -> Iterator[SidecarClient]:
    """Connect to the sidecar; an error ends the command with one line. What reads sends no token: it cannot leak."""
    from highwater.client.sidecar import SidecarClient

    seconds = ASK_SECONDS if timeout_seconds is None else timeout_seconds
    found = find_token(url, os.environ) if with_token else FoundToken(None, "")
    with (
        ending_well(),
        SidecarClient(url, token=found.value, token_source=found.source, timeout_seconds=seconds) as sidecar,
    ):
        yield sidecar


def check_there(url: str) -> None:
    """Make sure that a sidecar of this version responds before it gets the token or a long call; raises NoSidecar."""
    from highwater.client.answers import report_of

    with sidecar_at(url) as sidecar:
        report_of(sidecar.get("/memory"))


@contextmanager
def control_of(url: str, *, timeout_seconds: float | None = None) -> Iterator[SidecarClient]:
    """Connect with the admin token, once a sidecar of this version has answered at ``url``; ends as `sidecar_at`."""
    check_there(url)
    with sidecar_at(url, timeout_seconds=timeout_seconds, with_token=True) as sidecar:
        yield sidecar


def show(answer: Any, text: str, *, as_json: bool) -> None:  # noqa: ANN401 - JSON
    click.echo(json.dumps(answer, indent=1) if as_json else text)


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


def examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
