"""The head of a worker's file: its writer's identity, and other values that are constant while it is written."""

from __future__ import annotations

from pathlib import Path
from threading import main_thread
from typing import TYPE_CHECKING, Any

from highwater_worker.devices import describe_device
from highwater_worker.errors import printable
from highwater_worker.identity import identity, model_name, parallel_sizes, pid_started, ranks_expected

if TYPE_CHECKING:
    from highwater_worker.notes import Notes

_ROOT = Path("/")
_MAX_NAME_CHARACTERS = 200
"""For a host's or a device's name: the machine chooses them, and the file's header has a fixed size."""


def file_identity(worker: object, instance: str, notes: Notes, root: Path = _ROOT) -> dict[str, Any]:
    """Return the identity, without the time and the options of the recorder's start.

    Args:
        worker: The worker.
        instance: The caller's name for this life of the engine.
        notes: Gets the names of values that could not be read.
        root: The file system's root; a test brings its own.
    """
    who = identity(worker)
    device = describe_device(worker, notes)[1]
    return {
        "instance": instance,
        **who,
        "host": _short(who["host"]),
        "pid_started": notes.attempt("pid_started", lambda: pid_started(root)),
        "boot_id": notes.attempt("boot_id", lambda: boot_id(root)),
        "device": {
            **device,
            "type": _short(device["type"]),
            "name": _short(device["name"]),
            "uuid": _short(device["uuid"]),
        },
        "main_thread": main_thread().ident,
        "model": _short(notes.attempt("model", lambda: model_name(worker))),
        "rpc": callable(getattr(worker, "highwater_rpc", None)),
        "ranks_expected": notes.attempt("ranks_expected", lambda: ranks_expected(worker)),
        **parallel_sizes(worker),
    }


def _short(name: str | None) -> str | None:
    return None if name is None else printable(name, _MAX_NAME_CHARACTERS)


def boot_id(root: Path = _ROOT) -> str:
    """Return what names this boot of the machine.

    Raises:
        OSError: The kernel does not report it.
    """
    return printable((root / "proc/sys/kernel/random/boot_id").read_text("ascii", "replace"), 64)
