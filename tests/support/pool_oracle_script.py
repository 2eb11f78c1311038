"""A program that sizes KV caches with vLLM's own functions.

It runs in an interpreter that has vLLM of any version from 0.11 on, needs neither a model nor a device, and imports
nothing of this package: `tests.support.pool_oracle` passes it to that interpreter as text. It reads one question a
line, as JSON, from standard input, and writes one answer a line to standard output, after a line with vLLM's version.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import sys
from typing import Any

_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_SPEC_CLASSES = {
    "full": "FullAttentionSpec",
    "mla": "MLAAttentionSpec",
    "sliding": "SlidingWindowSpec",
    "chunked": "ChunkedLocalAttentionSpec",
    "cross": "CrossAttentionSpec",
    "mamba": "MambaSpec",
}
# Our names for the fields of vLLM's specs, where they differ.
_FIELD_NAMES = {
    "kv_heads": "num_kv_heads",
    "page_bytes_padded": "page_size_padded",
    "indexes_by_block_stride": "indexes_kv_by_block_stride",
    "token_head_bytes": "state_content_bytes",
    "cache_dtype": "cache_dtype_str",
    "speculative_blocks": "num_speculative_blocks",
    "checkpoint_blocks": "num_prefill_checkpoint_blocks",
}
_WINDOW_FIELDS = {"window": "sliding_window", "chunk": "attention_chunk_size"}
_PACKED_MLA = ("fp8_ds_mla", 656)


class Unanswerable(Exception):
    """The question has something that this version of vLLM does not know."""


class Stub:
    """A configuration that has what it is given, and 0 for whatever else is read."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class LogReader:
    """A logger that keeps what the report of the KV cache logs."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.concurrency: list[float] = []

    def info(self, text: str, *args: Any, **_options: Any) -> None:
        if found := _TOKENS.search(text % args if args else text):
            self.tokens.append(int(found[1].replace(",", "")))
        if "Maximum concurrency" in text:
            self.concurrency.append(args[-1])

    info_once = info

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_options: None


class Oracle:
    """vLLM's own functions, with their comparisons at start recorded."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        # From 0.33 on the planning has a module of its own.
        has_own = importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is not None
        self.planning: Any = importlib.import_module("vllm.v1.core.kv_cache_planning") if has_own else self.utils
        self.specs: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        self.config: Any = importlib.import_module("vllm.config").VllmConfig
        self.checks: list[dict[str, int]] = []
        # Up to 0.13 the memory is compared first, layer by layer, and only then are the layers grouped.
        self.checks_layers = not hasattr(self.planning, "_check_enough_kv_cache_memory")
        self._record_checks()

    def _record_checks(self) -> None:
        utils, checks = self.planning, self.checks
        if not self.checks_layers:
            check = utils._check_enough_kv_cache_memory

            def by_groups(available: int, needed: Any, length: int, estimate: Any) -> None:
                longest = length if 0 < available >= needed() else estimate(available)
                checks.append({"available_bytes": available, "needed_bytes": needed(), "max_model_len": longest})
                check(available, needed, length, estimate)

            utils._check_enough_kv_cache_memory = by_groups
            return
        check = utils.check_enough_kv_cache_memory

        def by_layers(config: Any, layers: Any, available: int) -> None:
            model = config.model_config
            length = model.max_model_len
            needed = utils.max_memory_usage_bytes(config, layers.values())
            longest = utils.estimate_max_model_len(config, layers, available)
            model.max_model_len = length  # up to 0.13 the search leaves its last try there
            checks.append({"available_bytes": available, "needed_bytes": needed, "max_model_len": longest})
            check(config, layers, available)

        utils.check_enough_kv_cache_memory = by_layers

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        self.checks.clear()
        try:
            config = self._config(question["limits"])
            workers = [{name: self._spec(layer) for name, layer in worker.items()} for worker in question["workers"]]
        except Unanswerable as exc:
            return {"unanswerable": str(exc)}
        try:
            pool = self._pool(config, workers, list(question["available_bytes"]))
        except Exception as exc:  # noqa: BLE001 - whatever vLLM raises is the answer
            last = self.checks[-1] if self.checks and isinstance(exc, ValueError) else None
            is_check = last is not None and not 0 < last["available_bytes"] >= last["needed_bytes"]
            return {
                "fits": False,
                "refused_by_check": is_check,
                "checked_before_grouping": self.checks_layers,
                "error": f"{type(exc).__name__}: {exc}",
                "checks": list(self.checks),
            }
        return {"fits": True, **pool, "checks": list(self.checks)}

    def _pool(self, config: Any, workers: list[Any], available: list[int]) -> dict[str, Any]:
        log = self.utils.logger = self.planning.logger = LogReader()
        grouped = getattr(self.planning, "get_global_kv_cache_groups", None)
        groups = () if grouped is None else (grouped(config, workers),)
        configs = self.planning.get_kv_cache_configs(config, workers, available, *groups)
        if configs[0].num_blocks == 0:
            # 0.11.0 gets this far; the block pool then wants one block at least.
            raise ValueError("the KV cache has no block")
        if hasattr(self.utils, "update_kv_cache_capacity"):
            self.utils.update_kv_cache_capacity(config, self.utils.generate_scheduler_kv_cache_config(configs))
        return {
            "blocks": configs[0].num_blocks,
            # 0.11.0 logs a line for each worker, before it takes the fewest blocks for all.
            "tokens": min(log.tokens),
            "max_concurrency": min(log.concurrency),
            "groups": [
                {"layers": len(group.layer_names), "block_size": group.kv_cache_spec.block_size}
                for group in configs[0].kv_cache_groups
            ],
        }

    def _config(self, limits: dict[str, Any]) -> Any:
        config: Any = Stub(
            model_config=Stub(
                max_model_len=limits["max_model_len"], original_max_model_len=limits["max_model_len"], use_mla=False
            ),
            cache_config=Stub(
                num_gpu_blocks_override=limits["num_gpu_blocks_override"],
                enable_prefix_caching=True,
                mamba_cache_mode=limits["mamba_cache_mode"],
                get_resolved_kv_cache_layout=self._layout,
            ),
            parallel_config=Stub(
                decode_context_parallel_size=limits["decode_context_parallel_size"],
                prefill_context_parallel_size=limits["prefill_context_parallel_size"],
                pipeline_parallel_size=limits["pipeline_parallel_size"],
                tensor_parallel_size=1,
            ),
            scheduler_config=Stub(
                max_num_batched_tokens=limits["max_num_batched_tokens"],
                max_num_seqs=limits["max_num_seqs"],
                max_num_encoder_input_tokens=limits["max_encoder_tokens"],
                disable_hybrid_kv_cache_manager=not limits["hybrid_manager"],
                async_scheduling=limits["async_scheduling"],
            ),
            device_config=Stub(device_type="cuda"),
            attention_config=Stub(hisparse_config=None),
            speculative_config=None,
            kv_transfer_config=None,
            kv_events_config=None,
            use_v2_model_runner=limits["v2_model_runner"],
            num_prefill_lookahead_tokens=1,
        )
        if hasattr(self.config, "max_in_flight_tokens"):
            config.max_concurrent_batches = self.config.max_concurrent_batches.fget(config)
            config.max_in_flight_tokens = self.config.max_in_flight_tokens.fget(config)
        return config

    @staticmethod
    def _layout() -> Any:
        """Return the layout that vLLM uses where no attention backend requires another."""
        return importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC

    def _spec(self, layer: dict[str, Any]) -> Any:
        layer = dict(layer)
        kind = layer.pop("kind")
        spec_class = getattr(self.specs, _SPEC_CLASSES[kind])
        known = {field.name for field in dataclasses.fields(spec_class)}
        sizes = layer.pop("element_bytes")
        values: dict[str, Any] = {}
        if kind == "mamba":
            values["shapes"] = tuple(map(tuple, layer.pop("shapes")))
            values["dtypes"] = tuple(map(self._dtype, sizes))
        else:
            values["dtype"] = self._dtype(sizes)
        packed = layer.get("cache_dtype"), layer.get("token_head_bytes")
        if packed == _PACKED_MLA and "state_content_bytes" not in known:
            del layer["token_head_bytes"]  # the class knows the format by its name
        if layer.get("head_size_v") is None or (kind == "mla" and layer["head_size_v"] == 0):
            layer.pop("head_size_v", None)
        for name, value in layer.items():
            field = _FIELD_NAMES.get(name) or _WINDOW_FIELDS.get(name, name)
            if field in known:
                values[field] = value
            elif value not in (None, 0, False):
                raise Unanswerable(f"{spec_class.__name__} of this vLLM has no {field}")
        return spec_class(**values)

    def _dtype(self, size: int) -> Any:
        torch = self.torch
        return {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[size]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints too, and not JSON
    oracle = Oracle()
    version = importlib.import_module("vllm").__version__
    print(json.dumps({"vllm_version": version}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(oracle.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
