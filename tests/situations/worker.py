"""A vLLM worker around a modelled rank, answering through the real worker extension."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from highwater_worker import MemoryExtension, engine_view
from highwater_worker.devices import HostMemory
from tests.situations.device import GIB, Card, ModelTorch, Plan, Rank
from tests.unit.worker_ext.fakes import FakeTensor, imported_as

HOST_NAME = "node-a"
_NODE = 512 * GIB
HOST = HostMemory(
    rss_bytes=6 * GIB,
    cgroup_used_bytes=96 * GIB,
    cgroup_limit_bytes=None,
    node_total_bytes=_NODE,
    node_available_bytes=_NODE - 128 * GIB,
)
"""A host that is never short: the situations are the device's."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine at its start."""

    kind: str  # `npu` or `cuda`
    ranks: int  # workers
    utilization: float  # `--gpu-memory-utilization`
    kv_cache_memory_bytes: int | None = None  # `--kv-cache-memory-bytes`, where it was given
    # Whether the workers know what the utilization asked for; old ones of vllm-ascend do not.
    tells_requested: bool = True
    ec_connector: bool = False  # whether an encoder cache connector is configured: `trim` is refused then
    skip_mm_profiling: bool = False  # `--skip-mm-profiling`: the start sets no memory aside for the encoder


class _WorkerBase:
    """The attributes of vLLM's workers that the extension looks at."""

    rank_memory: Rank

    def sleep(self, level: int = 1) -> None:
        """Unmap weights and KV cache, and empty the allocator's cache."""
        del level
        memory = self.rank_memory
        memory.asleep |= {"weights", "kv_cache"}
        memory.reusable = memory.stray = 0

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.rank_memory.asleep -= self.rank_memory.asleep if tags is None else set(tags)


class ModelWorker:
    """One worker process."""

    def __init__(self, rank: int, pid: int, card: Card, plan: Plan, engine: EngineOptions) -> None:
        self.pid = pid
        self.memory = Rank(card, rank, plan)
        self.images = 0
        self.is_silent = False
        kind = engine.kind
        parallel = SimpleNamespace(
            data_parallel_rank=0,
            data_parallel_index=0,
            tensor_parallel_size=engine.ranks,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            world_size=engine.ranks,
        )
        cache = SimpleNamespace(
            gpu_memory_utilization=engine.utilization, kv_cache_memory_bytes=engine.kv_cache_memory_bytes
        )

        class Worker(_WorkerBase):
            pass

        Worker.__bases__ += (MemoryExtension,)
        self.worker: Any = Worker()
        vars(self.worker).update(
            rank_memory=self.memory,
            rank=rank,
            local_rank=rank,
            device=SimpleNamespace(type=kind, index=rank),
            parallel_config=parallel,
            vllm_config=SimpleNamespace(
                parallel_config=parallel,
                cache_config=cache,
                model_config=SimpleNamespace(
                    multimodal_config=SimpleNamespace(skip_mm_profiling=engine.skip_mm_profiling)
                ),
                scheduler_config=SimpleNamespace(encoder_cache_size=plan.encoder_budget_embeds),
                compilation_config=SimpleNamespace(static_forward_context={}),
                ec_transfer_config=SimpleNamespace(ec_connector="ECExampleConnector") if engine.ec_connector else None,
            ),
            init_snapshot=SimpleNamespace(free_memory=card.free),
            model_runner=SimpleNamespace(
                encoder_cache={},
                supports_mm_inputs=plan.encoder_budget_embeds > 0,
                mm_budget=SimpleNamespace(encoder_cache_size=plan.encoder_budget_embeds),
                requests={},
                kv_caches=[FakeTensor(plan.kv_cache // 2, device=kind)],
                model_memory_usage=plan.weights,
            ),
        )
        if engine.tells_requested:
            self.worker.requested_memory = float(int(card.total * engine.utilization))

    # --- what the engine does with it ---

    @property
    def encoder_cache(self) -> dict[str, Any]:
        """The dict that the runner has now: a trim puts another one in its place."""
        cache: dict[str, Any] = self.worker.model_runner.encoder_cache
        return cache

    def encode(self, name: str, torch: ModelTorch) -> None:
        """One image: the step's peak, its output into the cache, older ones out of it, and what it leaves outside."""
        plan, memory = self.memory.plan, self.memory
        torch.device_module.current = memory.index
        memory.take_outside(plan.outside, "memory outside of the allocator")
        memory.take_for_a_moment(plan.peak, "activations of an image")
        most = plan.encoder_budget_embeds // plan.image_embeds
        cache = self.encoder_cache
        while len(cache) >= most:
            del cache[next(iter(dict.keys(cache)))]
        cache[name] = torch.tensor((plan.image_embeds, plan.image // 2 // plan.image_embeds))
        memory.workspace = min(memory.workspace + plan.workspace_growth, plan.workspace)
        # Until its prompt is computed, the request needs it.
        feature = SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=0, length=plan.image_embeds))
        self.worker.model_runner.requests = {name: SimpleNamespace(mm_features=[feature], num_computed_tokens=0)}

    def encode_together(self, images: dict[str, int], torch: ModelTorch) -> None:
        """Images of so many embeddings in one step: what they take together for a moment, then their outputs."""
        plan, memory, cache = self.memory.plan, self.memory, self.encoder_cache
        torch.device_module.current = memory.index
        memory.take_for_a_moment(sum(images.values()) * plan.token_peak, "activations of images")
        for name, embeds in images.items():
            while cache and self._held_embeds() + embeds > plan.encoder_budget_embeds:
                del cache[next(iter(dict.keys(cache)))]
            cache[name] = torch.tensor((embeds, plan.image // 2 // plan.image_embeds))

    def _held_embeds(self) -> int:
        return sum(value.shape[0] for value in dict.values(self.encoder_cache) if isinstance(value, FakeTensor))

    def decode(self) -> None:
        """A step of text."""
        self.memory.take_for_a_moment(self.memory.plan.text_peak, "activations")

    def finish(self) -> None:
        self.worker.model_runner.requests = {}

    def needed_bytes(self) -> int:
        """Return what running requests need of the encoder cache."""
        return len(self.worker.model_runner.requests) * self.memory.plan.image

    def encoder_bytes(self) -> int:
        values = dict.values(self.encoder_cache)
        return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, FakeTensor))

    @property
    def trimmable(self) -> int:
        """Encoder outputs on the device that no running request needs."""
        return max(0, self.encoder_bytes() - self.needed_bytes())

    def ask(self, op: str, payload: str, torch: ModelTorch) -> dict[str, Any]:
        torch.device_module.current = self.memory.index
        with _process(self.pid):
            answer: dict[str, Any] = json.loads(self.worker.highwater_rpc(op, payload))
        return answer


_PROCESS = SimpleNamespace(pid=0)


@contextmanager
def _process(pid: int) -> Iterator[None]:
    _PROCESS.pid = pid
    yield


@contextmanager
def modelled_workers(torch: ModelTorch) -> Iterator[None]:
    """Let the extension see the modelled `torch`, host and processes instead of this machine's."""
    with ExitStack() as stack:
        stack.enter_context(imported_as("torch", torch))
        for name, module in list(sys.modules.items()):
            if name.startswith("highwater_worker.") and hasattr(module, "read_host"):
                stack.enter_context(patch.object(module, "read_host", lambda *_, **__: HOST))
        stack.enter_context(patch.object(engine_view, "os", SimpleNamespace(getpid=lambda: _PROCESS.pid)))
        stack.enter_context(patch.object(engine_view, "socket", SimpleNamespace(gethostname=lambda: HOST_NAME)))
        yield
