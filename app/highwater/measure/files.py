"""The files of the two reports: checked before the load, written after it, and never over another file by accident."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from highwater.errors import HighwaterError

SUFFIXES: Final = (".html", ".md")


class CannotWriteReport(HighwaterError):
    """A report cannot be written there; the message is one line that says why, and what to do."""


class ReportFiles:
    """The two files of one experiment.

    ``out`` is their path with or without one of the suffixes, or a folder (``None``: the working folder), in which the
    name is made of the time (``now``, Unix seconds). Raises CannotWriteReport: nothing can be written there, or a file
    exists and ``force`` does not replace it.
    """

    def __init__(self, out: Path | None, *, force: bool, now: float) -> None:
        self._force = force
        self._stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%d-%H%M%SZ")
        try:
            stem = _stem(out, f"highwater-{self._stamp}")
            self.paths = tuple(stem.with_name(stem.name + suffix) for suffix in SUFFIXES)
            self._check()
        except OSError as exc:  # a folder on the way that cannot be searched, a name that is too long
            raise CannotWriteReport(
                f"the report cannot be written to {out}: {exc.strerror}; --out names another place"
            ) from exc

    def write(self, texts: Mapping[str, str]) -> tuple[Path, ...]:
        """Write each text, beside a file that came there meanwhile. Raises CannotWriteReport where that failed."""
        return tuple(self._write(path, texts[suffix]) for path, suffix in zip(self.paths, SUFFIXES, strict=True))

    def _check(self) -> None:
        for path in self.paths:
            if path.is_dir():
                raise CannotWriteReport(
                    f"{path} is a folder; --out takes the path of a file, with or without .html or .md"
                )
            if path.exists() and not self._force:
                raise CannotWriteReport(f"{path} is there already; --force replaces it, another --out leaves it")
        folder = self.paths[0].parent
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise CannotWriteReport(
                f"the report cannot be written into {folder}: it is missing or not writable; --out names another place"
            )

    def _write(self, path: Path, text: str) -> Path:
        try:
            try:
                file = path.open("w" if self._force else "x", encoding="utf-8")
            except FileExistsError:
                path = path.with_name(f"{path.stem}-{self._stamp}-{secrets.token_hex(2)}{path.suffix}")
                file = path.open("x", encoding="utf-8")
            with file:
                file.write(text)
        except OSError as exc:
            raise CannotWriteReport(f"{path} could not be written: {exc.strerror}") from exc
        return path


def _stem(out: Path | None, name: str) -> Path:
    if out is None or out.is_dir():
        return (out or Path.cwd()).absolute() / name
    return (out.with_suffix("") if out.suffix.lower() in SUFFIXES else out).absolute()
