"""What we rely on in vllm-ascend and torch_npu, held against the published wheels.

There is no NPU here, and the wheels cannot be imported without one: their source is read instead. Each wheel is fetched
once (25 MB on average) and kept beside the demonstration engine.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pytest

from tests.engine.published import wheel_of
from worker_ext import MemoryExtension
from worker_ext.devices.accelerator import _KEYS
from worker_ext.operations.hello import _RUNNER_MODULES
from worker_ext.state import ATTRIBUTE

OURS = {name for name in dir(MemoryExtension) if not name.startswith("__")} | {ATTRIBUTE}
RUNNER_V1 = "vllm_ascend/worker/model_runner_v1.py"
RUNNER_V2 = "vllm_ascend/worker/v2/model_runner.py"


@dataclass(frozen=True)
class Ascend:
    """What one version of vllm-ascend has."""

    version: str
    worker: str
    worker_sets: frozenset[str]
    """Attributes of the worker's own that we read."""
    inherits: bool
    """Its runner is vLLM's with changes, rather than a copy of it."""
    runner_sets: frozenset[str]
    """Attributes that we read and that the runner itself, rather than vLLM's, sets."""
    has_v2: bool


OLD, NEW = "vllm_ascend/worker/worker_v1.py", "vllm_ascend/worker/worker.py"
OWN_RUNNER = frozenset({"device", "encoder_cache", "kv_caches", "requests", "supports_mm_inputs", "drafter"})
BEFORE_15 = frozenset({"device", "model_runner", "init_npu_memory"})
SINCE_15 = frozenset({"device", "model_runner", "init_snapshot", "requested_memory"})
ASCEND = (
    # 0.11 keeps no device on the worker: it is read from the runner.
    Ascend("0.11.0", OLD, BEFORE_15 - {"device"}, inherits=False, runner_sets=OWN_RUNNER, has_v2=False),
    Ascend("0.12.0rc1", OLD, BEFORE_15, inherits=True, runner_sets=frozenset({"drafter"}), has_v2=False),
    Ascend("0.13.0", NEW, BEFORE_15, inherits=True, runner_sets=frozenset({"drafter"}), has_v2=True),
    Ascend("0.18.0", NEW, SINCE_15, inherits=True, runner_sets=frozenset({"model_memory_usage"}), has_v2=True),
    Ascend("0.23.0", NEW, SINCE_15, inherits=True, runner_sets=frozenset({"model_memory_usage"}), has_v2=True),
)
TORCH_NPU = ("2.7.1", "2.8.0", "2.9.0", "2.10.0.post4")


@pytest.fixture(scope="session")
def wheel():
    """`wheel("torch_npu", "2.8.0")`, fetched with pip on first use."""
    return wheel_of


def class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def attributes_set(node: ast.ClassDef) -> set[str]:
    """Return methods, class attributes, and everything assigned to `self`."""
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            names.add(inner.attr)
    targets = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
    targets += [target for item in node.body if isinstance(item, ast.Assign) for target in item.targets]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def origin_of_base(tree: ast.Module, node: ast.ClassDef, base: str) -> str:
    """Return the module that a base class was imported from."""
    assert base in {ast.unparse(item).split(".")[-1] for item in node.bases}
    for item in ast.walk(tree):
        if isinstance(item, ast.ImportFrom) and base in {alias.name for alias in item.names}:
            return item.module or ""
    raise AssertionError(f"{base} is not imported by name")


by_version = pytest.mark.parametrize("expected", ASCEND, ids=lambda expected: expected.version)


@by_version
def test_no_ascend_worker_has_one_of_our_names(expected, wheel):
    """Neither a method nor anything assigned to `self`, in any class that is called a worker."""
    workers = [
        node
        for _, tree in wheel("vllm_ascend", expected.version).trees("vllm_ascend/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Worker" in node.name
    ]
    assert "NPUWorker" in {node.name for node in workers}
    assert {node.name: names for node in workers if (names := OURS & attributes_set(node))} == {}


@by_version
def test_an_ascend_worker_keeps_what_we_read(expected, wheel):
    """Device, runner, and what it measured at its start."""
    tree = wheel("vllm_ascend", expected.version).tree(expected.worker)
    worker = class_named(tree, "NPUWorker")
    assert origin_of_base(tree, worker, "WorkerBase") == "vllm.v1.worker.worker_base"
    missing = (BEFORE_15 | SINCE_15) - expected.worker_sets
    found = attributes_set(worker)
    assert expected.worker_sets <= found
    assert not missing & found, "it has come to this version: say so above"


@by_version
def test_an_ascend_runner_is_read_like_vllms(expected, wheel):
    """It inherits what we read, or sets it itself under the same names."""
    tree = wheel("vllm_ascend", expected.version).tree(RUNNER_V1)
    runner = class_named(tree, "NPUModelRunner")
    if expected.inherits:
        assert origin_of_base(tree, runner, "GPUModelRunner") == "vllm.v1.worker.gpu_model_runner"
    found = attributes_set(runner)
    assert expected.runner_sets | {"get_model"} <= found
    # Where the measured size is not kept, the weights are counted.
    assert ("model_memory_usage" in found) == ("model_memory_usage" in expected.runner_sets)


@by_version
def test_ascends_second_runner_is_vllms_second(expected, wheel):
    """By the modules of its classes `hello` tells V2 from V1."""
    source = wheel("vllm_ascend", expected.version)
    assert source.has(RUNNER_V2) is expected.has_v2
    if expected.has_v2:
        tree = source.tree(RUNNER_V2)
        base = origin_of_base(tree, class_named(tree, "NPUModelRunner"), "GPUModelRunner")
        assert _RUNNER_MODULES[base] == "v2"


@pytest.mark.parametrize("version", TORCH_NPU)
def test_torch_npu_answers_with_a_device_index(version, wheel):
    """Each function that we call is there, public, and takes a device first."""
    source = wheel("torch_npu", version)
    functions = {
        node.name: [argument.arg for argument in node.args.args]
        for _, tree in source.trees("torch_npu/npu/")
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    for name in ("mem_get_info", "memory_stats", "set_device"):
        assert functions[name] == ["device"], name
    for name in ("get_device_name", "get_device_properties"):
        assert functions[name] == ["device_name"], name
    assert functions["empty_cache"] == []
    exported = ast.unparse(source.tree("torch_npu/npu/__init__.py"))
    for name in ("mem_get_info", "memory_stats", "set_device", "get_device_name", "empty_cache"):
        assert f"'{name}'" in exported, name


@pytest.mark.parametrize("version", TORCH_NPU)
def test_torch_npu_counts_what_we_read(version, wheel):
    """Its documentation lists the same keys as torch.cuda's."""
    tree = wheel("torch_npu", version).tree("torch_npu/npu/memory.py")
    node = next(item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name == "memory_stats")
    documented = ast.get_docstring(node) or ""
    for key in _KEYS.values():
        assert f'"{key.partition(".")[0]}' in documented, key


@pytest.mark.parametrize("version", TORCH_NPU)
def test_torch_npu_is_torch_dot_npu(version, wheel):
    """We reach it by the device's type."""
    calls = {
        ast.unparse(node)
        for prefix in ("torch_npu/__init__.py", "torch_npu/_init/")
        for _, tree in wheel("torch_npu", version).trees(prefix)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    assert "torch._register_device_module('npu', torch_npu.npu)" in calls
