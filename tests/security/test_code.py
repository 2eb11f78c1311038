"""What is read from files, workers and clients is data. Held to the source: no attack could try it all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The demonstration's shim runs inside vLLM, and is no part of the sidecar.
MODULES = sorted(path for path in (ROOT / "app").rglob("*.py") if path.parent.name != "shim")
# They make code or objects of bytes.
_NEVER_IMPORTED = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch", "jinja2"}
_NEVER_CALLED = {"eval", "exec", "compile", "__import__"}
# Strings for a shell, and YAML that makes objects.
_NEVER_ATTRIBUTES = {
    ("os", "system"),
    ("os", "popen"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
}


def imported(tree: ast.AST) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_that_is_read_is_run(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    pairs = {
        (call.func.value.id, call.func.attr)
        for call in calls
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
    }
    keywords = {keyword.arg for call in calls for keyword in call.keywords}
    assert imported(tree) & _NEVER_IMPORTED == set()
    assert names & _NEVER_CALLED == set()
    assert pairs & _NEVER_ATTRIBUTES == set()
    assert "shell" not in keywords
