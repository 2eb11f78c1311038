"""The verbs: commands that send a sidecar one request, print its own text or JSON, and end with the status it names.

A verb is one call of ``verb``; `highwater get` is the general case, for any path. What a verb prints is rendered by the
sidecar (``http/text``), and which exit status that is, it says in a header: nothing is judged here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote

import click
from pydantic import ByteSize, TypeAdapter, ValidationError

from highwater.diagnose.incidents.store import IncidentStore, UnreadableIncident, listing, to_bytes
from highwater.http.text.incidents import headlines_text, incident_markdown
from highwater.model.remedies import TRAITS
from highwater.process.errors import SettingsError
from highwater.process.settings_file import MAX_BYTES, parse_yaml
from highwater.process.untrusted import printable
from highwater.terminal.asking import NoSidecar, ask_and_show, control_of, print_answer, sidecar_at
from highwater.terminal.cli import examples as examples_text
from highwater.terminal.cli import json_option, url_option

# What a verb waits for its answer. A remedy may have to wait until no request runs, outputs go back to the device in
# rounds, a snapshot is written while the engine is stopped, a policy before the sidecar answers.
RECLAIM_SECONDS: Final = 600.0
WORKER_SECONDS: Final = 300.0
MARK_SECONDS: Final = 60.0
CHANGE_SECONDS: Final = 30.0
GET_SECONDS: Final = 60.0
_TRIM: Final = "trim_encoder_cache"
_POLICY_FIELDS: Final = ("mode", "rules")
_Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


class Call(NamedTuple):
    """What goes with a verb's path, or in its place."""

    params: Mapping[str, str] | None = None
    body: Any = None
    path: str | None = None
    needs_token: bool = True  # where the verb does


def _as_parameters(**given: str | None) -> Call:
    return Call({name: value for name, value in given.items() if value is not None})


def _as_body(**given: object) -> Call:
    return Call(body=given or None)


def verb(
    name: str,
    path: str,
    *,
    help: str,  # noqa: A002 - click's
    examples: Sequence[str],
    method: str = "GET",
    needs_token: bool | None = None,
    seconds: float | None = None,
    options: Sequence[_Decorator] = (),
    asked: Callable[..., Call] = _as_parameters,
) -> click.Command:
    """Return the command that asks for one path, within so many seconds; ``None``: as many as a read may take.

    ``needs_token`` is false for a GET, and true for what changes something, unless it is given.
    ``options`` are click's decorators in the order of the help, between ``--url`` and ``--json``; ``asked`` returns
    what their values ask for, and may raise click.UsageError.
    """
    is_control = method != "GET" if needs_token is None else needs_token
    decorators: Sequence[_Decorator] = (json_option, *reversed(options), url_option)

    def run(url: str, *, as_json: bool, **given: Any) -> None:  # noqa: ANN401 - the options' values
        wanted = asked(**given)
        with (control_of if is_control and wanted.needs_token else sidecar_at)(url, timeout_seconds=seconds) as sidecar:
            ask_and_show(
                sidecar, wanted.path or path, method=method, params=wanted.params, body=wanted.body, as_json=as_json
            )

    function: Callable[..., Any] = run
    for decorate in decorators:
        function = decorate(function)
    return click.command(name, help=help, epilog=examples_text(*examples))(function)


def reclaim_of(remedies: Sequence[str], free_bytes: int | None, mode: str, *, dry_run: bool) -> Call:
    """Return the body of a reclaim: the remedies in their order, none where the sidecar chooses.

    Raises click.UsageError for a size without the trim that it is for.
    """
    names = [name.replace("-", "_") for name in remedies]
    if free_bytes is not None and names and _TRIM not in names:
        raise click.UsageError(f"--free is the size that {_TRIM} moves out, and {_TRIM} is not among the remedies")
    trim = {"remedy": _TRIM, "free_bytes": free_bytes}
    wanted = names if free_bytes is None else [trim if name == _TRIM else name for name in names or [_TRIM]]
    body = {"mode": mode, "remedies": wanted or None}
    return Call({"dry_run": "true"} if dry_run else None, body, needs_token=not dry_run)


def size_given(text: str) -> int:
    """Return a size in bytes: ``1GiB``, ``512MiB``, ``1.5GB``, or plain. Raises ValueError for others, and zero."""
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as exc:
        raise ValueError(f"{text!r} is not a size; one is 1GiB, 512MiB or 1.5GB") from exc
    if size < 1:
        raise ValueError(f"{text!r} is zero; one is 1GiB, 512MiB or 1.5GB")
    return size


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else size_given(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc), context, parameter) from exc


def known_remedies(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the remedies of this version, for shell completion; a sidecar may have others."""
    return [name for name in sorted(TRAITS) if name.startswith(incomplete)]


def _policy_of(file: Any) -> Call:  # noqa: ANN401 - a text file
    """Return the body of a change from a file; what the file itself has wrong is a usage error."""
    try:
        text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise click.UsageError(f"{file.name}: has over {MAX_BYTES:,} characters")
        return Call(body=change_of(parse_yaml(text)))
    except SettingsError as exc:
        raise click.UsageError(f"{file.name}: {exc.problems[0]}") from exc
    except (UnicodeDecodeError, RecursionError) as exc:
        raise click.UsageError(f"{file.name}: is no text of YAML or JSON") from exc
    except ValueError as exc:
        raise click.UsageError(f"{file.name}: {exc}") from exc


def change_of(content: object) -> dict[str, Any]:
    """Return the body of ``PUT /policy``. Raises ValueError for other keys, or neither mode nor rules."""
    if isinstance(content, dict) and set(content) == {"policy"}:
        content = content["policy"]
    if not isinstance(content, dict):
        content = {}
    is_printed = "schema" in content and "status" in content
    if unknown := sorted(str(key) for key in set(content) - set(_POLICY_FIELDS) if not is_printed):
        raise ValueError(f"{unknown[0]}: there is no such key; a policy has mode and rules")
    change = {name: content[name] for name in _POLICY_FIELDS if content.get(name) is not None}
    if not change:
        raise ValueError("must have mode, rules or both")
    return change


def _snapshot_of(minutes: float | None, *, dry_run: bool) -> Call:
    if dry_run and minutes is not None:
        raise click.UsageError("--dry-run and --record-stacks exclude each other")
    if minutes is None:
        return Call(body={"dry_run": dry_run})
    return Call(body={"minutes": minutes}, path="/memory/snapshot/stacks")


host: Final = verb(
    "host",
    "/memory/host",
    help="""Show who has the host memory: API servers, EngineCore, workers, /dev/shm, page cache, the kernel.

    The parts sum to what the kernel counts for the engine's container. Exits with 1 where something is wrong.
    """,
    examples=("highwater host", "highwater host --json | jq '.parts.rows[:5]'      the five largest parts"),
)

growth: Final = verb(
    "growth",
    "/memory/growth",
    help="""Show what grows between requests: a verdict on every series of memory.

    Flat, plateau, step, leak (with its rate, what drives it and when the memory is used up) or not known (with
    what would settle it). Exits with 1 where something leaks.
    """,
    examples=(
        "highwater growth",
        "highwater growth --json | jq '.series[] | select(.verdict == \"leak\")'",
        "highwater growth --series 'EngineCore anonymous_bytes' --json     with the data behind its verdict",
    ),
    options=(
        click.option("--series", metavar="NAME", help="one series alone, with the idle floors behind its verdict"),
    ),
)

reclaim: Final = verb(
    "reclaim",
    "/memory/reclaim",
    method="POST",
    seconds=RECLAIM_SECONDS,
    help="""Give memory back, and say what each remedy freed.

    A REMEDY is release, trim_encoder_cache, reset_encoder_cache, reset_mm_cache or reset_prefix_cache; they
    run in the order given. Exits with 1 if any of them was refused or failed, 3 if no sidecar answers.
    """,
    examples=(
        "highwater reclaim                       release, then reset_encoder_cache",
        "highwater reclaim --dry-run             what would be done or refused",
        "highwater reclaim --free 1GiB           moves that much of the encoder cache to the host",
        "highwater reclaim reset_mm_cache release",
    ),
    options=(
        click.argument("remedies", metavar="[REMEDY]...", nargs=-1, shell_complete=known_remedies),
        click.option(
            "--free",
            "free_bytes",
            metavar="SIZE",
            callback=_size,
            help="how much trim_encoder_cache moves out on each rank: 1GiB, 512MiB",
        ),
        click.option(
            "--mode",
            type=click.Choice(["safe", "now"]),
            default="safe",
            show_default=True,
            help="safe: harms no request, or is refused; now: at once, as vLLM does",
        ),
        click.option(
            "--dry-run", is_flag=True, help="show what each could give back, or why it is refused; needs no token"
        ),
    ),
    asked=reclaim_of,
)

restore: Final = verb(
    "restore",
    "/memory/encoder-cache/restore",
    method="POST",
    seconds=WORKER_SECONDS,
    help="""Bring back to the device what trim_encoder_cache moved to host memory.

    Exits with 0 when it is done, 1 if the sidecar refuses or a worker cannot, 3 if no sidecar answers.
    """,
    examples=("highwater restore",),
)

mark: Final = verb(
    "mark",
    "/memory/marks",
    method="POST",
    seconds=MARK_SECONDS,
    help="Name this moment, to compare with later: `highwater status --since NAME`.",
    examples=("highwater mark 'before bench'", "highwater status --since 'before bench'   what changed since"),
    options=(click.argument("name"),),
    asked=_as_body,
)

policy: Final = click.Group(
    "policy",
    commands=[
        verb(
            "get",
            "/policy",
            help="Show the mode, the rules, how each of them stands, and the last decisions. Needs no token.",
            examples=("highwater policy get --json > policy.json   edit it, then: highwater policy set policy.json",),
        ),
        verb(
            "mode",
            "/policy",
            method="PUT",
            seconds=CHANGE_SECONDS,
            help="Let the policy act, or only observe: decide and record, and do nothing. Its rules stay as they are.",
            examples=("highwater policy mode observe    stop it from acting", "highwater policy mode act"),
            options=(click.argument("mode", type=click.Choice(["act", "observe"])),),
            asked=_as_body,
        ),
        verb(
            "set",
            "/policy",
            method="PUT",
            seconds=CHANGE_SECONDS,
            help="""Replace the mode, the rules or both by those in FILE (- for standard input), in YAML or JSON.

            FILE has `mode`, `rules` or both, at the top or below `policy` as in a settings file, or is what `highwater
            policy get --json` printed. The sidecar checks it whole, and refuses it whole.
            """,
            examples=("highwater policy get --json | jq '.rules[0].cooldown_seconds = 30' | highwater policy set -",),
            options=(click.argument("file", type=click.File("r", encoding="utf-8")),),
            asked=_policy_of,
        ),
    ],
    help="""Show or change what gives memory back by itself.

    Each subcommand exits with 0 when it is done, 1 if the sidecar refuses (a rule that is invalid, or whose waters this
    engine cannot reach; a state file that cannot be written; the token), 2 for an invalid command line or file, 3 if no
    sidecar answers.
    """,
)
snapshot: Final = click.Group(
    "snapshot",
    commands=[
        verb(
            "take",
            "/memory/snapshot",
            method="POST",
            seconds=WORKER_SECONDS,
            help="""Have every rank write a memory snapshot into recorder_dir. The engine stands still meanwhile.

            Exits with 0 when it is done, 1 if the sidecar refuses or a worker cannot, 3 if no sidecar answers.
            """,
            examples=(
                "highwater snapshot take --dry-run              how large it would be",
                "highwater snapshot take",
                "highwater snapshot take --record-stacks 10     "
                "no snapshot yet: records allocation stacks for 10 minutes",
                "highwater snapshot take --record-stacks 0      ends that",
            ),
            options=(
                click.option("--dry-run", is_flag=True, help="say how large it would be, and take none"),
                click.option(
                    "--record-stacks",
                    "minutes",
                    metavar="MINUTES",
                    type=click.FloatRange(0, 60),
                    help="see the examples",
                ),
            ),
            asked=_snapshot_of,
        ),
        verb(
            "list",
            "/memory/snapshots",
            needs_token=True,
            help="List the files that there are, newest first.",
            examples=("highwater get /memory/snapshots/NAME > NAME    for PyTorch's own viewer",),
        ),
    ],
    help="Take PyTorch's memory snapshots, for PyTorch's own viewer, and list them.",
)


@click.command(
    epilog=examples_text(
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
        print_answer(sidecar.ask("GET", wanted))


# --- incidents: why the engine died, from a sidecar or from its files ---


@click.command(
    "incidents",
    epilog=examples_text(
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
        store = IncidentStore(folder)
        try:
            incident = None if incident_id is None else store.read(incident_id)
        except UnreadableIncident as exc:
            raise click.ClickException(str(exc)) from exc
        if incident is not None:
            text = to_bytes(incident).decode() if as_json else incident_markdown(incident)
        elif incident_id is not None:
            raise click.ClickException(
                f"there is no incident {incident_id} in {folder}; `highwater incidents --folder {folder}` lists them"
            )
        elif as_json:
            text = json.dumps(listing(store.headlines(), folder, None), indent=1)
        else:
            command = f"highwater incidents --folder {shlex.quote(str(folder))}"
            text = headlines_text(store.headlines(), command=command)
        # A terminal obeys control characters, whoever sent them.
        click.echo(printable(text, keep="\n").rstrip("\n"))
        return
    path = "/memory/incidents" if incident_id is None else f"/memory/incidents/{quote(incident_id, safe='')}"
    try:
        with sidecar_at(url) as sidecar:
            ask_and_show(sidecar, path, as_json=as_json)
    except NoSidecar as exc:
        raise NoSidecar(f"{exc.message}; --folder reads the files without one") from exc
