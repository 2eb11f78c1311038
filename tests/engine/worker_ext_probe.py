"""Questions that only the engine's own Python can answer; `python worker_ext_probe.py <question>` prints JSON.

Run by test_worker_ext_real.py with the engine's interpreter, where torch and vllm are real, and nothing of ours but
`worker_ext` is to be found.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from worker_ext import MemoryExtension
from worker_ext.state import ATTRIBUTE


class Base:
    """Only a base that the extension can be added to."""


class ProbedWorker(Base):
    """A worker without an engine."""


class Other:
    """Somebody else's extension."""

    def other_rpc(self) -> str:
        return "other"


class Both(MemoryExtension, Other):
    """How two extensions are loaded as one."""


def worker(**runner: Any) -> Any:
    made = type("Probed", (Base, MemoryExtension), {})()
    made.device = torch.device("cpu")
    made.model_runner = SimpleNamespace(**runner)
    return made


def ask(asked: Any, op: str, **payload: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(asked.highwater_rpc(op, json.dumps(payload)))
    assert answer["ok"], answer
    return answer


def v2_cache() -> dict[str, Any]:
    """Read the encoder cache of model runner V2, empty and filled, with requests that need part of it."""
    module = importlib.import_module("vllm.v1.worker.gpu.mm.encoder_cache")
    inputs = importlib.import_module("vllm.multimodal.inputs")
    cache = module.EncoderCache()
    states = SimpleNamespace(req_id_to_index={"r": 0}, num_computed_prefill_tokens=torch.tensor([10]).numpy())
    asked = worker(encoder_cache=cache, req_states=states)
    empty = ask(asked, "encoder_cache")
    batch = torch.ones(20, 4)
    cache.encoder_outputs.update(zip("ab", batch.split(10), strict=True))
    cache.add_request(
        "r",
        [
            inputs.MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=name,
                mm_position=inputs.PlaceholderRange(offset=offset, length=10),
            )
            for name, offset in (("a", 0), ("b", 10))
        ],
    )
    return {"falsy": not module.EncoderCache(), "empty": empty, "filled": ask(asked, "encoder_cache")}


def collisions() -> dict[str, Any]:
    """Find our names in the engine's own classes, and vLLM's assertion over them."""
    ours = {name for name in dir(MemoryExtension) if not name.startswith("__")} | {ATTRIBUTE}
    found: dict[str, list[str]] = {}
    for name in ("cpu_worker.CPUWorker", "gpu_worker.Worker", "xpu_worker.XPUWorker", "worker_base.WorkerWrapperBase"):
        module, _, kind = name.partition(".")
        try:
            real = getattr(importlib.import_module(f"vllm.v1.worker.{module}"), kind)
        except ImportError:  # a platform's worker may need its platform
            continue
        found[name] = sorted(ours & set(dir(real)))
    return found


def injection() -> dict[str, Any]:
    """Let vLLM's own code put a class of two extensions into a worker class."""
    wrapper = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase()
    parallel = SimpleNamespace(
        worker_cls=f"{__name__}.ProbedWorker", worker_extension_cls=f"{__name__}.Both", assigned_physical_gpu_ids=None
    )
    config = SimpleNamespace(parallel_config=parallel, enable_trace_function_call_for_thread=lambda: None)
    try:
        wrapper.init_worker([{"vllm_config": config}])
    except AttributeError as error:  # what follows the injection needs a whole configuration
        stopped = str(error)
    else:
        stopped = ""
    made: Any = ProbedWorker()
    return {"bases": [kind.__name__ for kind in ProbedWorker.__bases__], "stopped": stopped, "other": made.other_rpc(),
            "hello": json.loads(made.highwater_rpc("hello"))["ok"]}  # fmt: skip


def many_entries() -> dict[str, Any]:
    """Time the operations on 1,000 entries in 500 storages, 64 layers of KV cache and 1,200 weights."""
    cache = {}
    for number in range(500):
        for part, tensor in enumerate(torch.ones(512, 64, dtype=torch.bfloat16).split(256)):
            cache[f"{number:063x}{part}"] = tensor
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(600)))
    kv_caches = [torch.zeros(1 << 18) for _ in range(64)]
    asked = worker(encoder_cache=cache, kv_caches=kv_caches, get_model=lambda: model, requests={})
    memory, listing = ask(asked, "memory"), ask(asked, "encoder_cache", limit=10_000)
    return {
        "memory": memory,
        "listing": listing | {"entries": listing["entries"][:1]},
        "expected_weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "timings": {
            "memory": timings(lambda: asked.highwater_rpc("memory")),
            "encoder_cache_100": timings(lambda: asked.highwater_rpc("encoder_cache")),
            "encoder_cache_all": timings(lambda: asked.highwater_rpc("encoder_cache", '{"limit": 10000}')),
            "hello": timings(lambda: asked.highwater_rpc("hello")),
        },
    }


def timings(call: Any, rounds: int = 300) -> dict[str, float]:
    # Beside the wall clock the thread's own: on a busy machine the first measures its neighbours.
    wall, own = [], []
    for _ in range(rounds):
        began = time.perf_counter(), time.thread_time()
        call()
        wall.append((time.perf_counter() - began[0]) * 1000)
        own.append((time.thread_time() - began[1]) * 1000)
    return {
        "median_ms": round(statistics.median(wall), 3),
        "p99_ms": round(statistics.quantiles(wall, n=100)[98], 3),
        "cpu_median_ms": round(statistics.median(own), 3),
        "cpu_p99_ms": round(statistics.quantiles(own, n=100)[98], 3),
    }


def residency() -> dict[str, Any]:
    """Compare a KV cache that nobody wrote with one that is written in part and one made as vLLM makes it."""
    size = 256 << 20
    untouched = torch.empty(size, dtype=torch.int8)
    asked = worker(kv_caches=[untouched])
    empty = ask(asked, "memory")["kv_cache_bytes"]
    untouched[: size // 2].fill_(1)
    zeroed = ask(worker(kv_caches=[torch.zeros(size, dtype=torch.int8)]), "memory")
    return {
        "size": size,
        "untouched": empty,
        "half": ask(worker(kv_caches=[untouched]), "memory")["kv_cache_bytes"],
        "zeroed": zeroed["kv_cache_bytes"],
        "reserved": zeroed["kv_cache_reserved_bytes"],
        "rss": zeroed["used_bytes"],
    }


def packed_weights() -> dict[str, Any]:
    """Let the CPU backend pack linear weights and drop the parameters, as it does when a model is loaded."""
    importlib.import_module("vllm._custom_ops")
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    model = torch.nn.Sequential(*(torch.nn.Linear(512, width, bias=False).bfloat16() for width in (64, 1024)))
    before = ask(worker(get_model=lambda: model), "memory")["weights_bytes"]
    for layer in model:
        layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    left = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "before": before,
        "parameters": left,
        "after": ask(worker(get_model=lambda: model), "memory")["weights_bytes"],
    }


def give_back() -> dict[str, Any]:
    """Free many small blocks below one that stays, then ask for them to be returned."""
    kept: list[Any] = [bytearray(60_000) for _ in range(3000)]
    del kept[:-1]
    return ask(worker(), "release")


QUESTIONS = {
    question.__name__: question
    for question in (v2_cache, collisions, injection, many_entries, residency, packed_weights, give_back)
}

if __name__ == "__main__":
    # vLLM resolves classes by their module's name, and __main__ would be another copy of it.
    sys.modules["worker_ext_probe"] = sys.modules["__main__"]
    ProbedWorker.__module__ = Both.__module__ = __name__ = "worker_ext_probe"
    print(json.dumps(QUESTIONS[sys.argv[1]]()))  # noqa: T201 - its only way out
