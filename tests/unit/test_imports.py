"""What an import line says of the code: which file defines a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for root in ("app", "worker_ext") for path in sorted((ROOT / root).rglob("*.py"))]
IMPORTERS = [*SOURCES, *(path for root in ("tests", "bench", "docs") for path in sorted((ROOT / root).rglob("*.py")))]
# What is imported from elsewhere on purpose.
PASSED_ON = {
    ("highwater_worker", "MemoryExtension"),  # the name that is given to vLLM's --worker-extension-cls
    ("highwater.client.answers", "cleaned"),  # what a command shows of a response, it cleans as the readers there do
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def module_file(name: str) -> Path | None:
    """The file of a module of ours; None where there is none of this name."""
    places = [ROOT / root / name.replace(".", "/") for root in ("app", "worker_ext")]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


@cache
def defined(path: Path) -> frozenset[str]:
    """The names that a module gives a value outside of its functions and classes, without what it imports."""

    def names(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
                continue
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    yield from names([child])
                elif isinstance(child, ast.ExceptHandler):
                    yield from names(child.body)
                else:
                    found = (one for one in ast.walk(child) if isinstance(one, ast.Name))
                    yield from (one.id for one in found if isinstance(one.ctx, ast.Store))

    return frozenset(names(tree_of(path).body))


def test_a_value_is_imported_from_the_file_that_defines_it():
    """Neither a package's own file nor another module passes it on, so that an import line says where it is."""
    astray = {
        f"{path.relative_to(ROOT)}:{node.lineno}: {alias.name} is not defined in {node.module}"
        for path in IMPORTERS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module is not None and (file := module_file(node.module))
        for alias in node.names
        if alias.name not in defined(file) and module_file(f"{node.module}.{alias.name}") is None
        if (node.module, alias.name) not in PASSED_ON
    }
    assert sorted(astray) == []
