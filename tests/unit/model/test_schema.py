"""The version of the JSON, said in one place."""

from __future__ import annotations

import ast
from pathlib import Path

APP = Path(__file__).resolve().parents[3] / "app"


def literal_schemas(folder: Path) -> list[str]:
    """Return the lines that write a ``schema`` as a bare number."""
    return [
        f"{path.relative_to(folder)}:{key.lineno}"
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "schema"
        if isinstance(value, ast.Constant) and isinstance(value.value, int)
    ]


def test_no_schema_is_a_bare_number():
    assert literal_schemas(APP) == []
