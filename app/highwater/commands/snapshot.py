"""``highwater snapshot``: PyTorch's memory snapshots taken and listed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from highwater.client.options import control_of, examples, json_option, url_option

# It is written while the engine is stopped, and once more than that to learn its size.
_TAKE_SECONDS = 300.0


@click.group()
def snapshot() -> None:
    """Take PyTorch's memory snapshots, for PyTorch's own viewer, and list them."""


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
    if dry_run and minutes is not None:
        raise click.UsageError("--dry-run and --record-stacks exclude each other")
    with control_of(url, timeout_seconds=_TAKE_SECONDS) as sidecar:
        if minutes is None:
            _show(sidecar.post("/memory/snapshot", {"dry_run": dry_run}), _taken, as_json=as_json)
        else:
            _show(sidecar.post("/memory/snapshot/stacks", {"minutes": minutes}), _stacks, as_json=as_json)


@snapshot.command("list", epilog=examples("highwater get /memory/snapshots/NAME > NAME    for PyTorch's own viewer"))
@url_option
@json_option
def list_files(url: str, *, as_json: bool) -> None:
    """List the files that there are, newest first."""
    with control_of(url) as sidecar:
        _show(sidecar.get("/memory/snapshots"), _list, as_json=as_json)


def _show(answer: Any, text: Callable[[Any], str], *, as_json: bool) -> None:  # noqa: ANN401 - JSON
    from highwater.client.answers import understood
    from highwater.text.printable import cleaned, printable

    if as_json:
        shown = json.dumps(answer, indent=1)
    else:
        with understood("/memory/snapshot"):
            shown = text(cleaned(answer))
    click.echo(printable(shown, keep="\n"))


def _taken(answer: Any) -> str:  # noqa: ANN401 - JSON
    from highwater.readings.rank import rank_title
    from highwater.text.table import table
    from highwater.units import UNKNOWN, size_text

    rows = [
        [
            rank_title(rank["dp_rank"], rank["rank"]),
            size_text(rank["bytes"]),
            f"{rank['elapsed_ms'] / 1000:.2f} s",
            str(rank["path"] or UNKNOWN),
        ]
        for rank in answer["ranks"]
    ]
    head = "would write, now:" if answer["dry_run"] else f"snapshot {answer['snapshot']} is written:"
    return f"{head}\n" + table(["rank", "size", "stood still", "path"], rows, words=1)


def _stacks(answer: Any) -> str:  # noqa: ANN401 - JSON
    from highwater.readings.rank import rank_title
    from highwater.units import span_text

    lines = []
    for rank in answer["ranks"]:
        recorded = "not recorded any more" if rank["was_recording"] else "not recorded now"
        if rank["recording"]:
            recorded = f"recorded for {span_text(rank['seconds_left'])}"
        lines.append(f"rank {rank_title(rank.get('dp_rank'), rank['rank'])}: allocation stacks are {recorded}")
    return "\n".join(lines)


def _list(answer: Any) -> str:  # noqa: ANN401 - JSON
    from highwater.text.table import table
    from highwater.units import size_text

    rows = [[size_text(file["bytes"]), str(file["url"])] for file in answer["snapshots"]]
    problem, where = f"\n{answer['problem']}" if answer["problem"] else "", answer["folder"]
    if not rows:
        return f"there are no snapshots in {where}{problem}" if where else f"recorder_dir is not set{problem}"
    return table(["size", "highwater get PATH > FILE"], rows, words=1) + problem
