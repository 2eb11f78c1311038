"""The KV cache that vLLM's own engine core makes of its layers' specs and of so many bytes."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any

from highwater_worker.plan import LOG, say, versions

_CONFIGS = ("model_config", "cache_config", "scheduler_config", "parallel_config")


def kv_pool(config: Any, specs: list[Any], available: list[int]) -> dict[str, Any]:
    """Return the pool's figures; one that vLLM refuses has `refusal`, and what was compared.

    Args:
        config: Stays as it is.
        specs: Each rank's layers.
        available: Each rank's bytes.
    """
    config = copy.copy(config)
    for name in _CONFIGS:
        setattr(config, name, copy.copy(getattr(config, name)))
    utils, planning = versions.planning()
    log = utils.logger = planning.logger = _Log()
    pools: list[Any] = []
    backends = importlib.import_module("vllm.v1.attention.backends.utils")
    workers = SimpleNamespace(  # what the engine core calls of them, in any version
        get_kv_cache_specs=lambda: specs,
        determine_available_memory=lambda: available,
        get_supported_kv_cache_layouts=lambda: [versions.supported_layouts(config)] * len(specs),
        set_kv_cache_layout=lambda layout, *_: backends.record_kv_cache_layout(config.cache_config, layout),
        initialize_from_config=pools.extend,
        get_simple_cpu_offload_num_blocks=lambda: 0,
        compile_or_warm_up_model=lambda: None,
    )
    core = SimpleNamespace(model_executor=workers, collective_rpc=lambda *_, **__: None)
    refusal = None
    with versions.recorded_checks(planning) as checks:
        try:
            with importlib.import_module("vllm.config").set_current_vllm_config(config):
                importlib.import_module("vllm.v1.engine.core").EngineCore._initialize_kv_caches(core, config)
        except ValueError as error:
            refusal = str(error)
    figures: dict[str, Any] = {"fits": refusal is None, "refusal": refusal, "available_bytes": min(available)}
    if checks:
        figures["needed_bytes"] = max((needed - have, needed) for have, needed, _ in checks)[1]
        figures["max_model_len_that_fits"] = min(longest for _, _, longest in checks)
    if refusal is not None or not pools:
        return figures
    first, sizes = pools[0], [versions.bytes_per_block(config, one) for one in pools]
    groups = [(type(group.kv_cache_spec).__name__, group) for group in first.kv_cache_groups]
    tokens = [
        # The value that stands before the word.
        int(values[text.partition("%s tokens")[0].count("%s")].replace(",", ""))
        for text, values in log.lines
        if "KV cache size" in text
    ]
    return figures | {
        "blocks": first.num_blocks,
        "bytes_per_block": min(zip(available, sizes), key=lambda rank: rank[0] // max(rank[1], 1))[1],
        "block_size": min((group.kv_cache_spec.block_size for _, group in groups), default=None),
        "tokens": min(tokens, default=None),
        "max_concurrency": min((args[-1] for text, args in log.lines if "Maximum concurrency" in text), default=None),
        "max_model_len": config.model_config.max_model_len,
        "groups": [
            {
                "kind": kind,
                "layers": len(group.layer_names),
                "block_size": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
            }
            for kind, group in groups
        ],
    }


class _Log:
    """Replaces the logger of a vLLM module, and keeps each line with its values."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def log(text: object, *values: Any, **_options: Any) -> None:
            self.lines.append((str(text), values))
            if name.startswith(("warning", "error")):
                say(LOG, str(text) % values if values else str(text))

        return log
