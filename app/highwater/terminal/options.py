"""What the commands that call a sidecar share on their command lines: its URL, and how their help shows examples.

Nothing but click is loaded here: `highwater healthcheck` runs often, beside a sidecar that serves traffic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import click

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_URL: Final = "http://127.0.0.1:8001"
URL_VARIABLE: Final = "HIGHWATER_URL"
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
engine_option: Final = click.option(
    "--engine-url", metavar="URL", help="ask vLLM itself at this URL: no sidecar need run; what needs one is said"
)
json_option: Final = click.option("--json", "as_json", is_flag=True, help="as JSON")


def examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
