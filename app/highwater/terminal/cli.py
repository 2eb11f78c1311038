"""The command line: the group of all commands, and what those that call a sidecar share on theirs.

A command is imported when it is used, so that `--help` is immediate; and nothing but click is loaded here: `highwater
healthcheck` runs often, beside a sidecar that serves traffic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import click
from click.shell_completion import CompletionItem

from highwater import __version__

# The list in `highwater --help`: each command with the module below `terminal` that has it, and at most 45 characters.
COMMANDS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "Watch": {
        "status": ("status", "is all well; where the memory is"),
        "top": ("top.top", "the memory, live"),
        "events": ("events", "what happened, or happens"),
        "incidents": ("verbs", "what the engine died of"),
        "explain": ("explain", "why the memory is as it is"),
        "host": ("verbs", "who has the host memory"),
        "growth": ("verbs", "what grows: leak or plateau, until when"),
        "get": ("verbs", "any path of the control plane"),
    },
    "Act": {
        "reclaim": ("verbs", "give memory back without failing a request"),
        "restore": ("verbs", "undo trim_encoder_cache"),
        "policy": ("verbs", "what gives memory back by itself"),
        "mark": ("verbs", "name this moment, to compare with later"),
        "snapshot": ("verbs", "PyTorch's memory snapshot of every worker"),
    },
    "Set up": {
        "serve": ("serve", "run the sidecar beside a vLLM server"),
        "check": ("status", "what is not set up right, and the change"),
        "token": ("setup", "the admin token of this machine's sidecar"),
        "extension": ("setup", "copy the worker package for vLLM"),
        "healthcheck": ("healthcheck", "the sidecar's health as an exit status"),
        "completion": ("setup", "completion for bash, zsh or fish"),
    },
    "Plan and measure": {
        "plan": ("plan.command", "what other vLLM flags would do"),
        "measure": ("measure.command", "run a load, and report the memory under it"),
        "demo": ("demo.story", "a real engine on CPU, and the story on it"),
    },
}


_MODULES: Final = {name: module for rows in COMMANDS.values() for name, (module, _) in rows.items()}
_TEXTS: Final = {name: text for rows in COMMANDS.values() for name, (_, text) in rows.items()}


class _Lazy(Mapping[str, click.Command]):
    """The commands by name, each imported when it is looked up."""

    def __getitem__(self, name: str) -> click.Command:
        command: click.Command = getattr(import_module(f"highwater.terminal.{_MODULES[name]}"), name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


@contextmanager
def _said_in_one_line(ctx: click.Context) -> Iterator[None]:
    """End with a line that begins as every other of ours where click would print the usage and ``Error:``."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.ClickException as exc:
        hint = f"; see {exc.ctx.command_path} --help" if isinstance(exc, click.UsageError) and exc.ctx else ""
        click.echo(f"highwater: {exc.format_message().rstrip('.')}{hint}", err=True)
        ctx.exit(exc.exit_code)


class _Grouped(click.Group):
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        for title, rows in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, _TEXTS[name]) for name in rows], col_max=12)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _said_in_one_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's
        with _said_in_one_line(ctx):
            return super().invoke(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete from the list above: to ask every command would import them all."""
        named = [
            CompletionItem(name, help=text) for name, text in sorted(_TEXTS.items()) if name.startswith(incomplete)
        ]
        return named + click.Command.shell_complete(self, ctx, incomplete)


@click.group(
    cls=_Grouped,
    commands=_Lazy(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, prog_name="highwater")
def main() -> None:
    """Highwater: where a vLLM server's memory went, and how to get it back without failing a request."""


# --- what commands share ---

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_URL: Final = "http://127.0.0.1:8001"
URL_VARIABLE: Final = "HIGHWATER_URL"
# Where a sidecar with this environment serves its control plane; the first that is set. Kubernetes writes tcp://...
# into variables of these names, for Services called highwater and highwater-control.
PORT_VARIABLES: Final = ("HIGHWATER_CONTROL_PORT", "HIGHWATER_PORT")
_EVERYWHERE: Final = {"", "0.0.0.0", "::"}  # noqa: S104 - compared with, not bound to


def own_port(environ: Mapping[str, str]) -> int:
    given = (environ.get(name, "") for name in PORT_VARIABLES)
    return next((int(port) for port in given if port.isdecimal()), urlsplit(DEFAULT_URL).port or 0)


def own_url(environ: Mapping[str, str]) -> str:
    """Return where a sidecar with these environment variables serves its control plane, as seen from its machine."""
    host = environ.get("HIGHWATER_HOST", "")
    scheme = "https" if environ.get("HIGHWATER_TLS__CERT_FILE") else "http"
    name = str(urlsplit(DEFAULT_URL).hostname) if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{own_port(environ)}"


def url_option_of(text: str) -> Callable[[Command], Command]:
    return click.option(
        "--url",
        envvar=URL_VARIABLE,
        default=lambda: own_url(os.environ),
        show_default="the port that HIGHWATER_CONTROL_PORT or HIGHWATER_PORT names on this machine, else 8001",
        show_envvar=True,
        metavar="URL",
        help=text,
    )


url_option: Final = url_option_of("the sidecar; its admin token is found as `highwater token` finds it")
engine_option: Final = click.option(
    "--engine-url", metavar="URL", help="ask vLLM itself at this URL: no sidecar need run; what needs one is said"
)
json_option: Final = click.option("--json", "as_json", is_flag=True, help="as JSON")


def examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
