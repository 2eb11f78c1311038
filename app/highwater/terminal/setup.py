"""The commands of a set-up: print its token, copy the worker package, complete commands in a shell."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from highwater.process.admin_token import TOKEN_FILE_VARIABLE, find_token
from highwater.process.worker_package import WorkerPackageError, copy_worker_package
from highwater.terminal.cli import URL_VARIABLE, examples, own_port

_PROGRAM, _COMPLETION_VARIABLE = "highwater", "_HIGHWATER_COMPLETE"


@click.command(
    epilog=examples(
        "TOKEN=$(highwater token)",
        'curl -X POST -H "Authorization: Bearer $(highwater token)" localhost:8001/memory/reclaim',
        "kubectl exec POD -c highwater -- highwater token",
    )
)
@click.option(
    "--port",
    default=None,
    show_default="that of HIGHWATER_URL, else HIGHWATER_CONTROL_PORT, else HIGHWATER_PORT, else 8001",
    type=click.IntRange(1, 65535),
    help="the port of the control plane of the sidecar on this machine",
)
def token(port: int | None) -> None:
    """Print the admin token of the sidecar on this machine.

    Looks into HIGHWATER_ADMIN_TOKEN, then into the file that HIGHWATER_ADMIN_TOKEN_FILE names, then into the file that
    a sidecar with this port makes when it starts. On a terminal it also says where the token was found.
    """
    named = os.environ.get(URL_VARIABLE) if port is None else None
    found = find_token(named or f"http://127.0.0.1:{port or own_port(os.environ)}", os.environ)
    if found.value is None:
        makes = "`highwater serve` makes one at start; --port names its port where that is another"
        if TOKEN_FILE_VARIABLE in os.environ:
            makes = (
                "`highwater serve` makes it where it may write; in Kubernetes it is a Secret's, and `helm upgrade` "
                "makes the chart's own again"
            )
        raise click.ClickException(f"no admin token was found: {found.source}; {makes}")
    if sys.stdout.isatty():
        click.echo(f"from {found.source}:", err=True)
    click.echo(found.value)


@click.command(
    epilog=examples(
        'eval "$(highwater completion bash)"                                   in ~/.bashrc',
        'eval "$(highwater completion zsh)"                                    in ~/.zshrc, after compinit',
        "highwater completion fish > ~/.config/fish/completions/highwater.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes highwater's commands in SHELL (bash 4.4 or newer, zsh, fish)."""
    script_class = get_completion_class(shell)
    if script_class is None:
        raise click.ClickException(f"click completes nothing in {shell}")
    try:
        script = script_class(context.find_root().command, {}, _PROGRAM, _COMPLETION_VARIABLE).source()
    except RuntimeError as exc:  # a bash that is too old
        raise click.ClickException(str(exc)) from exc
    click.echo(script)


@click.command(
    epilog=examples(
        "highwater extension --copy-to /opt/highwater",
        "PYTHONPATH=/opt/highwater HIGHWATER_RECORDER_DIR=/dev/shm/highwater vllm serve MODEL",
    )
)
@click.option(
    "--copy-to",
    "folder",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="a folder of its own, for the engine's PYTHONPATH; an older copy in it is replaced",
)
def extension(folder: Path) -> None:
    """Copy the worker package, with the metadata by which vLLM finds its plugin. Nothing is installed into vLLM."""
    try:
        copied = copy_worker_package(folder)
    except WorkerPackageError as exc:
        raise click.ClickException(str(exc)) from exc
    word = "is" if copied.is_new else "is already"
    click.echo(
        f"vllm-highwater-worker {copied.version} {word} in {copied.folder}. To watch an engine, give it this folder "
        "and one for its recorders:\n"
        f"  PYTHONPATH={shlex.quote(str(copied.folder))} HIGHWATER_RECORDER_DIR=/dev/shm/highwater vllm serve MODEL\n"
        "  highwater serve --recorder-dir /dev/shm/highwater"
    )
