"""The files of the two reports: checked before the load, written in one step after it, and never over another file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from highwater.errors import HighwaterError

SUFFIXES: Final = (".html", ".md")


class NoReport(HighwaterError):
    """A report cannot be written there; the message is one line that says why, and what to do."""


class ReportFiles:
    """The two files of one experiment.

    Args:
        out: Their path with or without one of the suffixes, or a folder; ``None``: the working folder. A name with the
            time in it is made where none is given.
        force: Whether files that are there are replaced.
        now: Unix seconds.

    Raises:
        NoReport: Nothing can be written there, or something is there.
    """

    def __init__(self, out: Path | None, *, force: bool, now: float) -> None:
        self._force = force
        self._stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%d-%H%M%SZ")
        try:
            self._stem = _stem(out, f"highwater-{self._stamp}")
            self._check()
        except OSError as exc:  # a folder on the way that may not be looked into, a name that is too long
            raise NoReport(f"the report cannot be written to {out}: {exc.strerror}; --out names another place") from exc

    @property
    def paths(self) -> tuple[Path, ...]:
        """HTML, and Markdown."""
        return tuple(self._stem.with_name(self._stem.name + suffix) for suffix in SUFFIXES)

    def write(self, texts: Mapping[str, str]) -> tuple[Path, ...]:
        """Write each text under its suffix; where a file has come there meanwhile, beside it.

        Raises:
            NoReport: It could not be written.
        """
        return tuple(self._write(path, texts[suffix]) for path, suffix in zip(self.paths, SUFFIXES, strict=True))

    def _check(self) -> None:
        folder = self._stem.parent
        for path in self.paths:
            if path.is_dir():
                raise NoReport(f"{path} is a folder; --out takes the path of a file, with or without .html or .md")
            if path.exists() and not self._force:
                raise NoReport(f"{path} is there already; --force replaces it, another --out leaves it")
        try:
            draft = _draft(folder, "check")
            draft.touch(exist_ok=False)
            draft.unlink()
        except OSError as exc:
            raise NoReport(f"the report cannot be written into {folder}: {exc.strerror}; --out names another") from exc

    def _write(self, path: Path, text: str) -> Path:
        draft = _draft(path.parent, path.suffix)
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if self._force:
                draft.replace(path)
                return path
            return _linked(draft, path, self._stamp)
        except OSError as exc:
            raise NoReport(f"{path} could not be written: {exc.strerror}") from exc
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def _stem(out: Path | None, name: str) -> Path:
    if out is None:
        return Path.cwd() / name
    if out.is_dir():
        return out.absolute() / name
    return (out.with_suffix("") if out.suffix.lower() in SUFFIXES else out).absolute()


def _draft(folder: Path, what: str) -> Path:
    return folder / f".highwater-{what.lstrip('.')}-{secrets.token_hex(4)}.part"


def _linked(draft: Path, path: Path, stamp: str) -> Path:
    """A link fails where a file is, so nothing that came there during the load is lost."""
    try:
        os.link(draft, path)
    except FileExistsError:
        other = path.with_name(f"{path.stem}-{stamp}-{secrets.token_hex(2)}{path.suffix}")
        os.link(draft, other)
        return other
    except OSError:  # a file system without links
        draft.replace(path)
    return path
