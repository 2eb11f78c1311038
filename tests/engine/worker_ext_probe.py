"""Questions that only the engine's own Python can answer; `python worker_ext_probe.py <question>...` prints JSON.

Run by test_worker_ext_real.py with the engine's interpreter, where torch and vllm are real, and nothing of ours but
`highwater_worker` is to be found.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import statistics
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from highwater_worker import MemoryExtension
from highwater_worker.encoder_cache.spilling_dict import Spilled, SpillingDict
from highwater_worker.state import ATTRIBUTE


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
    made.vllm_config = SimpleNamespace()
    return made


def ask(asked: Any, op: str, **payload: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(asked.highwater_rpc(op, json.dumps(payload)))
    assert answer["ok"], answer
    return answer


def v2_cache() -> dict[str, Any]:
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
            "budget": json.loads(made.highwater_rpc("budget"))["ok"]}  # fmt: skip


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
            "budget": timings(lambda: asked.highwater_rpc("budget")),
        },
    }


def timings(call: Any, rounds: int = 300) -> dict[str, float]:
    # Beside the wall clock the thread's own: on a busy machine the first measures its neighbours. They slow the second
    # too, through caches and shared cores, so each round has a loop of 100,000 additions beside it to compare with.
    wall, own, loop = [], [], []
    for _ in range(rounds):
        began = time.perf_counter(), time.thread_time()
        call()
        wall.append((time.perf_counter() - began[0]) * 1000)
        own.append((time.thread_time() - began[1]) * 1000)
        started = time.thread_time()
        total = 0
        for number in range(100_000):
            total += number
        loop.append((time.thread_time() - started) * 1000)
    return {
        "loops": round(statistics.median(own) / statistics.median(loop), 3),
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
    # Without AVX-512 oneDNN packs no bfloat16.
    dtype = torch.bfloat16 if torch.cpu._is_avx512_supported() else torch.float32
    model = torch.nn.Sequential(*(torch.nn.Linear(512, width, bias=False).to(dtype) for width in (64, 1024)))
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


def outputs() -> dict[str, torch.Tensor]:
    """Make encoder outputs as an engine does: halves of a batch, and what else a model may give."""
    with torch.inference_mode():
        first, second = torch.randn(128, 64).bfloat16().split(64)
        return {
            "first": first,
            "second": second,
            "transposed": torch.randn(32, 16).t(),
            "gapped": torch.randn(32, 16)[::2, ::4],
            "half": torch.randn(3, 5, 7).half(),
            "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return bits(tensor), str(tensor.dtype), tuple(tensor.shape), tensor.is_inference(), str(tensor.device)


def raw(cache: Any) -> list[str]:
    return [key for key, value in dict.items(cache) if type(value) is Spilled]


def spill_and_access() -> dict[str, Any]:
    """Spill real tensors and read them in every way that copies a dict; the storages must be gone meanwhile."""
    cache = outputs()
    before = {key: facts(value) for key, value in cache.items()}
    strides = {key: value.stride() for key, value in cache.items()}
    storages = [StorageWeakRef(value.untyped_storage()) for value in cache.values()]
    asked = worker(encoder_cache=cache, requests={})
    del cache
    trimmed = ask(asked, "trim")
    cache = asked.model_runner.encoder_cache
    gone, spilled = [storage.expired() for storage in storages], raw(cache)
    same: dict[str, bool] = {}
    ways: dict[str, Any] = {
        "dict": dict,
        "**": lambda d: {**d},
        "copy": lambda d: d.copy(),
        "copy.copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda d: pickle.loads(pickle.dumps(d)),  # noqa: S301 - our own
        "items": lambda d: dict(d.items()),
        "get": lambda d: {key: d.get(key) for key in d},
    }
    for name, way in ways.items():
        ask(asked, "trim")
        made = way(cache)
        # What leaves inference mode by deepcopy or pickle is a normal tensor, as with a plain dict.
        same[name] = list(made) == list(before) and all(facts(made[key])[:3] == before[key][:3] for key in before)
    ask(asked, "trim")
    again = {key: facts(cache[key]) == before[key] for key in before}
    return {
        "trimmed": trimmed,
        "gone": gone,
        "spilled": spilled,
        "same": same,
        "again": again,
        "dense_strides": [cache[key].stride() == strides[key] for key in ("first", "transposed", "half")],
        "memory": ask(asked, "memory")["encoder_cache"],
        "left": raw(cache),
    }


def restore_failures() -> dict[str, Any]:
    """Let the device run out of memory when entries come back: once, and for good."""
    asked = worker(encoder_cache=outputs(), requests={})
    ask(asked, "trim")
    cache, real = asked.model_runner.encoder_cache, torch.empty_like
    left = [1]

    def full(*arguments: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("out of memory")
        return real(*arguments, **options)

    torch.empty_like = full
    try:
        once = cache["first"].shape[0]
        left[0] = 2
        try:
            cache["second"]
        except torch.OutOfMemoryError as error:
            twice = str(error)
        still = raw(cache)
        left[0] = 1000
        restored = ask(asked, "restore")
        cache.pop("odd", None)
        value = cache.pop("half")
    finally:
        torch.empty_like = real
    return {
        "once": once,
        "twice": twice,
        "still": still,
        "restored": restored,
        "popped": (str(value.device), list(value.shape)),
        "left": raw(cache),
        "rest": ask(asked, "restore")["left_entries"],
    }


def spill_under_v1() -> dict[str, Any]:
    module = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    runner = object.__new__(module.GPUModelRunner)
    vars(runner).update(encoder_cache={}, requests={}, supports_mm_inputs=True)
    runner.late_interaction_runner = module.LateInteractionRunner()
    asked = worker()
    asked.model_runner = runner
    made = outputs()
    before = {key: facts(value) for key, value in made.items()}
    for key in list(made):
        runner._cache_encoder_output(key, made.pop(key), None, [])
    trimmed = ask(asked, "trim")
    read = {key: facts(runner._get_encoder_output_from_cache(key)) == before[key] for key in ("second", "gapped")}
    missing = runner._get_encoder_output_from_cache("never")
    freed = SimpleNamespace(free_encoder_mm_hashes=["first", "second", "odd", "never"])
    runner._process_encoder_cache_scheduler_output(freed)
    after = ask(asked, "memory")["encoder_cache"]
    keys = list(runner.encoder_cache)
    runner.reset_encoder_cache()
    return {
        "trimmed": trimmed, "read": read, "missing": missing, "after": after, "keys": keys,
        "kind": type(runner.encoder_cache) is SpillingDict, "reset": ask(asked, "memory")["encoder_cache"],
    }  # fmt: skip


def spill_under_v2() -> dict[str, Any]:
    inputs = importlib.import_module("vllm.multimodal.inputs")
    cache = importlib.import_module("vllm.v1.worker.gpu.mm.encoder_cache").EncoderCache()
    encoder = object.__new__(importlib.import_module("vllm.v1.worker.gpu.mm.encoder_runner").EncoderRunner)
    vars(encoder).update(encoder_cache=cache, is_realtime=False, device=torch.device("cpu"))
    features = [
        inputs.MultiModalFeatureSpec(
            data=inputs.MultiModalKwargsItem.dummy(),
            modality="image",
            identifier=name,
            mm_position=inputs.PlaceholderRange(offset=offset, length=10),
        )
        for name, offset in (("a", 0), ("b", 10), ("c", 20))
    ]
    cache.add_request("r", features)
    states = SimpleNamespace(req_id_to_index={"r": 0}, num_computed_prefill_tokens=torch.tensor([10]).numpy())
    asked = worker(encoder_cache=cache, req_states=states)
    batch = torch.randn(20, 4).bfloat16()
    wanted = [bits(part) for part in batch.split(10)]
    cache.encoder_outputs.update(zip("ab", batch.split(10), strict=True))
    storage = StorageWeakRef(batch.untyped_storage())
    del batch
    needed = ask(asked, "trim")
    trimmed = ask(asked, "trim", keep_bytes=0)
    gone = storage.expired()
    to_encode = encoder.prepare_mm_inputs({"r": [0, 1, 2]})[0]
    numbers = [torch.tensor(values).numpy() for values in ([20], [0, 20], [30], [0])]
    gathered, _ = encoder.gather_mm_embeddings(["r"], 20, *numbers)
    ask(asked, "trim", keep_bytes=0)
    before = ask(asked, "memory")["encoder_cache"]
    cache.free_encoder_cache("a")
    freed = ask(asked, "memory")["encoder_cache"]
    length = len(cache)
    cache.reset_encoder_cache()
    return {
        "needed": needed, "trimmed": trimmed, "gone": gone, "to_encode": to_encode,
        "gathered": [bits(part) == want for part, want in zip(gathered, wanted, strict=True)],
        "before": before, "freed": freed, "length": length, "reset": len(cache),
    }  # fmt: skip


def spill_costs() -> dict[str, Any]:
    """Time calls that find nothing to do among 1,000 entries, accesses, and what is moved in a second."""
    plain = {f"{number:064x}": torch.ones(256, 64, dtype=torch.bfloat16) for number in range(1000)}
    keys = list(plain)
    asked = worker(encoder_cache=plain, requests={})
    plain = dict(plain)
    first = ask(asked, "trim", keep_bytes=1 << 40)["elapsed_ms"]
    cache = asked.model_runner.encoder_cache
    trims = {
        "keep": timings(partial(asked.highwater_rpc, "trim", '{"keep_bytes": 1099511627776}'), 100),
        "idle": timings(partial(asked.highwater_rpc, "trim", '{"idle_seconds": 3600}'), 100),
    }
    access = {
        "plain": timings(lambda: [plain.get(key) for key in keys]),
        "ours": timings(lambda: [cache.get(key) for key in keys]),
    }
    asked.model_runner.encoder_cache = {str(n): torch.ones(1024, 2048, dtype=torch.bfloat16) for n in range(64)}
    big = ask(asked, "trim", max_seconds=60)
    back = ask(asked, "restore", max_seconds=60)
    ask(asked, "trim", max_seconds=60)
    everything = {"spilled": timings(lambda: asked.highwater_rpc("trim"), 100)}
    return {
        "first_ms": first,
        "trims": trims | everything,
        "access_us": {name: round(found["cpu_median_ms"], 3) for name, found in access.items()},
        "spill_gib_per_second": round(big["spilled_bytes"] / big["copy_seconds"] / 2**30, 2),
        "restore_gib_per_second": round(back["restored_bytes"] / back["copy_seconds"] / 2**30, 2),
    }


QUESTIONS = {
    question.__name__: question
    for question in (
        v2_cache, collisions, injection, many_entries, residency, packed_weights, give_back,
        spill_and_access, restore_failures, spill_under_v1, spill_under_v2, spill_costs,
    )
}  # fmt: skip

if __name__ == "__main__":
    # vLLM resolves classes by their module's name, and __main__ would be another copy of it.
    sys.modules["worker_ext_probe"] = sys.modules["__main__"]
    ProbedWorker.__module__ = Both.__module__ = __name__ = "worker_ext_probe"
    if len(sys.argv) > 2:
        importlib.import_module("vllm.v1.worker.cpu_worker")  # takes ten seconds, once
    for question in sys.argv[1:]:
        # Each in a process of its own: questions put their hands into vLLM's classes.
        if not (child := os.fork()):
            print(json.dumps(QUESTIONS[question]()), flush=True)  # noqa: T201 - its only way out
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{question} failed")
