"""The parts that a rank's memory budget may have: what each is called, how it is known, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvplan.figure import Grade


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPart:
    key: str
    title: str
    bytes: int  # negative where vLLM's own figures sum to more than there is
    grade: Grade  # ``exact``: follows from the engine's own figures; ``measured``: read by the worker package
    source: str  # vLLM's own name for it, or where it was read
    why: str  # its contents, in a sentence


# By key, or by key and how else the part may be known: title, grade, source and reason.
_PARTS: Final[Mapping[str, tuple[str, Grade, str, str]]] = {
    "weights": ("weights", "engine", "model_memory_usage", "by how much loading the model raised the device's use"),
    "weights:seen": ("weights", "measured", "parameters and buffers", "this engine does not report it"),
    "process": ("rest of the process", "exact", "requested_cpu_memory - rss",
                "interpreter, libraries, heap, and what the profiling pass left: the resident size of the process"),
    "consumed": ("persistent and non-torch", "exact", "total_consumed - weights",
                 "tensors that stay beside the weights, contexts, collectives and workspaces: this version counts one"
                 " sum"),
    "persistent": ("persistent tensors", "measured", "allocated after loading - weights",
                   "allocated before the profile and no weights: buffers and caches that stay"),
    "activation": ("peak activation", "engine", "peak_activation_memory",
                   "what the profiling pass allocated at its highest and gave back again"),
    "non_torch": ("non-torch", "engine", "non_torch_memory", "contexts, collectives and workspaces that came between"
                  " the engine's first look and the profile's end"),
    "non_torch:rest": ("non-torch", "exact", "total_consumed - weights - persistent",
                       "contexts, collectives, workspaces, and blocks that PyTorch kept"),
    "graphs": ("graphs (estimate)", "engine", "cudagraph_memory_estimate",
               "set aside for the graphs that are captured after the profile"),
    "mm_ipc": ("multimodal transfer", "exact", "--mm-ipc-gpu-memory-gb", "taken off the KV cache after the profile:"
               " multimodal inputs that API servers hand over on the device"),
    "rescaled": ("rescaled by vllm-ascend", "exact", "available_kv_cache_memory_bytes", "what the profile left, fitted"
                 " to several groups of layers, shared buffers or offload; which is not reported"),
    "kv_cache": ("KV cache", "exact", "kv_cache_config.num_blocks", "blocks for keys and values"),
    "kv_cache:bytes": ("KV cache", "engine", "available_kv_cache_memory_bytes",
                       "how much of it the blocks take is not reported"),
    "null_block": ("null block", "exact", "BlockPool.null_block",
                   "one block is a placeholder and is never given to a request"),
    "rounding": ("rounding to blocks", "exact", "available - blocks",
                 "less than one block here, or blocks that another rank has no room for"),
    "unprofiled": ("everything else", "exact", "total - the above",
                   "not profiled, because the KV cache's size was given: activation, graphs, non-torch, free"),
    "profiled": ("counted by the profile", "exact", "requested - the above", "activation, persistent tensors, what is"
                 " not PyTorch's, also of others: this version keeps one sum"),
    "bytes": ("whole bytes", "exact", "int()", "vLLM computes with fractions of bytes"),
    "unexplained": ("not explained", "exact", "requested - the above",
                    "the engine's own figures do not sum to what it requested; this is the difference"),
    "non_torch_uncounted": ("non-torch not counted", "measured", "used - reserved", ""),
    "graphs_uncounted": ("graphs beyond that", "engine", "capture_model", ""),
    "others": ("in use before the start", "engine", "init_snapshot", "in use before the engine's first look: other"
               " processes, and this one's contexts, buffers and handles"),
}  # fmt: skip


def part_of(row: str, size: int, why: str | None = None) -> BudgetPart:
    """Return the part of a row of the table, of so many bytes; ``why`` replaces the row's reason."""
    title, grade, source, usual = _PARTS[row]
    key, reason = row.partition(":")[0], usual if why is None else why
    return BudgetPart(key=key, title=title, bytes=size, grade=grade, source=source, why=reason)
