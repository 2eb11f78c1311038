"""Import lines name the file that defines each name, and a module that is called pure imports nothing impure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for root in ("app", "worker_ext") for path in sorted((ROOT / root).rglob("*.py"))]
IMPORTERS = [*SOURCES, *(path for root in ("tests", "bench", "docs") for path in sorted((ROOT / root).rglob("*.py")))]
# What is imported from elsewhere on purpose.
PASSED_ON = {
    ("highwater_worker", "MemoryExtension"),  # the name that is given to vLLM's --worker-extension-cls
}
# All that a pure module may import, beside ours: nothing of it does I/O, reads a clock or the environment, or logs.
# Where names are given, these alone: the others of their module do so.
CALCULATES: dict[str, set[str] | None] = {
    **dict.fromkeys(("__future__", "collections", "collections.abc", "dataclasses", "enum", "types", "typing")),
    **dict.fromkeys(("bisect", "functools", "itertools", "math", "operator", "re", "shlex", "statistics")),
    **dict.fromkeys(("binascii", "struct")),
    "json": {"JSONDecoder", "dumps", "loads"},
    "pydantic": None,
    **dict.fromkeys(f"rich.{part}" for part in ("padding", "rule", "segment", "table", "text")),
    "rich.console": {"Console", "ConsoleOptions", "Group", "RenderableType", "RenderResult"},
    "signal": {"SIGKILL", "Signals"},
    "time": {"localtime", "strftime"},
    "urllib.parse": None,
    "xml.sax.saxutils": None,
}
DOES_IO = {"__import__", "exec", "input", "open", "print"}
# Of a path that is handed in.
TOUCHES_FILES = {"exists", "iterdir", "open", "read_bytes", "read_text", "stat", "unlink", "write_bytes", "write_text"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _trees_go_with_these_tests() -> Iterator[None]:
    """Keep no trees: millions of nodes, which every later test that collects garbage would walk through."""
    yield
    tree_of.cache_clear()


@cache
def module_file(name: str) -> Path | None:
    """Return the file of one of our modules; None if we have no module of that name."""
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


def is_pure(path: Path) -> bool:
    """Return whether the module's docstring, or its package's, says that it is pure."""
    if re.search(r"\bPure[.;:]", ast.get_docstring(tree_of(path)) or ""):
        return True
    package = path.parent / "__init__.py"
    return package.is_file() and "Pure, all of it" in (ast.get_docstring(tree_of(package)) or "")


PURE = [path for path in SOURCES if is_pure(path)]


def used_of_others(tree: ast.Module) -> Iterator[tuple[int, str, str | None]]:
    """Each use of another's module: its line, the module, and the name in it."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.partition(".")[0] not in {"highwater", "gated_proxy", "kvplan"}
        ):
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield node.lineno, modules[node.value.id], node.attr


def impurities(tree: ast.Module) -> Iterator[str]:
    """Yield each thing that a pure module must not do, with its line."""
    for line, module, name in used_of_others(tree):
        allowed = CALCULATES.get(module)
        if module not in CALCULATES or (name is not None and allowed is not None and name not in allowed):
            yield f"{line}: {module} {name or ''}"
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in DOES_IO:
                yield f"{node.lineno}: calls {name}"
            case ast.Call(func=ast.Attribute(attr=name)) if name in TOUCHES_FILES:
                yield f"{node.lineno}: calls {name}"
            case ast.AsyncFunctionDef():
                yield f"{node.lineno}: waits"


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_that_says_it_is_pure_is(path: Path):
    """It does no I/O, reads no clock, and neither logs nor waits: it calculates."""
    assert list(impurities(tree_of(path))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "import time; time.monotonic()",
        "import time as clock; clock.time()",
        "from time import time",
        "from datetime import datetime",
        "import logging",
        "def late():\n    from pathlib import Path",
        "open('/proc/meminfo')",
        "path.read_text()",
        "async def wait(): ...",
    ],
)
def test_a_pure_module_that_is_not_would_be_found(line: str):
    """Wherever in the module it stands."""
    assert list(impurities(ast.parse(line)))


def test_the_decision_and_the_accounting_say_that_they_are_pure():
    """Of the policy all but the module that has decisions carried out, and the one that keeps the policy."""
    app = ROOT / "app" / "highwater"
    pure_by_design = {path for name in ("accounting", "policy", "readings") for path in (app / name).glob("*.py")}
    others = {str(path.relative_to(app)) for path in pure_by_design - set(PURE)}
    assert others == {"policy/__init__.py", "policy/governor.py", "policy/store.py"}
