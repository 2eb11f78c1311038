"""The command line: the group of all commands, each imported when it is used, so that `--help` is immediate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from highwater import __version__

# The list in `highwater --help`: each command with the module below `terminal` that has it, and at most 45 characters.
COMMANDS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "Watch": {
        "status": ("status", "is all well; where the memory is"),
        "top": ("top.top", "the memory, live"),
        "events": ("events", "what happened, or happens"),
        "incidents": ("incidents", "what the engine died of"),
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
        "check": ("check", "what is not set up right, and the change"),
        "token": ("setup", "the admin token of this machine's sidecar"),
        "extension": ("setup", "copy the worker package for vLLM"),
        "healthcheck": ("healthcheck", "the sidecar's health as an exit status"),
        "completion": ("setup", "completion for bash, zsh or fish"),
    },
    "Plan and measure": {
        "plan": ("plan.command", "what other vLLM flags would do"),
        "measure": ("measure.command", "run a load, and report the memory under it"),
        "demo": ("demo.command", "a real engine on CPU, and the story on it"),
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
