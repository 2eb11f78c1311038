"""The table of what Highwater uses of Ascend's packages and the simulated NPU cannot run, read in the published wheels.

That is graphs, sleep mode and locks; and of the names that run there (`RAN`), those that another version has in another
way: the package index has no CPU build of a torch beside which it would run. `python -m tests.compat.ascend_sources`
reads them by AST and writes ascend_sources.json, which docs/devices.md names. A wheel of torch_npu has some 25 MB.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from tests.engine.published import Source, source_of, wheel_of
from tests.fakes.cann.ascend import VLLM_ASCEND as ASCEND_RAN
from tests.fakes.cann.npu import TORCH_NPU as NPU_RAN

TABLE = Path(__file__).parent / "ascend_sources.json"
TORCH_NPU = ("2.7.1", "2.8.0", "2.9.0", "2.10.0.post4")
VLLM_ASCEND = ("0.11.0", "0.12.0rc1", "0.13.0", "0.18.0", "0.23.0")
RAN = {"torch_npu": NPU_RAN, "vllm_ascend": ASCEND_RAN}
"""On the simulated NPU; a name that all versions have as these do is in no row."""
NOT_RUN = ("torch.npu: NPUGraph.", "torch.npu: graph.", "NPUWorker.sleep", "NPUWorker.wake_up", "CaMemAllocator.")
"""How the names begin that the simulated NPU cannot run, or not as they are shipped."""
NOTE = (
    f"torch_npu {NPU_RAN} and vllm-ascend {ASCEND_RAN} ran on the simulated device, which can run no graphs and shows "
    "no lock; sleep mode it runs with an allocator that was compiled from vllm-ascend's source. These were read, in "
    "the Python source of the published wheels, for versions that were not run; and so was every other name that one "
    "of them has in another way. `absent`: that version lacks the name, and Highwater does without it."
)
# File by file what is used of torch_npu, in its own names.
NPU_FILES = {
    "torch_npu/npu/__init__.py": ("get_device_name", "get_device_properties", "mem_get_info"),
    "torch_npu/npu/memory.py": (
        *("empty_cache", "host_empty_cache", "host_memory_stats", "memory_stats", "memory_snapshot", "_snapshot"),
    ),
    "torch_npu/npu/utils.py": ("set_device", "synchronize", "current_stream", "stream"),
    "torch_npu/npu/graphs.py": ("NPUGraph.replay", "graph.__init__"),
    "torch_npu/npu/streams.py": ("Event.record", "Event.query", "Stream.wait_stream"),
}
# The worker's file has moved; a name is looked for in all of them.
WORKER_FILES = ("vllm_ascend/worker/worker_v1.py", "vllm_ascend/worker/worker.py")
WORKER_NAMES = (
    *("init_device", "load_model", "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model"),
    *("execute_model", "sleep", "wake_up"),
)
CAMEM = "vllm_ascend/device_allocator/camem.py"
LOCKED = (("torch_npu", TORCH_NPU, tuple(NPU_FILES)), ("vllm_ascend", VLLM_ASCEND, (CAMEM, *WORKER_FILES)))


def table() -> dict[str, object]:
    ran = {name: found for package, version in RAN.items() for name, found in _names(package, version)}
    read = [
        (name, package, version, found)
        for package, versions in (("torch_npu", TORCH_NPU), ("vllm_ascend", VLLM_ASCEND))
        for version in (*versions, RAN[package])
        for name, found in _names(package, version)
    ]
    shown = {name for name, *_, found in read if name.startswith(NOT_RUN) or found != ran[name]}
    names = (row for row in read if row[0] in shown and not (row[2] in RAN.values() and row[0].startswith(NOT_RUN)))
    return {"note": NOTE, "found": [*_grouped(names), *_grouped(_locks())]}


def _names(package: str, version: str) -> Iterator[tuple[str, str]]:
    source = source_of(package, version)
    assert source is not None
    if package == "torch_npu":
        for member, names in NPU_FILES.items():
            found = _signatures(source, member)
            yield from ((f"torch.npu: {name}", found.get(name, "absent")) for name in names)
        return
    found = {name: signature for member in WORKER_FILES for name, signature in _signatures(source, member).items()}
    yield from ((f"NPUWorker.{name}", found.get(f"NPUWorker.{name}", "absent")) for name in WORKER_NAMES)
    found = _signatures(source, CAMEM)
    names = ("get_instance", "sleep", "wake_up", "python_free_callback")
    yield from ((f"CaMemAllocator.{name}", found.get(f"CaMemAllocator.{name}", "absent")) for name in names)


def _signatures(source: Source, member: str) -> dict[str, str]:
    """Return the functions of a file by qualified name, with their arguments; none where there is no such file."""
    try:
        tree = ast.parse(source.text(member))
    except (KeyError, FileNotFoundError):
        return {}
    return {
        name: f"({ast.unparse(node.args)})"
        for name, node in _defined(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _locks() -> Iterator[tuple[str, str, str, str]]:
    """Yield where a lock is held, in the functions of the files that are used."""
    for package, versions, members in LOCKED:
        for version in versions:
            wheel = wheel_of(package, version)
            for member in filter(wheel.has, members):
                held = [
                    f"{name}: with {ast.unparse(item.context_expr)}"
                    for name, node in _defined(wheel.tree(member))
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.With)
                    for item in inner.items
                    if "lock" in ast.unparse(item.context_expr).lower()
                ]
                yield f"locks held in {member}", package, version, "; ".join(held) or "no lock"


def _defined(tree: ast.AST, outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = (*outer, node.name)
            yield ".".join(name), node
            if isinstance(node, ast.ClassDef):
                yield from _defined(node, name)


def _grouped(rows: Iterator[tuple[str, str, str, str]]) -> list[dict[str, str]]:
    versions: dict[tuple[str, str, str], list[str]] = {}
    for name, package, version, found in rows:
        versions.setdefault((name, package, found), []).append(version)
    order = list(dict.fromkeys(name for name, _, _ in versions))
    return [
        {"name": name, "package": package, "version": ", ".join(of), "found": found}
        for (name, package, found), of in sorted(versions.items(), key=lambda item: order.index(item[0][0]))
    ]


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")
