"""``highwater serve``: the settings as flags, and the sidecar that runs with them."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import click

from highwater.errors import SettingsError
from highwater.exit_codes import FAILED, INVALID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from highwater.settings.settings import Settings

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


def _serve(config: str | None, **flags: str | None) -> None:
    from highwater.settings.sources import load

    given = {_key(name): value for name, value in flags.items() if value is not None}
    try:
        settings = load(given, config=config)
    except SettingsError as exc:
        for problem in exc.problems:
            click.echo(f"highwater: {problem}", err=True)
        sys.exit(INVALID)
    run(settings)


def run(settings: Settings) -> None:
    """Serve until the process is asked to stop; exits with FAILED where the sidecar cannot start."""
    from highwater.commands.server import Server
    from highwater.main import create_app
    from highwater.process.descriptors import raise_limit
    from highwater.process.log_format import configure_log
    from highwater.process.malloc import retain_freed_memory
    from highwater.proxy import exchange
    from highwater.wiring.start_line import start_line

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
        sys.exit(FAILED)


def _key(parameter: str) -> str:
    return parameter.replace("__", ".")


def _is_among(key: str, keys: Iterable[str]) -> bool:
    return any(key == own or (own.endswith(".") and key.startswith(own)) for own in keys)


def _option(key: str, field: Any) -> click.Option:  # noqa: ANN401 - pydantic's FieldInfo
    from pydantic import SecretStr

    from highwater.settings.keys import is_list, variable

    default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
    shown = "see docs/policy.md" if key == "policy.rules" else "none" if default in (None, ()) else str(default)
    text = f"{field.description} [{variable(key)}; default: {shown}]"
    metavar = "JSON" if is_list(field) else key.rpartition(".")[2].upper()
    return click.Option([f"--{key.replace('_', '-')}", key.replace(".", "__")], help=text, metavar=metavar)


class _Serve(click.Command):
    """``serve``, which creates its options on first use: loading the settings takes longer than other commands."""

    @cached_property
    def params(self) -> list[click.Parameter]:  # type: ignore[override]
        from highwater.settings.keys import keys
        from highwater.settings.sources import CONFIG_VARIABLE

        text = f"settings in TOML or YAML, same keys [{CONFIG_VARIABLE}]"
        file = click.Option(["--config"], metavar="FILE", help=text)
        return [file, *(_option(key, field) for key, field in keys())]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {parameter.name: parameter.get_help_record(ctx) for parameter in self.get_params(ctx)}
        for title, keys in SETTINGS.items():
            names = [name for name in rows if _is_among(_key(name or ""), keys)]
            with formatter.section(title):
                formatter.write_dl([row for name in names if (row := rows.pop(name)) is not None])
        with formatter.section("Other"):
            formatter.write_dl([row for row in rows.values() if row is not None])

    def __init__(self, name: str, **attributes: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(name, **attributes)
        del self.params  # click has just set an empty list


serve: Final = _Serve(
    "serve",
    callback=_serve,
    help="Run the sidecar beside a vLLM server. A flag beats the --config file, that the environment, and that the "
    "file that HIGHWATER_CONFIG names.",
)
