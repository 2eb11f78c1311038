"""``highwater host trace``: the lines of one of vLLM's processes that hold more and more memory."""

# ruff: noqa: PLC0415 - `highwater --help` must not load what only this command needs

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from highwater.client.options import examples, json_option
from highwater.exit_codes import FAILED

if TYPE_CHECKING:
    from collections.abc import Callable

    from highwater.host.trace import TraceResult

_MINUTES, _FRAMES = 60, 8
# The process reads requests once a second; reading its memory may take some seconds, on a busy machine.
_GRACE_SECONDS = 60.0
_LOOK_SECONDS = 0.5


def _named(context: click.Context, _: click.Parameter, folder: Path | None) -> Path | None:
    if folder is None and not context.resilient_parsing:
        raise click.UsageError(
            "--folder is not given, and HIGHWATER_RECORDER_DIR is not set; name the folder that vLLM's workers record "
            "into, as in --folder /dev/shm/highwater"
        )
    return folder


@click.command(
    epilog=examples(
        "highwater host trace api-server --minutes 10",
        "highwater host trace engine-core --minutes 30 --frames 6",
        "highwater host trace 4242 --stop         ends it early, with its result",
    )
)
@click.argument("process")
@click.option(
    "--minutes",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0, _MINUTES, min_open=True),
    help="how long it is traced",
)
@click.option("--frames", default=4, show_default=True, type=click.IntRange(1, _FRAMES), help="callers that are kept")
@click.option("--stop", is_flag=True, help="ends the trace that is under way")
@click.option(
    "--folder",
    envvar="HIGHWATER_RECORDER_DIR",
    show_envvar=True,
    callback=_named,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="the recorders' folder",
)
@json_option
def trace(process: str, minutes: float, frames: int, folder: Path, *, stop: bool, as_json: bool) -> None:
    """Have PROCESS trace its own Python memory for so many minutes, and name the lines that hold more and more.

    PROCESS is a pid, or api-server, engine-core or worker, with a number where there are several. Run it on the
    engine's machine, as the engine's user or as root. The process is slower meanwhile.
    """
    from highwater.host.trace import CannotTrace, ask, find_process, has_ended, read_result, trace_text, withdraw
    from highwater.text.printable import printable

    try:
        record, name = find_process(folder, process)
        who = f"{name} (pid {record.pid})"
        old = read_result(folder, record)
        if stop:
            _check_running(old, who)
        request = ask(folder, record, action="stop" if stop else "start", minutes=minutes, frames=frames)
    except CannotTrace as exc:
        raise click.ClickException(printable(str(exc))) from exc
    # A refusal cannot always name its request.
    ids = {request, None, *([old.id] if stop and old is not None else [])}
    seconds = _GRACE_SECONDS + (0.0 if stop else minutes * 60)

    def read() -> TraceResult | None:
        result = read_result(folder, record)
        return result if result is not None and result.id in ids and result != old else None

    result, is_gone = _waited_for(read, lambda: has_ended(folder, record), seconds)
    if is_gone and (result is None or result.state == "running"):
        withdraw(folder, record)
        raise click.ClickException(
            printable(f"{who} has no result of its trace: the process ended, or its file was removed")
        )
    if result is None:
        withdraw(folder, record)
        raise click.ClickException(
            printable(f"{who} has not answered: it looks once a second, and only where the worker package is current")
        )
    text = json.dumps(asdict(result)) if as_json else trace_text(result, name)
    has_sizes = result.after is not None
    if as_json or has_sizes or result.state != "ended":
        click.echo(printable(text, keep="\n"))
    if result.state != "ended":
        raise click.exceptions.Exit(FAILED)
    if not has_sizes:
        raise click.ClickException(printable(f"{who} ended its trace without a last reading: {result.why}"))


def _check_running(result: TraceResult | None, name: str) -> None:
    if result is None or result.state != "running":
        raise click.ClickException(f"no trace of {name} is under way")


def _waited_for(
    read: Callable[[], TraceResult | None], has_ended: Callable[[], bool], seconds: float
) -> tuple[TraceResult | None, bool]:
    """Return the result once the process is done or has ended, or its last one when the time is over.

    The second value is True if the process has ended.
    """
    began, last, is_gone = time.monotonic(), None, False
    while not is_gone and time.monotonic() < began + (seconds if last is not None else _GRACE_SECONDS):
        time.sleep(_LOOK_SECONDS)
        is_gone = has_ended()
        last = read() or last  # read after that: a process that ends in order writes its result first
        if last is not None and last.state != "running":
            break
    return last, is_gone
