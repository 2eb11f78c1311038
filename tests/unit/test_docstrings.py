"""Docstrings speak one dialect: each begins with a verb or a noun phrase."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("app", "worker_ext", "bench", "helm")
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
