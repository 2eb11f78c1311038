"""``highwater snapshot``: PyTorch's memory snapshots taken, explained in words, and compared."""

# ruff: noqa: PLC0415 - `highwater --help` must not load what one command needs

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from highwater.client.options import control_of, examples, json_option, url_option
from highwater.commands.sizes import size_option
from highwater.exit_codes import TERMINATED
from highwater.readings.schema import SCHEMA

# It is written while the engine is stopped, and once more than that to learn its size.
_TAKE_SECONDS = 300.0

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def snapshot() -> None:
    """Take PyTorch's memory snapshots, and say in words what is in them."""


@snapshot.command(
    epilog=examples(
        "highwater snapshot take --dry-run              how large it would be",
        "highwater snapshot take",
        "highwater snapshot take --record-stacks 10     no snapshot yet: records allocation stacks for 10 minutes",
        "highwater snapshot take --record-stacks 0      ends that",
    )
)
@url_option
@click.option("--dry-run", is_flag=True, help="say how large it would be, and take none")
@click.option("--record-stacks", "minutes", metavar="MINUTES", type=click.FloatRange(0, 60), help="see the examples")
@json_option
def take(url: str, minutes: float | None, *, dry_run: bool, as_json: bool) -> None:
    """Have every rank write a memory snapshot into recorder_dir. The engine stands still meanwhile.

    Exits with 0 when it is done, 1 if the sidecar refuses or a worker cannot, 3 if no sidecar answers.
    """
    from highwater.snapshots.words import stacks_text

    if dry_run and minutes is not None:
        raise click.UsageError("--dry-run and --record-stacks exclude each other")
    with control_of(url, timeout_seconds=_TAKE_SECONDS) as sidecar:
        if minutes is None:
            answer, shown = sidecar.post("/memory/snapshot", {"dry_run": dry_run}), taken_text
        else:
            answer, shown = sidecar.post("/memory/snapshot/stacks", {"minutes": minutes}), stacks_text
        _echo(json.dumps(answer, indent=1) if as_json else shown(answer))


@snapshot.command("list", epilog=examples("highwater get /memory/snapshots/NAME > NAME    for PyTorch's own viewer"))
@url_option
@json_option
def list_files(url: str, *, as_json: bool) -> None:
    """List the files that there are, newest first."""
    with control_of(url) as sidecar:
        answer = sidecar.get("/memory/snapshots")
        _echo(json.dumps(answer, indent=1) if as_json else list_text(answer))


@snapshot.command(
    epilog=examples(
        "highwater snapshot explain FILE",
        "highwater snapshot explain FILE --want 180MiB --picture segments.svg",
        "highwater snapshot explain FILE --json | jq '.devices[].release_bytes'",
    )
)
@click.argument("file", type=_file)
@click.option("--want", metavar="SIZE", callback=size_option, help="a request to judge by, such as 180MiB")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="writes the segments there, as SVG")
@json_option
def explain(file: Path, want: int | None, picture: Path | None, *, as_json: bool) -> None:
    """Say how much of FILE's memory is free, in which holes, what pins it, and what could be given back."""
    from highwater.snapshots.picture import svg
    from highwater.snapshots.words import explanation_text

    answer = _read([file], want=want, picture=picture is not None)
    figures = answer["explanation"]
    if picture is not None:
        try:
            picture.write_text(_printable(svg(answer["picture"], file.name)), "utf-8")
        except OSError as exc:
            raise click.ClickException(_printable(f"{picture} cannot be written: {exc.strerror or exc}")) from exc
    whole = {"schema": SCHEMA, "file": file.name, **figures}
    _echo(json.dumps(whole) if as_json else explanation_text(figures, file.name))


@snapshot.command(epilog=examples("highwater snapshot diff BEFORE AFTER      both taken while no request runs"))
@click.argument("before", type=_file)
@click.argument("after", type=_file)
@json_option
def diff(before: Path, after: Path, *, as_json: bool) -> None:
    """Say what grew from BEFORE to AFTER, by the stack that allocated it."""
    from highwater.snapshots.words import difference_text, warnings_of

    figures = _read([before, after])["difference"]
    if not as_json:
        _echo(difference_text(figures, before.name, after.name))
        return
    warnings = list(warnings_of(figures, before.name, after.name))
    _echo(json.dumps({"schema": SCHEMA, "files": [before.name, after.name], "warnings": warnings, **figures}))


def taken_text(answer: Any) -> str:  # noqa: ANN401 - JSON
    """Return what ``POST /memory/snapshot`` returned, a line for each rank.

    Raises:
        SidecarUnreachable: This version cannot read it.
    """
    from highwater.client.answers import understood
    from highwater.text.printable import cleaned
    from highwater.text.table import rank_title, table
    from highwater.units import UNKNOWN, size_text

    with understood("/memory/snapshot"):
        shown: Any = cleaned(answer)
        rows = [
            [
                rank_title(rank["dp_rank"], rank["rank"]),
                size_text(rank["bytes"]),
                f"{rank['elapsed_ms'] / 1000:.2f} s",
                str(rank["path"] or UNKNOWN),
            ]
            for rank in shown["ranks"]
        ]
        head = "would write, now:" if shown["dry_run"] else f"snapshot {shown['snapshot']} is written:"
    return f"{head}\n" + table(["rank", "size", "stood still", "path"], rows, words=1)


def list_text(answer: Any) -> str:  # noqa: ANN401 - JSON
    """Return what ``GET /memory/snapshots`` returned.

    Raises:
        SidecarUnreachable: This version cannot read it.
    """
    from highwater.client.answers import understood
    from highwater.text.printable import cleaned
    from highwater.text.table import table
    from highwater.units import size_text

    with understood("/memory/snapshots"):
        shown: Any = cleaned(answer)
        rows = [[size_text(file["bytes"]), str(file["url"])] for file in shown["snapshots"]]
        problem = f"\n{shown['problem']}" if shown["problem"] else ""
        where = shown["folder"]
    if not rows:
        return f"there are no snapshots in {where}{problem}" if where else f"recorder_dir is not set{problem}"
    return table(["size", "highwater get PATH > FILE"], rows, words=1) + problem


def _read(files: list[Path], *, want: int | None = None, picture: bool = False) -> dict[str, Any]:
    from highwater.snapshots import SnapshotError
    from highwater.snapshots.child import ask

    # An ordinary kill ends the reading process in order, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        return ask(files, want=want, picture=picture)
    except SnapshotError as exc:
        raise click.ClickException(_printable(f"{files[-1].name}: {exc}" if len(files) == 1 else str(exc))) from exc
    finally:
        signal.signal(signal.SIGTERM, before)


def _printable(text: str) -> str:
    from highwater.text.printable import printable

    return printable(text, keep="\n")  # a snapshot's words are foreign, and a terminal obeys some


def _echo(text: str) -> None:
    click.echo(_printable(text))
