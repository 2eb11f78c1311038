"""The smallest worker that the extension takes for a vLLM worker: a model, a KV cache and encoder outputs on a device.

The steps share it. Its attributes are those that the worker package reads of an engine, and no more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bench.device.torch_device import Tensor, TorchDevice
from highwater_worker import MemoryExtension

BATCH = 2


class RefusedCallError(Exception):
    """The worker package answered an operation with an error; the text is its answer's."""


class _Base:
    """Only a base that the extension can be added to, as vLLM adds it."""


class KitWorker(_Base, MemoryExtension):
    """A worker without an engine.

    Args:
        on: The device.
        images: The encoder outputs that it holds.
        kv_bytes: The size of its KV cache; that of the device's sizes where None.
        requested_bytes: The memory that its engine planned to use; None where it planned nothing.
    """

    def __init__(
        self,
        on: TorchDevice,
        *,
        images: int = 0,
        kv_bytes: int | None = None,
        requested_bytes: int | None = None,
    ) -> None:
        self.rank = self.local_rank = 0
        self.device = on.device
        free, total = on.space()
        self.init_snapshot = SimpleNamespace(total_memory=total, free_memory=free)
        if requested_bytes is not None:
            self.requested_memory = requested_bytes
        self._on = on
        self.during_step: Callable[[], None] = lambda: None
        """Called in each step."""
        self.step_input = on.randn(64, on.sizes.hidden)
        kv_cache = on.empty(on.sizes.kv_bytes if kv_bytes is None else kv_bytes)
        if on.is_cpu:
            kv_cache.zero_()  # pages that were never written are not resident
        self.model_runner = SimpleNamespace(
            model=_model(on), encoder_cache={}, requests={}, kv_caches=[kv_cache], device=on.device
        )
        parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "world_size": 1}
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel, distributed_executor_backend="uni"),
            cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
        )
        self.add_images(images)

    @property
    def cache(self) -> dict[str, Tensor]:
        """The encoder cache as it is now: the worker package puts a dict of its own in its place."""
        found: dict[str, Tensor] = self.model_runner.encoder_cache
        return found

    def add_images(self, count: int) -> None:
        """Put encoder outputs into the cache as an engine makes them: one tensor a batch, each image a view of it."""
        sizes, cache = self._on.sizes, self.cache
        with self._on.torch.inference_mode():
            for first in range(0, count, BATCH):
                parts = min(BATCH, count - first)
                made = self._on.randn(parts * sizes.tokens, sizes.width)
                for part in made.split(sizes.tokens):
                    cache[f"{len(cache):064x}"] = part

    def execute_model(self, scheduler_output: object = None) -> Tensor:  # noqa: ARG002 - vLLM's signature
        """Take one step; the output is on the device, and nobody has waited for it."""
        with self._on.torch.inference_mode():
            self.during_step()
            return self.model_runner.model(self.step_input)

    def call(self, op: str, **payload: object) -> dict[str, Any]:
        """Run an operation of the worker package, by the method that vLLM would call.

        Raises:
            RefusedCallError: It answered with an error.
        """
        answer: dict[str, Any] = json.loads(self.highwater_rpc(op, json.dumps(payload)))
        if not answer["ok"]:
            raise RefusedCallError(f"{op}: {answer['error']['code']}: {answer['error']['message']}")
        return answer


def _model(on: TorchDevice) -> Any:  # noqa: ANN401 - a torch module
    linear = on.torch.nn.Linear
    layers = [
        linear(on.sizes.hidden, on.sizes.hidden, device=on.device, dtype=on.dtype) for _ in range(on.sizes.layers)
    ]
    return on.torch.nn.Sequential(*layers)


def weights_bytes(worker: KitWorker) -> int:
    """Return the bytes of the model's parameters, counted here, beside the worker package's own count."""
    return sum(parameter.numel() * parameter.element_size() for parameter in worker.model_runner.model.parameters())
