"""The fake workers of `tests/fakes/started.py`, held to vLLM: its attributes have these names, and a real worker's
budget has the same shape.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from highwater.engine.client import Engine as EngineClient
from highwater.terminal.demo.engine import DemoEngine
from tests.fakes import started

from .published import source_of
from .test_contract import differences, shape

# vLLM's own workers, each with the version that its attributes are of; that of `larger_story` is vllm-ascend's.
WORKERS = {"story": "0.12.0", "qwen3_next": "0.12.0", "gemma": "0.23.0"}
# Made by the fake itself, for `wire`; the worker keeps no such attribute.
_OWN = {"specs"}
# Where the attributes of each part of a worker are assigned or declared.
_WORKER = ("vllm/v1/worker/gpu_worker.py", "vllm/v1/worker/worker_base.py")
_RUNNER = ("vllm/v1/worker/gpu_model_runner.py",)
_ENCODER = ("vllm/v1/worker/utils.py", "vllm/multimodal/encoder_budget.py")
_CONFIGS = {
    "cache_config": "vllm/config/cache.py",
    "scheduler_config": "vllm/config/scheduler.py",
    "parallel_config": "vllm/config/parallel.py",
    "model_config": "vllm/config/model.py",
}
_SPECS = "vllm/v1/kv_cache_interface.py"


def text_of(version: str, *paths: str) -> str:
    source = source_of("vllm", version)
    assert source is not None
    found = []
    for path in paths:
        try:
            found.append(source.text(path))
        except (OSError, KeyError):
            continue
    return "\n".join(found)


def assigned(text: str) -> set[str]:
    return set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", text))


def declared(text: str) -> dict[str, set[str]]:
    """Return the fields of each class, those of its bases in the same file included."""
    fields: dict[str, set[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            own = {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            bases = (fields.get(base.id, set()) for base in node.bases if isinstance(base, ast.Name))
            fields[node.name] = own.union(*bases)
    return fields


def unknown_names(worker: SimpleNamespace, version: str) -> Iterator[str]:
    """Yield what the fake has and vLLM of that version does not."""
    runner = worker.model_runner
    parts: list[tuple[str, Any, set[str]]] = [
        ("worker", worker, assigned(text_of(version, *_WORKER)) | _OWN),
        ("model_runner", runner, assigned(text_of(version, *_RUNNER))),
    ]
    if hasattr(runner, "mm_budget"):
        parts.append(("mm_budget", runner.mm_budget, assigned(text_of(version, *_ENCODER))))
    for name, path in _CONFIGS.items():
        text = text_of(version, path)
        known = set().union(*declared(text).values()) | assigned(text)
        parts.append((name, getattr(worker.vllm_config, name), known))
    specs = declared(text_of(version, _SPECS))
    made = runner.kv_cache_config
    parts += [
        ("kv_cache_config", made, specs["KVCacheConfig"]),
        ("kv_cache_tensor", made.kv_cache_tensors[0], specs["KVCacheTensor"]),
        ("kv_cache_group", made.kv_cache_groups[0], specs["KVCacheGroupSpec"]),
    ]
    parts += [(type(spec).__name__, spec, specs[type(spec).__name__]) for spec in worker.specs.values()]
    for part, value, known in parts:
        yield from (f"{part}.{name}" for name in sorted(vars(value).keys() - known))


@pytest.mark.parametrize(("name", "version"), WORKERS.items())
def test_a_fake_worker_has_attributes_of_its_version_only(name: str, version: str) -> None:
    """As that version's source assigns or declares them."""
    assert sorted(set(unknown_names(getattr(started, name)(), version))) == []


async def test_a_real_workers_budget_has_the_shape_of_the_fakes(engine: DemoEngine, engine_environment: Any) -> None:
    async with EngineClient(engine.url, rpc_deadline_seconds=60, request_seconds=60) as client:
        client.allow_rpc()
        real = (await client.rpc("budget"))[0]["engine_budget"]
    fake = started.wire(started.story(), version=engine_environment.version)
    for budget in (real, fake):
        budget["environment"], budget["notes"] = {}, []
    # The start of the engine that the tests share is not seen: its layers are read from the groups, and marked so.
    real["kv_cache"]["layers"].pop("are_grouped", None)
    for described in (*real["kv_cache"]["layers"]["kinds"], *real["kv_cache"]["groups"]):
        of_fake = fake["kv_cache"]["layers"]["kinds"][0].keys() | {"layers"}
        assert fake["kv_cache"]["layers"]["kinds"][0].keys() <= described.keys()
        for extra in described.keys() - of_fake:
            del described[extra]
    assert differences(shape(fake), shape(real)) == []
