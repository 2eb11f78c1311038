"""Docstrings speak one dialect: each begins with a verb or a noun phrase, and says what its function raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("app", "worker_ext", "bench", "helm")
PACKAGES = ("app", "worker_ext")
CLAUSE = re.compile(r"(?:Who|What|Where|Whether|How|Why|When|Which)\b")


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Return line and text of each string that stands by itself: docstrings, of attributes too."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = (node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return [(constant.lineno, constant.value) for constant in found if isinstance(constant.value, str)]


def test_no_docstring_begins_as_a_question_does():
    """It says "Return whether ..." or "True if ...", not "Whether ..."."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files
        if re.search(rf"[\"']{CLAUSE.pattern}", path.read_text(encoding="utf-8"))  # else it need not be parsed
        for line, text in docstrings(path)
        if CLAUSE.match(text)
    ] == []


def silent(source: str) -> list[str]:
    """Return the public functions that raise something themselves, and whose docstring does not say so.

    Left out are commands of click, whose docstring is their help text, and methods that are documented in their base.
    """

    def public(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and each.name.startswith("_"):
                continue
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                yield each
            elif isinstance(each, ast.ClassDef | ast.If | ast.Try):
                yield from public(each)

    def raises(node: ast.AST) -> bool:
        inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        parts = [each for each in ast.iter_child_nodes(node) if not isinstance(each, inner)]
        return any((isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call)) or raises(each) for each in parts)

    return [
        each.name
        for each in public(ast.parse(source))
        if (told := ast.get_docstring(each)) and "aises" not in told and raises(each) and not is_command(each)
    ]


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Say whether a decorator makes a command, or a group of them, of it."""
    return any(re.search(r"\b(?:command|group)\b", ast.unparse(each)) for each in function.decorator_list)


def test_a_public_function_says_what_it_raises():
    """Under `Raises:`, or in its sentence: callers see it without reading the body."""
    texts = {path: path.read_text(encoding="utf-8") for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")}
    found = {str(path.relative_to(ROOT)): silent(text) for path, text in texts.items() if "raise " in text}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("line", "documented", "seen"),
    [
        ("raise ValueError(1)", "Do it.", ["one"]),
        ("raise ValueError(1)", "Do it.\n\n    Raises:\n        ValueError: Always.", []),
        ("raise", "Do it.", []),
        ("def two(): raise ValueError(1)", "Do it.", []),
    ],
    ids=["silent", "told", "again", "within"],
)
def test_a_silent_function_is_seen(line: str, documented: str, seen: list[str]):
    """Exceptions that are re-raised, or raised in a nested function, are documented elsewhere."""
    assert silent(f'def one():\n    """{documented}"""\n    {line}\n') == seen
    assert silent(f'@group.command("one")\ndef one():\n    """{documented}"""\n    {line}\n') == []
