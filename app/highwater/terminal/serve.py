"""``highwater serve``: the settings as flags, and the sidecar that runs with them."""

from __future__ import annotations

import errno
import json
import logging
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import click
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from highwater.process.errors import FAILED, INVALID, SettingsError, os_reason
from highwater.process.resources import raise_limit, retain_freed_memory
from highwater.process.untrusted import masked
from highwater.server.settings import CONFIG_VARIABLE, LogFormat, Settings, is_list, keys, load, variable
from highwater.terminal.healthcheck import PATHS, ask

_PROBE_SECONDS: Final = 0.2
_NOT_HERE: Final = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
# The settings in the help of `serve`: keys, and sections with a dot at their end. A test compares it with the settings.
SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    title: tuple(names.split())
    for title, names in {
        "Engine": "engine_url engine_root_path engine_has_extension engine_log rpc_deadline_seconds max_step_seconds "
        "engine_tls.",
        "Listening": "host port control_port shutdown_seconds tls.",
        "Access": "admin_token admin_token_file trust_loopback",
        "Watching": "poll_seconds idle_poll_seconds history_seconds recorder_dir recorder_rate recorder_seconds "
        "incidents.",
        "Policy and relief": "policy. state_file gate. door. trim.",
        "Requests": "proxy.",
        "Logs": "log_level log_format access_log",
    }.items()
}


def _serve(config: str | None, **flags: str | None) -> None:
    given = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    try:
        settings = load(given, config=config)
    except SettingsError as exc:
        for problem in exc.problems:
            click.echo(f"highwater: {problem}", err=True)
        sys.exit(INVALID)
    run(settings)


def run(settings: Settings) -> None:
    """Serve until the process is asked to stop; exits with FAILED where the sidecar cannot start."""
    retain_freed_memory()
    raise_limit()
    configure_log(settings.log_level, settings.log_format)
    listening = listen(settings)  # before anything is loaded for it, or looks for an engine

    from gated_proxy import exchange
    from highwater.server.main import create_app
    from highwater.server.sidecar import Server, start_line

    is_compiled = not exchange.__file__.endswith(".py")
    logging.getLogger("highwater").info("%s", start_line(settings, is_compiled=is_compiled))
    server = Server(create_app(settings), listening, shutdown_seconds=settings.shutdown_seconds)
    with suppress(KeyboardInterrupt):  # raised again by uvicorn after it has shut down in order
        server.run()
    if not server.started:
        sys.exit(FAILED)


def listen(settings: Settings) -> dict[str, list[socket.socket]]:
    """Listen on the ports, by their settings; clients wait until they are accepted. Exits where one cannot be."""
    is_apart = settings.control_port is not None and not settings.has_data_plane
    ports = {"control_port": settings.control_port, "port": None if is_apart else settings.port}
    listening: dict[str, list[socket.socket]] = {}
    for setting, port in ((name, number) for name, number in ports.items() if number is not None):
        try:
            listening[setting] = _listen_at(settings.host, port)
        except OSError as exc:
            problem = listening_problem(exc, setting, settings.host, port)
            logging.getLogger("highwater").error("%s", problem)  # noqa: TRY400 - complete without a traceback
            sys.exit(INVALID)
    return listening


def _listen_at(host: str, port: int) -> list[socket.socket]:
    """Listen at each address of ``host`` whose family this kernel has; raises OSError, also where it has none."""
    found = list(dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)))
    listening: list[socket.socket] = []
    for family, *_, address in found:
        try:
            listening.append(socket.create_server(address, family=family, backlog=2048))
        except OSError as exc:
            # Most /etc/hosts name ::1 for localhost as well; a kernel may lack IPv6, or have it switched off.
            if exc.errno not in _NOT_HERE or (not listening and address == found[-1][-1]):
                raise
    return listening


def listening_problem(exc: OSError, setting: str, host: str, port: int) -> str:
    reason = os_reason(exc).partition(" (while")[0]
    if isinstance(exc, socket.gaierror) or exc.errno in _NOT_HERE:
        return (
            f"host: {masked(host)!r} is no address of this machine ({reason}); set host to one, to 127.0.0.1 "
            "for this machine alone, or to 0.0.0.0 for all of its addresses"
        )
    problem = f"{setting}: cannot listen on {host} port {port}: {reason}"
    if exc.errno == errno.EADDRINUSE:
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared with, not bound to
        base = f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"
        if ask(base, PATHS["live"], _PROBE_SECONDS) is None:
            problem += " (what has it answers /livez, as a sidecar does)"
        elif ask(base, "/health", _PROBE_SECONDS) is None:
            problem += " (what has it answers /health, as vLLM does)"
        return f"{problem}; stop it, or set {setting} to a port that is free"
    if exc.errno == errno.EACCES:
        return f"{problem}; set {setting} to 1024 or above, or grant the capability NET_BIND_SERVICE"
    return f"{problem}; set {setting} to a port that is free, and host to an address of this machine"


# --- its own log: lines for people, or one JSON object a line, uvicorn's and Python's warnings included ---

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# uvicorn's general log has this name.
_NAMES: Final = {"uvicorn.error": "uvicorn"}


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: ``time`` (UTC), ``level``, ``logger``, ``message``, and ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line)


def _with_plain_name(record: logging.LogRecord) -> bool:
    record.name = _NAMES.get(record.name, record.name)
    return True


def configure_log(level: str, form: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(_TEXT))
    handler.addFilter(_with_plain_name)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(capture=True)
    # A line for each control call is noise, and our own lines report uvicorn's start.
    for name in ("httpx", "uvicorn.error"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))


# --- its flags ---


def is_among(key: str, keys: tuple[str, ...]) -> bool:
    return key in keys or key.startswith(tuple(own for own in keys if own.endswith(".")))


def _option(key: str, field: FieldInfo) -> click.Option:
    default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
    shown = "see docs/policy.md" if key == "policy.rules" else "none" if default in (None, ()) else str(default)
    text = f"{field.description} [{variable(key)}; default: {shown}]"
    metavar = "JSON" if is_list(field) else key.rpartition(".")[2].upper()
    return click.Option([f"--{key.replace('_', '-')}", key.replace(".", "__")], help=text, metavar=metavar)


class _Serve(click.Command):
    """``serve``, with its options in the groups of ``SETTINGS``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {str(option.name).replace("__", "."): option.get_help_record(ctx) for option in self.get_params(ctx)}
        for title, group in SETTINGS.items():
            names = [name for name in rows if is_among(name, group)]
            with formatter.section(title):
                formatter.write_dl([row for name in names if (row := rows.pop(name)) is not None])
        with formatter.section("Other"):
            formatter.write_dl([row for row in rows.values() if row is not None])


serve: Final = _Serve(
    "serve",
    callback=_serve,
    params=[
        click.Option(["--config"], metavar="FILE", help=f"settings in TOML or YAML, same keys [{CONFIG_VARIABLE}]"),
        *(_option(key, field) for key, field in keys()),
    ],
    help="Run the sidecar beside a vLLM server. A flag beats the --config file, that the environment, and that the "
    "file that HIGHWATER_CONFIG names.",
)
