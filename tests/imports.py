"""The files that a file imports, and those that they import in turn, read from the source: nothing is run.

Imports inside functions and under `TYPE_CHECKING` count too. What is started as a process of its own is not seen here:
a topic of `tests/topics.py` names it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FOLDERS = (".", "app", "worker_ext")
"""The folders that modules are looked for in, as in pytest's `pythonpath`."""


def imported_by(files: Iterable[Path], root: Path = ROOT) -> set[Path]:
    """Return these files and every file below the root that they import, at any depth.

    A test file brings the `conftest.py` of each folder that it lies in.
    """
    found = set[Path]()
    waiting = [path for path in files if path.suffix == ".py"]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imports(path, root)
    return found


@cache
def _imports(path: Path, root: Path) -> frozenset[Path]:
    names = set(_names(ast.parse(path.read_bytes()), path.relative_to(root)))
    return frozenset(file for name in names for file in _files(name, root)) | _conftests(path, root)


def _names(tree: ast.Module, path: Path) -> Iterator[str]:
    """Yield every name that is imported; of `from a import b` both `a` and `a.b`, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.parts[: -node.level]) if node.level else ""
            start = ".".join(filter(None, (package, node.module)))
            yield from (start, *(f"{start}.{alias.name}" for alias in node.names))


@cache
def _files(name: str, root: Path) -> frozenset[Path]:
    """Return the module of a name, with the packages that it is in; nothing for a library's."""
    parts = name.split(".")
    places = [root.joinpath(folder, *parts[: n + 1]) for folder in _FOLDERS for n in range(len(parts))]
    candidates = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return frozenset(file for file in candidates if file.is_file())


def _conftests(path: Path, root: Path) -> frozenset[Path]:
    if not path.name.startswith("test_"):
        return frozenset()
    folders = (folder for folder in path.parents if folder.is_relative_to(root / "tests"))
    return frozenset(file for folder in folders if (file := folder / "conftest.py").is_file())
