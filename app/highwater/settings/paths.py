"""The kinds of paths that settings name. Each is absolute: the sidecar's working directory means nothing to others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator


def _absolute(what: str, is_valid: Callable[[Path], bool]) -> AfterValidator:
    def check(path: Path) -> Path:
        if not (path.is_absolute() and is_valid(path)):
            raise ValueError(f"must be the absolute path of {what}")
        return path

    return AfterValidator(check)


ExistingFolder: TypeAlias = Annotated[Path, _absolute("a folder that exists", Path.is_dir)]
Folder: TypeAlias = Annotated[Path, _absolute("a folder", lambda path: path.is_dir() or not path.exists())]
File: TypeAlias = Annotated[Path, _absolute("a file", lambda path: not path.is_dir())]
FileInFolder: TypeAlias = Annotated[
    Path,
    _absolute("a file in a folder that exists", lambda path: path.parent.is_dir() and not path.is_dir()),
]
