"""``highwater demo``: a real engine on CPU, watched and then acted on."""

from __future__ import annotations

import shutil
import signal
import sys
from contextlib import suppress

import click

from highwater.http.text.status import wrapped
from highwater.terminal.demo import story
from highwater.terminal.demo.engine import EngineOptions
from highwater.terminal.demo.environment import ensure_environment
from highwater.terminal.demo.process import DemoError
from highwater.terminal.demo.sidecar import commands_to_try, own_command, usual_port

WATCHED_IMAGES = 40
"""Images of the demonstration's first half: enough to see the encoder cache grow."""


@click.command()
@click.option("--prepare", is_flag=True, help="only install the engine's environment, and end")
@click.option("--images", default=160, show_default=True, type=click.IntRange(1, 10_000), help="requests to replay")
@click.option(
    "--port", default=None, type=click.IntRange(1, 65535), help="the sidecar's port  [default: 8001, or a free one]"
)
@click.option("--tensor-parallel", default=1, show_default=True, type=click.IntRange(1, 8), help="workers")
@click.option("--stay/--no-stay", default=None, help="stay up afterwards  [default: on a terminal]")
@click.option(
    "--wait",
    default=3600.0,
    show_default=True,
    type=click.FloatRange(1),
    help="seconds that a start may take while the engine's processes live",
)
@click.option("--skip", type=click.Choice(["watch"]), help="leave the first half out")
def demo(
    *,
    prepare: bool,
    images: int,
    port: int | None,
    tensor_parallel: int,
    stay: bool | None,
    wait: float,
    skip: str | None,
) -> None:
    """Watch a real vLLM engine (CPU), then replay the story on one that may be acted on."""
    # SIGTERM ends the children in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = EngineOptions(tensor_parallel=tensor_parallel, start_seconds=wait)
    stays = sys.stdout.isatty() if stay is None else stay
    try:
        environment = ensure_environment(announce=_say)
        if prepare:
            return
        if skip is None:
            _say(
                f"1. Watching. Starting vLLM {environment.version} with a tiny Qwen3-VL (about half a minute): no "
                "development mode and no flag, only the worker package on its path and HIGHWATER_RECORDER_DIR"
            )
            story.watch(environment, options, images=min(images, WATCHED_IMAGES), say=_say)
        _say(
            "\n2. Acting. The same engine again, in development mode and with the sidecar in front of it (another half "
            "minute)"
        )
        with story.stage(environment, options, port or usual_port(), say=_say, stays=stays) as (engine, sidecar):
            story.tell(engine, sidecar, images=images, say=_say)
            if stays:
                lines = commands_to_try(own_command(sys.argv[0]), sidecar.url, sidecar.port)
                click.echo(
                    f"\nStill up; Ctrl-C ends it. Open {sidecar.url}/dashboard, or try in another terminal:\n"
                    + "".join(f"  {line}\n" for line in lines)
                    + f"The engine itself is at {engine.url}"
                )
                with suppress(KeyboardInterrupt):
                    signal.pause()
    except DemoError as exc:
        raise click.ClickException(str(exc)) from exc


def _say(text: str) -> None:
    """Print it in the terminal's width, but for a command's own screen."""
    width = shutil.get_terminal_size().columns
    is_prose = not text.startswith("\n$ ")
    click.echo("\n".join(wrapped(line, width, indent=2) for line in text.split("\n")) if is_prose else text)
