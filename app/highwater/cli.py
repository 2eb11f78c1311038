"""The command line: the group of all commands. Each is a file of ``commands/``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from highwater import __version__
from highwater.commands import terminal
from highwater.commands.demo import demo
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
from highwater.commands.serve import serve
from highwater.commands.snapshot import snapshot

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


class _Grouped(click.Group):
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        for title, commands in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()), col_max=12)


@click.group(cls=_Grouped, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="highwater")
def main() -> None:
    """Highwater: where a vLLM server's memory went, and how to get it back without failing a request."""


for command in (
    demo,
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
    serve,
    snapshot,
    *terminal.ALL,
):
    main.add_command(command)
