"""``highwater measure``: runs any load and reports how memory changed under it and what each remedy freed."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from highwater.act.remedies import REMEDIES
from highwater.diagnose.case import of_load
from highwater.diagnose.rules.book import judged
from highwater.http.text.markdown import page
from highwater.process.errors import FAILED, INTERRUPTED, OK
from highwater.process.untrusted import printable
from highwater.terminal.asking import sidecar_at
from highwater.terminal.cli import examples, url_option
from highwater.terminal.measure.load import Interrupts, LoadNotStarted, find
from highwater.terminal.measure.recording import Measurement
from highwater.terminal.measure.report import CannotWriteReport, ReportFiles, report

# A mark makes the sidecar read the workers; a remedy may have to wait until no request runs.
CALL_SECONDS = 600.0
READ_SECONDS = 15.0
MAX_NAME_LENGTH = 80
MAX_LISTED = 6
NONE, ALL = "none", "all"
# In this order: the one that frees nothing on the device, the cheap one, and then those of the encoder cache.
STORY: Final = ("reset_mm_cache", "release", "trim_encoder_cache", "reset_encoder_cache")


def _remedies(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    if value in (NONE, ALL):
        return STORY if value == ALL else ()
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    allowed = [remedy.name for remedy in REMEDIES]
    for name in names:
        if name not in allowed:
            known = ", ".join(allowed)
            raise click.BadParameter(
                f"{name!r} is no remedy; there are: {known}, or {ALL}, or {NONE}", context, parameter
            )
    if len(set(names)) < len(names):
        raise click.BadParameter("each remedy once", context, parameter)
    return names


def _name(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    if value is None:
        return f"measure {datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z"
    if not value.strip() or len(value) > MAX_NAME_LENGTH or not value.isprintable():
        raise click.BadParameter(f"1 to {MAX_NAME_LENGTH} printable characters", context, parameter)
    return value


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "highwater measure -- vllm bench serve --backend openai-chat --base-url http://127.0.0.1:8001 ...",
        "highwater measure --remedies all --out after-upgrade -- ./load.sh",
        "highwater measure --remedies reset_mm_cache,release --settle 10 --name 'nightly' -- python replay.py",
    ),
)
@url_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="the reports' path, with or without .html or .md, or a folder  [default: highwater-TIME here]",
)
@click.option("--force", is_flag=True, help="replace reports that are there")
@click.option("--name", callback=_name, help="the report's title, and what its marks begin with")
@click.option(
    "--remedies",
    default=NONE,
    show_default=True,
    metavar="NAMES",
    callback=_remedies,
    help=f"tried after the load, one by one, in safe mode: comma separated; {ALL}: {', '.join(STORY)}",
)
@click.option(
    "--settle",
    "settle_seconds",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="waited between the load's end and the reading after it",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def measure(
    url: str,
    out: Path | None,
    *,
    force: bool,
    name: str,
    remedies: tuple[str, ...],
    settle_seconds: float,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND as a load, and report how the engine's memory changed: one HTML and one Markdown file.

    The load's input and output stay its own; progress goes to stderr. Nothing is reset unless --remedies says so.
    Ctrl-C ends the load and still writes the reports; a second one ends it at once, and writes what is known.

    Exits as COMMAND does; with 130 where it was interrupted and ended with 0; with 1 if the reports are incomplete or
    could not be written, or no engine is there to measure; 2 for an invalid command line; 126 or 127 if COMMAND cannot
    be run; 3 if no sidecar answers.
    """
    with Interrupts() as interrupts:
        try:
            files = ReportFiles(out, force=force, now=time.time())
            find(command)
            with (
                sidecar_at(url, timeout_seconds=READ_SECONDS) as reader,
                sidecar_at(url, timeout_seconds=CALL_SECONDS, with_token=True) as client,
            ):
                measurement = Measurement(
                    name,
                    command,
                    remedies=remedies,
                    settle_seconds=settle_seconds,
                    client=client,
                    reader=reader,
                    interrupts=interrupts,
                    say=_say,
                )
                experiment = measurement.run()
            interrupts.ignores_signals = True
            markdown = report(experiment, written_at=time.time())
            written = files.write({".html": page(markdown, title=experiment.name), ".md": markdown})
            titles = [finding.title for finding in judged(of_load(experiment)) if finding.weight != "note"]
            for title in titles[:MAX_LISTED]:
                _say(f"- {title}")
            if len(titles) > MAX_LISTED:
                _say(f"- and {len(titles) - MAX_LISTED} more in the report")
            for path in written:
                _say(f"wrote {path}")
        except CannotWriteReport as exc:
            raise click.ClickException(str(exc)) from exc
        except LoadNotStarted as exc:
            click.echo(f"highwater: {exc}", err=True)
            sys.exit(exc.exit_code)
        except KeyboardInterrupt:
            click.echo("highwater: interrupted before the load started; nothing was measured", err=True)
            sys.exit(INTERRUPTED)
    status = INTERRUPTED if interrupts.count > 0 else OK if measurement.complete else FAILED
    sys.exit(experiment.load.exit_code or status)


def _say(line: str) -> None:
    """Print a line to stderr; at a terminal on a fresh line, where the load has left its own unfinished."""
    fresh = "\r\x1b[K" if sys.stderr.isatty() else ""
    with suppress(OSError):  # stderr may be closed, and the report is still to be written
        click.echo(f"{fresh}highwater: {printable(line)}", err=True)
