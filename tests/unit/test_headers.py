"""What a module's words say of the code is so: the modules that they name exist, and what is pure reads nothing."""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"highwater": ROOT / "app" / "highwater", "highwater_worker": ROOT / "worker_ext" / "highwater_worker"}
FILES = [path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py")) if path.parent.name != "shim"]

# As in the contract on the decision (pyproject.toml), which also follows imports. A time may be formatted.
IMPURE = frozenset(
    {"asyncio", "datetime", "httpx", "logging", "os", "pathlib", "random", "socket", "subprocess", "threading"}
)
FORMATS_TIME = frozenset({"strftime", "localtime", "gmtime"})
SAYS_PURE = re.compile(r"\bPure\b[;:.,]")

# A folder, a module in it, and perhaps a name of that: `watch.round`, ``state.learn``.
DOTTED = re.compile(r"(?<![\w.`/])`{1,2}([a-z_]+(?:\.\w+)+)`{1,2}")
# The kernel's, OpenTelemetry's, vLLM's, a setting, and placeholders.
FOREIGN = frozenset(
    {"memory.current", "memory.events", "memory.stat", "process.pid", "vllm.general_plugins", "policy.mode"}
    | {"torch.Tensor", "worker.execute_model", "output.get_output", "worker.name", "owner.name", "root.a.b.c"}
)
FILE_ENDS = frozenset({"css", "js", "json", "py", "toml", "yaml"})


def named(path: Path) -> Iterator[str]:
    """The dotted names in a file's comments and docstrings."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT or '"""' in token.string[:4]:
                yield from DOTTED.findall(token.string)


def candidates(path: Path, first: str) -> list[Path]:
    """The folders and modules that the first part of a name may mean in a file: beside it, a room, or a package."""
    root = next(folder for folder in PACKAGES.values() if path.is_relative_to(folder))
    return [
        place
        for folder in (path.parent, root, root.parent, ROOT)
        for place in (folder / first, folder / f"{first}.py")
        if place.exists() and place != path
    ]


def is_there(place: Path, rest: list[str]) -> bool:
    if place.suffix == ".py":
        source = place.read_text("utf-8")
        return not rest or re.search(rf"^ *(?:(?:async )?def |class )?{rest[0]}\b", source, re.MULTILINE) is not None
    if not rest:
        return True
    return any(is_there(inner, rest[1:]) for end in ("", ".py") if (inner := place / f"{rest[0]}{end}").exists())


def test_every_module_that_is_named_exists():
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        for name in named(path)
        if name not in FOREIGN
        and (parts := name.split("."))[-1] not in FILE_ENDS
        and parts[0] not in sys.stdlib_module_names
        and not any(is_there(place, parts[1:]) for place in candidates(path, parts[0]))
    ]
    assert wrong == []


PURE = [path for path in FILES if SAYS_PURE.search(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")]


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_says_that_it_is_pure_has_no_clock_and_no_io(path: Path):
    tree, found = ast.parse(path.read_text("utf-8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            assert node.attr in FORMATS_TIME
    assert not found & IMPURE
