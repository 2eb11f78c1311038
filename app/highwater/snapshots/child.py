"""Files read by a separate process, whose answer is as foreign as the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from highwater.files.regular import open_regular
from highwater.snapshots import SnapshotError

WALL_SECONDS: Final = 300.0
MAX_ANSWER: Final = 8 << 20
_END_SECONDS: Final = 2.0


def ask(
    paths: Sequence[Path], *, want: int | None = None, picture: bool = False, seconds: float = WALL_SECONDS
) -> dict[str, Any]:
    """Return one file's ``explanation``, or the ``difference`` of two.

    Args:
        paths: One or two files.
        want: Bytes of a request to judge by.
        picture: Whether to return a picture's data as well.
        seconds: The time limit.

    Raises:
        SnapshotError: A file does not exist, is not a snapshot, is refused, or takes too long.
    """
    with ExitStack() as stack:
        opened = [_opened(path, stack) for path in paths]
        output = stack.enter_context(tempfile.TemporaryFile())  # a pipe could be filled without end
        options = {"files": opened, "want": want, "picture": picture, "parent": os.getpid()}
        command = [sys.executable, "-P", "-m", "highwater.snapshots.reading", json.dumps(options)]
        # -P: nothing is imported from the working directory.
        with subprocess.Popen(  # noqa: S603 - our own module, and numbers
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, pass_fds=opened
        ) as process:
            try:
                _, errors = process.communicate(timeout=seconds)
            except BaseException as exc:
                _end(process)
                if isinstance(exc, subprocess.TimeoutExpired):
                    raise SnapshotError(f"it was not read within {seconds:.0f} s") from exc
                raise
        output.seek(0)
        return _understood(process.returncode, output.read(MAX_ANSWER + 1), errors)


def _opened(path: Path, stack: ExitStack) -> int:
    try:
        descriptor = open_regular(path)
    except OSError as exc:
        raise SnapshotError(f"{path}: {exc.strerror or exc}") from exc
    stack.callback(os.close, descriptor)
    return descriptor


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _understood(status: int, answer: bytes, errors: bytes) -> dict[str, Any]:
    if status != 0 or len(answer) > MAX_ANSWER:
        last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2][:300]
        why = f"signal {-status}: it took too much time or memory" if status < 0 else last or f"status {status}"
        raise SnapshotError(f"the process that read it ended with {why}")
    result: dict[str, Any] = json.loads(answer)
    if not result["ok"]:
        raise SnapshotError(result["error"])
    return result
