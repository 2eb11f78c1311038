"""The process that reads a foreign pickle: ``python -P -m highwater.snapshots.reading``.

It gets open files as descriptors and options as JSON, and prints one JSON object, bounded in size. Its address space
and its processor time are limited before the first byte is read, it ends with its parent, and its unpickler knows no
class and no function. A refusal is data in its output; any other fault ends it.
"""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import pickle
import resource
import signal
import sys
from typing import Any, Final, NoReturn

from highwater.snapshots import SnapshotError, UnsafePickle
from highwater.snapshots.difference import differ
from highwater.snapshots.explanation import explain
from highwater.snapshots.model import Snapshot, parse
from highwater.snapshots.pickle_scan import BOUNDS, scan
from highwater.snapshots.picture import bars_of

ADDRESS_SPACE: Final = 6 << 30
PROCESSOR_SECONDS: Final = 240
_PR_SET_PDEATHSIG: Final = 1


class _NoNames(pickle.Unpickler):
    """Builds plain data only, even if the scan missed something."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnsafePickle(f"it names {module}.{name}: a snapshot is plain data")

    def persistent_load(self, pid: object) -> NoReturn:
        raise UnsafePickle(f"it names {pid!r}, which lies outside it: a snapshot is plain data")


def load(data: bytes) -> object:
    """Return the content of a pickle of plain data.

    Raises:
        UnsafePickle: It is no such pickle, or beyond the bounds.
    """
    scan(data)
    try:
        return _NoNames(io.BytesIO(data)).load()
    except SnapshotError:
        raise
    except MemoryError as exc:
        raise UnsafePickle(f"it needs more than {ADDRESS_SPACE >> 30} GiB to be read") from exc
    except Exception as exc:
        raise UnsafePickle(f"it is not a complete pickle: {type(exc).__name__}") from exc


def read(descriptor: int) -> Snapshot:
    """Return the snapshot in an open file.

    Raises:
        SnapshotError: It cannot be read; the text says why.
    """
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(BOUNDS.nbytes + 1)
    return parse(load(data))


def limit_this_process(parent: int) -> None:
    """Set the limits, and have the kernel end this process with its parent.

    Raises:
        SystemExit: The parent has ended already.
    """
    for kind, most in ((resource.RLIMIT_AS, ADDRESS_SPACE), (resource.RLIMIT_CPU, PROCESSOR_SECONDS)):
        _, hard = resource.getrlimit(kind)
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (wanted, wanted))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was told
        raise SystemExit(1)


def answer(options: dict[str, Any]) -> dict[str, Any]:
    """Return one file explained, or two compared.

    Args:
        options: ``files`` (open descriptors, one or two), ``want`` (bytes or null), ``picture`` (whether to draw it).
    """
    try:
        snapshots = [read(descriptor) for descriptor in options["files"]]
        if len(snapshots) > 1:
            return {"ok": True, "difference": differ(*snapshots)}
        drawn = {"picture": bars_of(snapshots[0])} if options["picture"] else {}
        return {"ok": True, "explanation": explain(snapshots[0], options["want"]), **drawn}
    except MemoryError:
        return {"ok": False, "error": f"it needs more than {ADDRESS_SPACE >> 30} GiB to be read"}
    except SnapshotError as exc:
        return {"ok": False, "error": str(exc)}


def main() -> None:
    """Read the files of the command line, and print the answer."""
    options = json.loads(sys.argv[1])
    limit_this_process(options["parent"])
    gc.disable()  # everything is kept until the end: collecting garbage would cost more than reading
    json.dump(answer(options), sys.stdout)


if __name__ == "__main__":
    main()
