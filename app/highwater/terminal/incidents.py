"""``highwater incidents``: why the engine died, from a sidecar or from its files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import quote

import click

from highwater.diagnose.incidents.store import IncidentStore, UnreadableIncident, listing, to_bytes
from highwater.http.text.incidents import headlines_text, incident_markdown
from highwater.process.untrusted import printable
from highwater.terminal.asking import NoSidecar, ask_and_show, sidecar_at
from highwater.terminal.options import examples, json_option, url_option


@click.command(
    "incidents",
    epilog=examples(
        "highwater incidents                                     newest first",
        "highwater incidents 20261121T143233Z-out-of-memory      one of them, as Markdown",
        "highwater incidents --folder /var/lib/highwater         the files, when no sidecar runs",
    ),
)
@click.argument("incident_id", metavar="[ID]", required=False)
@url_option
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="read the files of incidents.folder, when no sidecar is running",
)
@json_option
def incidents(incident_id: str | None, url: str, folder: Path | None, *, as_json: bool) -> None:
    """List the incidents, newest first, or show the one with this ID: what the engine died of.

    An ID keeps the kind that the incident began with: a hang that ended in the engine's death is listed as died.
    Exits with 0, with 1 if there is no such incident or it cannot be read, 2 for an invalid command line, 3 if no
    sidecar answers.
    """
    if folder is not None:
        # A terminal obeys control characters, whoever sent them.
        click.echo(printable(_from_folder(folder, incident_id, as_json=as_json), keep="\n").rstrip("\n"))
        return
    path = "/memory/incidents" if incident_id is None else f"/memory/incidents/{quote(incident_id, safe='')}"
    try:
        with sidecar_at(url) as sidecar:
            ask_and_show(sidecar, path, as_json=as_json)
    except NoSidecar as exc:
        raise NoSidecar(f"{exc.message}; --folder reads the files without one") from exc


def _from_folder(folder: Path, incident_id: str | None, *, as_json: bool) -> str:
    store = IncidentStore(folder)
    if incident_id is None:
        headlines, command = store.headlines(), f"highwater incidents --folder {shlex.quote(str(folder))}"
        if as_json:
            return json.dumps(listing(headlines, folder, None), indent=1)
        return headlines_text(headlines, command=command)
    try:
        incident = store.read(incident_id)
    except UnreadableIncident as exc:
        raise click.ClickException(str(exc)) from exc
    if incident is None:
        raise click.ClickException(
            f"there is no incident {incident_id} in {folder}; `highwater incidents --folder {folder}` lists them"
        )
    return to_bytes(incident).decode() if as_json else incident_markdown(incident)
