"""The parts that a start takes of a card before the KV cache, and what is left for it, between bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

from highwater_worker.plan import versions
from highwater_worker.plan.told import NOT_COUNTED, say

_MIB, _GIB = 1 << 20, 1 << 30
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Figure(NamedTuple):
    """Bytes between bounds, with how they are known: `exact`, `estimated` or `given`."""

    bytes: int
    low: int
    high: int
    grade: str
    why: str


def exact(value: int, why: str) -> Figure:
    return Figure(value, value, value, "exact", why)


def activation(peak: int, config: Any) -> Figure:
    """Return the bounds of a peak that `profile_run` had on `meta`; starts of dense models printed 36 MiB more.

    Compiled code holds less at once than operators one by one, or more where it unrolls. The fused experts keep two
    buffers in which each token is once for each of its experts; MXFP4's kernels were seen without them.
    """
    text, buffers = vars(config.model_config.hf_text_config), 0
    if any(text.get(name) for name in _EXPERTS):
        say(NOT_COUNTED, "the workspace of fused experts was computed, not seen, in the activation peak")
        chosen = text.get("num_experts_per_tok") or text.get("moe_topk") or text.get("top_k_experts") or 1
        inner = text.get("moe_intermediate_size") or text.get("intermediate_size") or 0
        inner, width = inner // config.parallel_config.tensor_parallel_size, text.get("hidden_size") or 0
        rows = config.scheduler_config.max_num_batched_tokens * int(chosen) * 2
        buffers = rows * (max(2 * inner, width) + max(inner, width))
    likely = peak + 36 * _MIB + (0 if "mxfp4" in str(config.model_config.quantization) else buffers)
    why = "vLLM's profiling run on meta, operator by operator"
    return Figure(likely, peak - peak // 8, peak + peak // 8 + 128 * _MIB + buffers, "estimated", why)


def outside_torch(config: Any, *, is_npu: bool) -> Figure:
    """Estimate contexts, communication buffers and kernels; no run on `meta` shows them."""
    is_alone = config.parallel_config.world_size * (config.parallel_config.data_parallel_size or 1) == 1
    low, likely, high, why = {
        (True, True): (100, 350, 1536, "context and operators of one NPU"),
        (True, False): (400, 600, 3072, "context, operators and HCCL's buffers (HCCL_BUFFSIZE)"),
        (False, True): (100, 250, 512, "starts with one GPU printed 0.13 to 0.46 GiB"),
        (False, False): (512, 2150, 2662, "starts with several GPUs printed 2.07 to 2.17 GiB"),
    }[is_npu, is_alone]
    return Figure(likely * _MIB, low * _MIB, high * _MIB, "estimated", why)


def graphs(config: Any) -> Figure:
    """Estimate the graphs that are captured after the profiling run."""
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    if config.model_config.enforce_eager or getattr(mode, "name", "") == "NONE":
        return exact(0, "no graphs are captured")
    text = vars(config.model_config.hf_text_config)
    likely = 0.4 + 0.0115 * (text.get("num_hidden_layers") or 32) + 0.3 * any(text.get(name) for name in _EXPERTS)
    likely += 0.3 * (config.parallel_config.tensor_parallel_size > 1)
    sizes = config.compilation_config.cudagraph_capture_sizes or [512]
    likely *= (0.3 + 0.7 * min(max(sizes), 512) / 512) * _GIB
    return Figure(
        round(likely), round(0.2 * likely), round(1.8 * likely), "estimated", "what starts printed, by layers"
    )


def parts_of_start(seen: dict[str, Any], config: Any, measured: dict[str, int], *, is_npu: bool) -> dict[str, Figure]:
    """Return every part that this version takes off, by name; `measured` replaces them, in bytes."""
    parts = {
        "weights": seen["weights"],
        "activation": seen["activation"],
        "non_torch": outside_torch(config, is_npu=is_npu),
    }
    if versions.counts_buffers():
        parts["buffers"] = exact(seen["buffers"], "the runner's tensors beside the weights")
    if versions.takes_off_graphs() and not is_npu:
        parts["graphs"] = seen["graphs"]
    for name, value in measured.items():
        parts[name] = Figure(value, value, value, "given", "given with the question")
    return {name: part for name, part in parts.items() if part is not None}


def left(requested: int, parts: dict[str, Figure]) -> Figure:
    """Return what is left of `requested` bytes for the KV cache; nothing is less than 0."""
    taken = parts.values()
    likely, low, high = (
        max(requested - sum(getattr(part, name) for part in taken), 0) for name in ("bytes", "high", "low")
    )
    grade = "estimated" if any(part.grade == "estimated" for part in taken) else "exact"
    return Figure(likely, low, high, grade, f"the share of the card less {', '.join(parts)}")
