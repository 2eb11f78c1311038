"""``highwater extension``: the worker package for an engine that it is not installed beside."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from highwater.client.options import examples
from highwater.files.worker_package import WorkerPackageError, copy_worker_package


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
