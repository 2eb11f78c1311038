"""The command line. Reads, calls, prints and exits; no logic of its own."""

from __future__ import annotations

import logging
import signal
import sys
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import click

from highwater import __version__
from highwater.commands import terminal
from highwater.commands.events import events
from highwater.commands.explain import explain
from highwater.commands.extension import extension
from highwater.commands.get import get
from highwater.commands.growth import growth
from highwater.commands.healthcheck import healthcheck
from highwater.commands.host import host
from highwater.commands.incidents import incidents
from highwater.commands.measure import measure
from highwater.commands.plan import plan
from highwater.commands.policy import policy
from highwater.commands.restore import restore
from highwater.commands.snapshot import snapshot
from highwater.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from highwater.settings import Settings

BAD_SETTINGS = 2
WATCHED_IMAGES = 40
"""Images of the demonstration's first half: enough to see the encoder cache grow."""


# The list in `highwater --help`, at most 45 characters for each command. A test compares it with the commands.
COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    "Watch": {
        "status": "is all well; where the memory is",
        "top": "the memory, live",
        "events": "what happened, or happens",
        "incidents": "what the engine died of",
        "explain": "why the memory is as it is",
        "host": "who has the host memory",
        "growth": "what grows: leak or plateau, until when",
        "get": "any path of the control plane",
    },
    "Act": {
        "reclaim": "give memory back without failing a request",
        "restore": "undo trim_encoder_cache",
        "policy": "what gives memory back by itself",
        "mark": "name this moment, to compare with later",
        "snapshot": "PyTorch's memory snapshot of every worker",
    },
    "Set up": {
        "serve": "run the sidecar beside a vLLM server",
        "check": "what is not set up right, and the change",
        "token": "the admin token of this machine's sidecar",
        "extension": "copy the worker package for vLLM",
        "healthcheck": "the sidecar's health as an exit status",
        "completion": "completion for bash, zsh or fish",
    },
    "Plan and measure": {
        "plan": "what other vLLM flags would do",
        "measure": "run a load, and report the memory under it",
        "demo": "a real engine on CPU, and the story on it",
    },
}
# The settings in the help of `serve`: keys, and sections with a dot at their end. A test compares it with the settings.
SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "Engine": (
        "engine_url",
        "engine_root_path",
        "engine_has_extension",
        "engine_log",
        "rpc_deadline_seconds",
        "max_step_seconds",
        "engine_tls.",
    ),
    "Listening": ("host", "port", "control_port", "shutdown_seconds", "tls."),
    "Access": ("admin_token", "admin_token_file", "trust_loopback"),
    "Watching": (
        "poll_seconds",
        "idle_poll_seconds",
        "history_seconds",
        "recorder_dir",
        "recorder_rate",
        "recorder_seconds",
        "incidents.",
    ),
    "Policy and relief": ("policy.", "state_file", "gate.", "trim."),
    "Requests": ("proxy.",),
    "Logs": ("log_level", "log_format", "access_log"),
}


class _Grouped(click.Group):
    """A group that lists its commands by topic."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists."""
        del ctx
        for title, commands in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()), col_max=12)


@click.group(cls=_Grouped, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="highwater")
def main() -> None:
    """Highwater: where a vLLM server's memory went, and how to get it back without failing a request."""


def _serve(config: str | None, **flags: str | None) -> None:
    from highwater.settings_sources import load  # noqa: PLC0415 - see _Serve

    given = {_key(name): value for name, value in flags.items() if value is not None}
    try:
        settings = load(given, config=config)
    except SettingsError as exc:
        for problem in exc.problems:
            click.echo(f"highwater: {problem}", err=True)
        sys.exit(BAD_SETTINGS)
    _run(settings)


def _run(settings: Settings) -> None:
    # Here and not at the top: `highwater --help` must not load the server.
    from highwater.commands.server import Server  # noqa: PLC0415
    from highwater.main import create_app  # noqa: PLC0415
    from highwater.process.descriptors import raise_limit  # noqa: PLC0415
    from highwater.process.log_format import configure_log  # noqa: PLC0415
    from highwater.process.malloc import retain_freed_memory  # noqa: PLC0415
    from highwater.proxy import exchange  # noqa: PLC0415
    from highwater.wiring.start_line import start_line  # noqa: PLC0415

    retain_freed_memory()
    raise_limit()
    configure_log(settings.log_level, settings.log_format)
    logging.getLogger("highwater").info("%s", start_line(settings))
    if settings.has_data_plane:
        is_pure = exchange.__file__.endswith(".py")
        logging.getLogger("highwater").info("data plane: %s", "pure Python" if is_pure else "compiled")
    server = Server(create_app(settings), settings.host, shutdown_seconds=settings.shutdown_seconds)
    with suppress(KeyboardInterrupt):  # raised again by uvicorn after it has shut down in order
        server.run()
    if not server.started:
        sys.exit(1)


def _key(parameter: str) -> str:
    return parameter.replace("__", ".")


def _is_among(key: str, keys: Iterable[str]) -> bool:
    return any(key == own or (own.endswith(".") and key.startswith(own)) for own in keys)


def _option(key: str, field: Any) -> click.Option:  # noqa: ANN401 - pydantic's FieldInfo
    from pydantic import SecretStr  # noqa: PLC0415 - see _Serve

    from highwater.settings import is_list, variable  # noqa: PLC0415

    default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
    shown = "see docs/policy.md" if key == "policy.rules" else "none" if default in (None, ()) else str(default)
    text = f"{field.description} [{variable(key)}; default: {shown}]"
    metavar = "JSON" if is_list(field) else key.rpartition(".")[2].upper()
    return click.Option([f"--{key.replace('_', '-')}", key.replace(".", "__")], help=text, metavar=metavar)


class _Serve(click.Command):
    """``serve``, which creates its options on first use: loading the settings takes longer than other commands."""

    @cached_property
    def params(self) -> list[click.Parameter]:  # type: ignore[override]
        """A flag for each setting, and ``--config``."""
        from highwater.settings import keys  # noqa: PLC0415
        from highwater.settings_sources import CONFIG_VARIABLE  # noqa: PLC0415

        text = f"settings in TOML or YAML, same keys [{CONFIG_VARIABLE}]"
        file = click.Option(["--config"], metavar="FILE", help=text)
        return [file, *(_option(key, field) for key, field in keys())]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by topic."""
        rows = {parameter.name: parameter.get_help_record(ctx) for parameter in self.get_params(ctx)}
        for title, keys in SETTINGS.items():
            names = [name for name in rows if _is_among(_key(name or ""), keys)]
            with formatter.section(title):
                formatter.write_dl([row for name in names if (row := rows.pop(name)) is not None])
        with formatter.section("Other"):
            formatter.write_dl([row for row in rows.values() if row is not None])

    def __init__(self, name: str, **attributes: Any) -> None:  # noqa: ANN401 - click's
        """Create the command without its options."""
        super().__init__(name, **attributes)
        del self.params  # click has just set an empty list


main.add_command(
    _Serve(
        "serve",
        callback=_serve,
        help="Run the sidecar beside a vLLM server. A flag beats the --config file, that the environment, and that the "
        "file that HIGHWATER_CONFIG names.",
    )
)


for command in (
    events,
    explain,
    extension,
    get,
    growth,
    healthcheck,
    host,
    incidents,
    measure,
    plan,
    policy,
    restore,
    snapshot,
    *terminal.ALL,
):
    main.add_command(command)


@main.command()
@click.option("--prepare", is_flag=True, help="only install the engine's environment, and end")
@click.option("--images", default=160, show_default=True, type=click.IntRange(1, 10_000), help="requests to replay")
@click.option("--port", default=None, type=click.IntRange(1, 65535), help="the sidecar's port  [default: a free one]")
@click.option("--tensor-parallel", default=1, show_default=True, type=click.IntRange(1, 8), help="workers")
@click.option("--stay/--no-stay", default=None, help="stay up afterwards  [default: on a terminal]")
def demo(prepare: bool, images: int, port: int | None, tensor_parallel: int, stay: bool | None) -> None:
    """Watch a real vLLM engine (CPU), then replay the story on one that may be acted on."""
    from highwater.demo import story  # noqa: PLC0415 - `serve` must not load it
    from highwater.demo.engine import EngineOptions  # noqa: PLC0415
    from highwater.demo.environment import ensure_environment  # noqa: PLC0415
    from highwater.demo.errors import DemoError  # noqa: PLC0415

    # SIGTERM ends the children in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = EngineOptions(tensor_parallel=tensor_parallel)
    try:
        environment = ensure_environment(announce=click.echo)
        if prepare:
            return
        click.echo(
            f"1. Watching. Starting vLLM {environment.version} with a tiny Qwen3-VL (about half a minute): no "
            "development mode and no flag, only the worker package on its path and HIGHWATER_RECORDER_DIR"
        )
        story.watch(environment, options, images=min(images, WATCHED_IMAGES), say=click.echo)
        click.echo(
            "\n2. Acting. The same engine again, in development mode and with the sidecar in front of it (another half "
            "minute)"
        )
        with story.stage(environment, options, port) as (engine, sidecar):
            story.tell(engine, sidecar, images=images, say=click.echo)
            if sys.stdout.isatty() if stay is None else stay:
                _stay(sidecar.url, sidecar.port, engine.url)
    except DemoError as exc:
        raise click.ClickException(str(exc)) from exc


def _stay(sidecar_url: str, port: int, engine_url: str) -> None:
    click.echo(
        f"\nStill up; Ctrl-C ends it. Open {sidecar_url}/dashboard, or try:\n"
        f"  highwater top --url {sidecar_url}\n"
        f"  curl '{sidecar_url}/memory?format=text'\n"
        f"  curl {sidecar_url}/memory/encoder-cache?limit=3\n"
        f"  curl {sidecar_url}/metrics\n"
        f"  highwater reclaim --url {sidecar_url}\n"
        f'  curl -X POST -H "Authorization: Bearer $(highwater token --port {port})" {sidecar_url}/memory/reclaim\n'
        f"  curl -N -H 'Accept: text/event-stream' {sidecar_url}/memory/events\n"
        f"The engine itself is at {engine_url}"
    )
    with suppress(KeyboardInterrupt):
        signal.pause()
