"""State that outlives the sidecar: one small JSON object in one file, with a section for each part that keeps some.

It is replaced in one step, so that a crash leaves the old or the new one whole. A file that cannot be read is set
aside, never deleted or overwritten. It belongs to one sidecar, which reads it once.

::

    {"schema": 1, "policy": {...}}
"""

from __future__ import annotations

import copy
import json
import os
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater.model.units import MIB
from highwater.process.errors import NotKept, os_reason
from highwater.process.regular import FileTooLargeError, NotARegularFileError, read_regular, replace_private
from highwater.process.untrusted import parse_json

SCHEMA = 1
MAX_FILE_BYTES = MIB


class _Unusable(Exception):
    """The file's content cannot be used."""


class StateFile:
    """The state file; without a path nothing is kept and nothing is read.

    ``path`` must be absolute, in a folder that exists: none is ever made. Links are followed. ``problem`` is what was
    wrong with it at the start, in one sentence.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = Path(os.path.realpath(path)) if path is not None else None
        self.problem: str | None = None
        self._sections: dict[str, dict[str, Any]] = {}
        self._is_in_the_way = False
        # Writers come from threads, because the disk may be slow, and from the event loop, where order matters more.
        self._turn = threading.Lock()
        if (file := self.path) is None:
            return
        try:
            self._sections = _sections(read_regular(file, MAX_FILE_BYTES, follows_link=True))
        except NotARegularFileError:
            self._set_aside(file, "is not a file")
        except FileTooLargeError:
            self._set_aside(file, f"has more than {MAX_FILE_BYTES} bytes")
        except FileNotFoundError:
            if not os.access(file.parent, os.W_OK | os.X_OK):
                self.problem = f"state_file: {file} cannot be written: {file.parent} is missing or not writable"
        except _Unusable as exc:
            self._set_aside(file, str(exc))
        except OSError as exc:
            self._set_aside(file, f"cannot be read: {os_reason(exc)}")

    @property
    def configured(self) -> bool:
        return self.path is not None

    def read(self, section: str) -> dict[str, Any] | None:
        with self._turn:
            return copy.deepcopy(self._sections.get(section))

    def write(self, section: str, value: Mapping[str, Any] | None) -> None:
        """Keep the section (None removes it), on the disk when this returns. Raises NotKept; the former one stands."""
        if self.path is None:
            return
        with self._turn:
            sections = {name: kept for name, kept in self._sections.items() if name != section}
            if value is not None:
                sections[section] = copy.deepcopy(dict(value))
            elif section not in self._sections:
                return
            if self._is_in_the_way:
                raise NotKept(self.path, "an unusable file is in its place; move it away and start the sidecar again")
            content = json.dumps({"schema": SCHEMA, **sections}, indent=1, allow_nan=False).encode() + b"\n"
            if len(content) > MAX_FILE_BYTES:
                size = f"{len(content)} bytes, more than the {MAX_FILE_BYTES} that are allowed"
                raise NotKept(self.path, f"it would have {size}")
            try:
                replace_private(self.path, content)
            except OSError as exc:
                raise NotKept(self.path, os_reason(exc)) from exc
            self._sections = sections

    def _set_aside(self, path: Path, reason: str) -> None:
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise NotARegularFileError
            stamp = int(time.time())
            while (aside := path.with_name(f"{path.name}.corrupt-{stamp}")).exists():
                stamp += 1
            path.rename(aside)
        except OSError as exc:
            self._is_in_the_way = True
            why = "it is no file of ours" if isinstance(exc, NotARegularFileError) else os_reason(exc)
            self.problem = f"state_file: {path} {reason}, and was not set aside: {why}; nothing can be kept"
        else:
            self.problem = f"state_file: {path} {reason}; it was set aside as {aside}, and nothing of it is in force"


def _sections(content: bytes) -> dict[str, dict[str, Any]]:
    try:
        whole = parse_json(content.decode("utf-8"))
    except ValueError as exc:
        raise _Unusable("is not valid JSON") from exc
    if not isinstance(whole, dict):
        raise _Unusable("is not a JSON object")
    schema = whole.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        raise _Unusable(f"is not of schema {SCHEMA}")
    if not all(isinstance(section, dict) for section in whole.values()):
        raise _Unusable("has a section that is not a JSON object")
    return whole
