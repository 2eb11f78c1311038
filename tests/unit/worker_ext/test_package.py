"""The package can be put into any engine's image: old Python, nothing installed, nothing started by the import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import worker_ext

FILES = sorted(Path(worker_ext.__file__).parent.rglob("*.py"))
# In the standard library since 3.11 or later; vllm-ascend 0.12's images have 3.10.
NEWER_MODULES = {"tomllib", "asyncio.taskgroups", "compression", "annotationlib", "concurrent.interpreters"}
NEWER_NAMES = {
    "Self", "assert_never", "assert_type", "LiteralString", "Never", "NotRequired", "Required", "Unpack",
    "TypeVarTuple", "dataclass_transform", "reveal_type", "override", "StrEnum", "UTC", "ExceptionGroup",
    "BaseExceptionGroup", "TaskGroup", "batched", "chdir", "verify", "add_note",
}  # fmt: skip


def imports(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            yield node.module


def names(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_python_3_10(path):
    """Images of engines that are still in use have it."""
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    assert not NEWER_MODULES & set(imports(tree))
    assert not NEWER_NAMES & set(names(tree))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_only_the_standard_library_and_its_own(path):
    """The engine's image brings nothing of ours; torch comes late and by name."""
    roots = {name.partition(".")[0] for name in imports(ast.parse(path.read_text()))}
    assert roots <= set(sys.stdlib_module_names) | {"worker_ext"}


def test_the_import_brings_no_torch_and_starts_nothing():
    """vLLM imports it before it chooses devices, in every worker process."""
    code = """
import sys, threading
import worker_ext
assert worker_ext.MemoryExtension
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"torch", "torch_npu", "vllm", "app"}, loaded
assert threading.active_count() == 1
"""
    folder = Path(worker_ext.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"], check=False
    )
    assert done.returncode == 0
