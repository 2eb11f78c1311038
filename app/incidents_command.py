"""``highwater incidents``: what the engine died of, asked of a sidecar or read from its files."""

from __future__ import annotations

import json
import ssl
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

if TYPE_CHECKING:
    import httpx

CALL_SECONDS = 30.0


@click.command("incidents")
@click.argument("incident_id", metavar="[ID]", required=False)
@click.option("--url", default="http://127.0.0.1:8001", show_default=True, help="the sidecar")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="read the files of incidents.folder, where no sidecar lives",
)
@click.option("--json", "as_json", is_flag=True, help="as JSON")
def incidents(incident_id: str | None, url: str, folder: Path | None, as_json: bool) -> None:
    """What the engine died of: list the incidents, newest first, or show the one with this ID."""
    if folder is not None:
        shown = _from_folder(folder, incident_id, as_json=as_json)
    else:
        shown = _from_sidecar(url, incident_id, as_json=as_json)
    # A terminal obeys control characters, whoever sent them.
    click.echo("".join(letter for letter in shown if letter.isprintable() or letter == "\n").rstrip("\n"))


def _from_folder(folder: Path, incident_id: str | None, *, as_json: bool) -> str:
    # Here and not at the top, as below: `highwater --help` must not load what it does not need.
    from app.incidents import IncidentStore, Unreadable  # noqa: PLC0415
    from app.incidents.fitting import to_bytes  # noqa: PLC0415
    from app.incidents.text import headlines_text, incident_text  # noqa: PLC0415

    store = IncidentStore(folder)
    if incident_id is None:
        headlines = store.headlines()
        if as_json:
            listed = [asdict(headline) for headline in headlines]
            return json.dumps({"schema": 1, "incidents": listed, "folder": str(folder), "problem": None}, indent=1)
        return headlines_text(headlines)
    try:
        incident = store.read(incident_id)
    except Unreadable as exc:
        raise click.ClickException(str(exc)) from exc
    if incident is None:
        raise click.ClickException(f"there is no incident {incident_id} in {folder}")
    return to_bytes(incident).decode() if as_json else incident_text(incident)


def _from_sidecar(url: str, incident_id: str | None, *, as_json: bool) -> str:
    import httpx  # noqa: PLC0415

    target = f"{url.rstrip('/')}/memory/incidents"
    if incident_id is not None:
        target += f"/{quote(incident_id, safe='')}"
    try:
        # The system's authorities, and those that SSL_CERT_FILE names.
        with httpx.Client(verify=ssl.create_default_context(), trust_env=False, timeout=CALL_SECONDS) as client:
            answer = client.get(target, params={"format": "json" if as_json else "text"})
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise click.ClickException(
            f"no sidecar answers at {url} ({exc}); --url names another, --folder reads the files without one"
        ) from exc
    if answer.is_error:
        raise click.ClickException(_problem(answer))
    return answer.text


def _problem(answer: httpx.Response) -> str:
    try:
        body: Any = answer.json()
        return str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answered {answer.status_code}; is that a sidecar of this version?"
