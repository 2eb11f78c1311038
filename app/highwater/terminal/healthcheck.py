"""``highwater healthcheck``: the health of the sidecar on this machine as an exit status.

For a container's HEALTHCHECK and for scripts. It runs often, beside a sidecar that serves traffic: it loads no server
and no HTTP client but the standard library's, and sends no token.
"""

from __future__ import annotations

import os
import ssl
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection, InvalidURL
from typing import Final
from urllib.parse import urlsplit

import click

from highwater.process.errors import FAILED
from highwater.process.untrusted import plain, without_credentials
from highwater.terminal.cli import examples, own_url, url_option_of

PATHS: Final = {"live": "/livez", "ready": "/readyz", "deep": "/health/deep"}
_SHOWN_LENGTH: Final = 400
_NO_URL: Final = "it is not a URL such as http://127.0.0.1:8001"


@click.command(
    epilog=examples(
        "highwater healthcheck                the sidecar itself",
        "highwater healthcheck ready          would a request be served now",
        "highwater healthcheck deep           the engine: for vLLM's own container",
    )
)
@click.argument("what", type=click.Choice(list(PATHS)), default="live")
@url_option_of("the sidecar")
@click.option("--timeout", "seconds", default=5.0, show_default=True, type=click.FloatRange(0.1, 600))
def healthcheck(what: str, url: str, seconds: float) -> None:
    """Check the sidecar's health: exits with 0 if all is well, with 1 if not, or if no sidecar answers."""
    problem = ask(url or own_url(os.environ), PATHS[what], seconds)
    if problem is not None:
        click.echo(f"highwater: {plain(problem)}", err=True)
        raise click.exceptions.Exit(FAILED)  # Docker knows two statuses of a health check


def ask(base: str, path: str, seconds: float) -> str | None:
    """Return what is wrong where ``path`` is not a 200; ``seconds`` are for connecting, and for each piece."""
    try:
        parts = urlsplit(base)
        connection = HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)
        if parts.scheme == "https":
            # The certificate is for the name that clients use, and this is its own machine: nothing secret is sent, and
            # only a status is read.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = HTTPSConnection(parts.hostname or "", parts.port, timeout=seconds, context=context)
        elif parts.scheme != "http":
            return f"no sidecar answers at {without_credentials(base)}: {_NO_URL}"
        try:
            connection.request("GET", f"{parts.path.rstrip('/')}{path}")
            answer = connection.getresponse()
            text = answer.read(_SHOWN_LENGTH).decode("utf-8", "replace")
        finally:
            connection.close()
    except (ValueError, InvalidURL):  # its text quotes the URL, which may hold a password
        return f"no sidecar answers at {without_credentials(base)}: {_NO_URL}"
    except (OSError, HTTPException) as exc:
        return f"no sidecar answers at {without_credentials(base)}: {exc or type(exc).__name__}"
    return (
        None
        if answer.status == HTTPStatus.OK
        else f"{without_credentials(base)}{path} answered {answer.status}: {text}"
    )
