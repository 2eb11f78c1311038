"""The package can be put into any engine's image: old Python, nothing installed, nothing started by the import."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import highwater_worker

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(Path(highwater_worker.__file__).parent.rglob("*.py"))
OLDEST = (3, 9)  # vLLM 0.11 and vllm-ascend 0.11 still allow it (their metadata: Requires-Python >=3.9)
OPERATIONS = """
import sys
sys.path[:0] = {folders!r}
import json, tempfile
from highwater_worker.operations import OPERATIONS
from tests.unit.worker_ext.fakes import FakeTensor, FakeTorch, ask, fake_runner, fake_worker
sys.modules["torch"] = FakeTorch("npu")
worker = fake_worker(model_runner=fake_runner(encoder_cache={{"a": FakeTensor(5)}}), execute_model=print)
with tempfile.TemporaryDirectory() as directory:
    instance = {{"instance": "0123456789abcdef"}}
    payloads = {{
        "recorder_start": {{"directory": directory, **instance}},
        "recorder_stop": instance,
        "snapshot": {{"directory": directory, "name": "one"}},
    }}
    ops = sorted(OPERATIONS)
    for op in sorted(ops, key=lambda op: op == "recorder_stop"):
        ask(worker, op, json.dumps(payloads.get(op, {{}})))
print(sys.version_info[:2], len(ops))
"""


def imports(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            yield node.module


def interpreters():
    """Yield every CPython 3.9 of this machine: on the path, and pyenv's."""
    for folder in os.get_exec_path():
        yield Path(folder, "python3.9")
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(root.glob("versions/3.9*/bin/python3.9"))


def runs(interpreter: Path) -> bool:
    """Say whether it is one: pyenv puts a script of that name on the path whether the version is there or not."""
    if not interpreter.is_file():
        return False
    done = subprocess.run([interpreter, "-I", "-c", ""], check=False, capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_the_grammar_of_python_3_9(path):
    """Images of engines that are still in use have it. Annotations are never evaluated, so that they may be newer."""
    tree = ast.parse(path.read_text(), feature_version=OLDEST)
    lazy = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    assert lazy or not any(isinstance(node, (ast.AnnAssign, ast.FunctionDef)) for node in ast.walk(tree))


def test_nothing_in_it_came_after_python_3_9():
    folder = Path(highwater_worker.__file__).parent
    vermin = Path(sys.executable).with_name("vermin")
    command = [vermin, "-t=3.9-", "--violations", "--no-tips", "--processes=1", folder]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_operation_answers_on_python_3_9():
    interpreter = next((one for one in interpreters() if runs(one)), None)
    if interpreter is None:
        pytest.skip("no CPython 3.9 on this machine's path, and none of pyenv's")
    code = OPERATIONS.format(folders=[str(ROOT), str(ROOT / "worker_ext")])
    done = subprocess.run([interpreter, "-B", "-I", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(3, 9)")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_only_the_standard_library_and_its_own(path):
    """The engine's image brings nothing of ours; torch comes late and by name."""
    roots = {name.partition(".")[0] for name in imports(ast.parse(path.read_text()))}
    assert roots <= set(sys.stdlib_module_names) | {"highwater_worker"}


def run_alone(code: str) -> None:
    """Run a program that has the package on its path and nothing else of ours."""
    folder = str(Path(highwater_worker.__file__).parent.parent)
    program = f"import sys; sys.path.insert(0, {folder!r})\n{code}"
    assert subprocess.run([sys.executable, "-I", "-c", program], check=False).returncode == 0


def test_the_readers_of_the_kernels_files_bring_nothing_that_watches_a_worker():
    run_alone("""
import highwater_worker.kernel.cgroup, highwater_worker.kernel.shm, highwater_worker.wire
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("highwater_worker.")}
assert loaded == {"kernel", "wire"}, loaded
""")


def test_the_import_brings_no_torch_and_starts_nothing():
    """vLLM imports it before it chooses devices, in every worker process."""
    run_alone("""
import threading
import highwater_worker
assert highwater_worker.MemoryExtension
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"torch", "torch_npu", "vllm", "highwater"}, loaded
assert threading.active_count() == 1
""")
