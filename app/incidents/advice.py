"""Known messages of engines, and known settings: what each means, what to change, what that costs. Pure.

Everything here was measured or read (docs/engine.md, docs/relief.md); figures are of one machine: two NPUs of 60.96 GiB
with Qwen3-VL-8B on vLLM 0.12.0 and vllm-ascend 0.12.0rc1. Where a cost was not measured, it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from app.incidents.incident import Advice

GPU_MEMORY_UTILIZATION: Final = Advice(
    setting="--gpu-memory-utilization",
    change=(
        "Lower it, say from 0.95 to 0.90. vLLM takes this share of the device for weights, the KV pool and what it "
        "profiled; everything else must fit into the rest: workspaces, collectives, graphs, other processes, and "
        "whatever encoder work and encoder outputs were not profiled."
    ),
    cost="KV cache: in the measured start 0.95 gave 44.30 GiB of it, 0.90 gave 40.35. Needs a restart.",
)
MAX_NUM_BATCHED_TOKENS: Final = Advice(
    setting="--max-num-batched-tokens",
    change=(
        "Lower it. The encoder cache's budget, and what the encoder may take in one step, are this number of tokens "
        "unless one item alone is larger. Bytes on every rank are about budget x embedding width x 2; models with "
        "deepstack layers have wide embeddings. Each tensor-parallel rank holds a full copy."
    ),
    cost="Long prompts take more steps, and fewer images stay cached: they are encoded again. Needs a restart.",
)
LIMIT_MM_PER_PROMPT: Final = Advice(
    setting="--limit-mm-per-prompt '{\"image\": 4}'",
    change="Bounds how many images (or other items) one request may bring, and so what one request can make of them.",
    cost="Requests with more items are refused. Needs a restart.",
)
MM_PROCESSOR_CACHE: Final = Advice(
    setting="--mm-processor-cache-gb",
    change=(
        "Lower it. It is host memory, 4 GiB by default, and as many copies as API server processes and data-parallel "
        "engines together. It holds no device memory at all. At 0 there is no such cache, and none that could drift."
    ),
    cost="Images that come again are processed again on the host. Needs a restart.",
)
NPU_EXPANDABLE_SEGMENTS: Final = Advice(
    setting="PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
    change=(
        "The cheap remedy for fragmentation. vllm-ascend sets it by default from 0.14.0rc1 on where sleep mode is off; "
        "0.12.0rc1 sets nothing."
    ),
    cost=(
        "It excludes max_split_size_mb and garbage_collection_threshold, and sleep mode refuses to work with it. "
        "Needs a restart."
    ),
)
NPU_MAX_SPLIT: Final = Advice(
    setting="PYTORCH_NPU_ALLOC_CONF=max_split_size_mb:256",
    change="Where expandable segments cannot be had, because sleep mode is in use.",
    cost="It excludes expandable_segments; what it costs was not measured. Needs a restart.",
)
CUDA_EXPANDABLE_SEGMENTS: Final = Advice(
    setting="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    change="The remedy for fragmentation that PyTorch's own message names.",
    cost="Not measured here. Needs a restart.",
)
HCCL_BUFFSIZE: Final = Advice(
    setting="HCCL_BUFFSIZE",
    change="Lower it. Each communicator's buffers have this size; they stand under non_torch.",
    cost="What it costs the collectives was not measured: put a benchmark beside it. Needs a restart.",
)
OTHER_PROCESSES: Final = Advice(
    setting="npu-smi info, nvidia-smi",
    change="Look for other processes on the device: used and free are the driver's, for the whole card.",
    cost="Nothing.",
)
RELEASE: Final = Advice(
    setting='POST /memory/reclaim {"remedies": ["release"]}',
    change=(
        "Gives back to the device what PyTorch's allocator has reserved and no tensor uses (releasable_bytes in "
        "/memory; fragments and captured graphs' memory stay), and workspaces of the NPU. It cannot give back what is "
        "referenced, such as cached encoder outputs: trim or reset them first."
    ),
    cost="The engine stands still meanwhile, about half a second, most of it Python's garbage collection.",
)
TRIM_ENCODER_CACHE: Final = Advice(
    setting='POST /memory/reclaim {"remedies": ["trim_encoder_cache", "release"]}',
    change="Moves encoder outputs to host memory; the engine still has all of them. Works on every version.",
    cost="Host memory, and a copy back for each output that is needed again. Leave room for those of one step.",
)
RESET_ENCODER_CACHE: Final = Advice(
    setting='POST /memory/reclaim {"remedies": ["reset_encoder_cache", "release"]}',
    change="Empties the encoder cache of scheduler and workers together. vLLM 0.16 and newer.",
    cost="Images that come again are encoded again.",
)
POLICY_EARLIER: Final = Advice(
    setting="policy.rules, policy.mode",
    change=(
        "Let the policy act earlier: a lower high_water on device_used_ratio or encoder_cache_bytes, or a rule on "
        "device_growth_bytes; and mode act, where it is observe."
    ),
    cost="Cached outputs are copied or encoded again sooner. A high water under what vLLM takes at start fires always.",
)
RESET_MM_CACHE: Final = Advice(
    setting='POST /memory/reclaim {"remedies": ["reset_mm_cache"]}',
    change="Empties the processor cache on the host. Through the sidecar, safe mode, vLLM 0.25 and newer.",
    cost="New requests are held for it, and images are processed again. It frees nothing on the device.",
)
NEVER_RESET_MM_CACHE: Final = Advice(
    setting="POST /reset_mm_cache",
    change=(
        "Never call it under traffic at vLLM's own port, nor with ?force=true: before 0.25 it can hang the engine for "
        "ever, while /health stays 200. The sidecar refuses it there."
    ),
    cost="Nothing: it frees host memory only.",
)
NEVER_CLEAR_ONE_SIDE: Final = Advice(
    setting="POST /reset_encoder_cache",
    change=(
        "The only way to empty the encoder cache (0.16 and newer): both sides together. Never clear the workers' side "
        "alone, as through /collective_rpc; bind vLLM to 127.0.0.1 so that nobody else does. Before 0.16 trim instead."
    ),
    cost="Images that come again are encoded again.",
)
UPGRADE_MM_CACHE: Final = Advice(
    setting="vLLM 0.28 or newer",
    change="There a drift of the processor caches fails one request instead of the engine.",
    cost="An upgrade.",
)
UPGRADE_ASCEND: Final = Advice(
    setting="vllm-ascend 0.13.0 or newer",
    change="0.11.0 and 0.12.0rc1 do not profile the multimodal encoder or its cache; newer ones do.",
    cost="An upgrade, and a smaller KV cache: what the encoder needs is then left out of it.",
)
MAX_MODEL_LEN: Final = Advice(
    setting="--max-model-len",
    change=(
        "Lower it until one request fits into the KV cache. On one 24 GiB card with Qwen2.5-7B 131,072 tokens needed "
        "7.00 GiB, 120,000 needed 6.41, and 5.26 were there: 90,000 started."
    ),
    cost="Longer requests are refused. Needs a restart.",
)
RESET_PREFIX_CACHE: Final = Advice(
    setting="POST /reset_prefix_cache",
    change="Frees blocks with cached prefixes within the pool.",
    cost="Prefixes are computed again. It never frees device memory: the pool is preallocated.",
)
CPU_KVCACHE_SPACE: Final = Advice(
    setting="VLLM_CPU_KVCACHE_SPACE",
    change="Lower it: GiB of host memory for the KV cache of the CPU backend.",
    cost="Fewer tokens in the KV cache. Needs a restart.",
)
MEMORY_LIMIT: Final = Advice(
    setting="resources.limits.memory",
    change="Raise the container's memory limit, or the machine's memory.",
    cost="Host memory.",
)
TRIM_HOST_BUDGET: Final = Advice(
    setting="trim.host_budget_bytes",
    change="Lower it: so much host memory may hold trimmed encoder outputs, on each rank.",
    cost="Trims move less, and free less on the device.",
)
RESTART: Final = Advice(
    setting="Restart the engine",
    change="Nothing else brings back an engine that hangs or is dead; /health can stay 200 while it hangs.",
    cost="All requests under way, and the time of a start.",
)
LOOK_AT_RANKS: Final = Advice(
    setting="The ranks, below",
    change="Look at what each rank was doing: the one whose stack is not waiting for the others is where to begin.",
    cost="Nothing.",
)


def against_fragmentation(device_type: str | None) -> tuple[Advice, ...]:
    """What keeps PyTorch's allocator from holding what nobody uses, on this kind of device."""
    settings = {"npu": (NPU_EXPANDABLE_SEGMENTS, NPU_MAX_SPLIT), "cuda": (CUDA_EXPANDABLE_SEGMENTS,)}
    return settings.get(device_type or "", ())


COMPONENT_MEANING: Final[Mapping[str, str]] = {
    "weights_bytes": "Weights are loaded at start; a change since then is unusual.",
    "kv_cache_bytes": "The KV pool is allocated at start; a change since then is unusual.",
    "encoder_cache_bytes": (
        "vLLM evicts encoder outputs only when it needs the room, so the cache climbs to its budget and stays there. "
        "That looks like a leak and is none; but it must fit."
    ),
    "other_tensors_bytes": (
        "Live tensors of PyTorch that are neither weights, KV pool nor encoder outputs: at rest buffers, workspaces "
        "and graphs' inputs; in a step also activations, of which large images and large batches need the most."
    ),
    "torch_cached_bytes": (
        "PyTorch's allocator keeps what tensors leave behind. Others on the device (workspaces, collectives, graphs) "
        "cannot use it until it is given back."
    ),
    "non_torch_bytes": (
        "Not PyTorch's: contexts, collectives' buffers, graphs, operators' workspaces, other processes. On the NPU the "
        "workspace allocator has one block for each stream that grows and is given back only by a release, or when "
        "memory has run out."
    ),
}


def for_component(name: str, device_type: str | None) -> tuple[Advice, ...]:
    """What keeps a component of used bytes small.

    Args:
        name: As in ``readings.Components``.
        device_type: ``npu``, ``cuda``, ``cpu``; ``None`` where not known.
    """
    if name == "encoder_cache_bytes":
        return (RESET_ENCODER_CACHE, TRIM_ENCODER_CACHE, MAX_NUM_BATCHED_TOKENS, POLICY_EARLIER)
    if name == "other_tensors_bytes":
        return (LIMIT_MM_PER_PROMPT, MAX_NUM_BATCHED_TOKENS, GPU_MEMORY_UTILIZATION)
    if name == "torch_cached_bytes":
        return (RELEASE, *against_fragmentation(device_type))
    if name == "non_torch_bytes" and device_type != "cpu":
        hccl = (HCCL_BUFFSIZE,) if device_type == "npu" else ()
        return (OTHER_PROCESSES, GPU_MEMORY_UTILIZATION, *hccl)
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMessage:
    """A message that engines are known to write.

    Attributes:
        name: A word for programs.
        marks: Each a group of texts that a line has all of, in any case of letters; one group is enough.
        title: A clause that can stand within a sentence.
        meaning: In plain words.
        advice: What can be changed.
    """

    name: str
    marks: tuple[tuple[str, ...], ...]
    title: str
    meaning: str
    advice: tuple[Advice, ...]


# Causes before consequences; a line belongs to the first that fits it.
KNOWN: Final[tuple[KnownMessage, ...]] = (
    KnownMessage(
        name="npu_workspace_out_of_memory",
        marks=(("npuworkspaceallocator", "tried to allocate"),),
        title="an operator's workspace found no room on the NPU",
        meaning=(
            "An operator needed scratch memory, and the device had none. Workspaces are not PyTorch's: they stand "
            "under non_torch. PyTorch's allocator can hold gigabytes meanwhile that no tensor uses: in the measured "
            "run 59.38 of 60.96 GiB were reserved, at a peak of 54.77 allocated, when 180 MiB were asked for."
        ),
        advice=(GPU_MEMORY_UTILIZATION, NPU_EXPANDABLE_SEGMENTS, RELEASE, POLICY_EARLIER),
    ),
    KnownMessage(
        name="npu_out_of_memory",
        marks=(("npu out of memory",),),
        title="PyTorch found no room on the NPU",
        meaning=(
            "PyTorch's allocator asked the device for more and got none, also after it had given back what it held "
            "in vain. Before this error alloc_retries rises: that is the best early warning on the NPU."
        ),
        advice=(GPU_MEMORY_UTILIZATION, NPU_EXPANDABLE_SEGMENTS, LIMIT_MM_PER_PROMPT, MAX_NUM_BATCHED_TOKENS),
    ),
    KnownMessage(
        name="cuda_out_of_memory",
        marks=(("cuda out of memory",), ("cuda error", "out of memory")),
        title="PyTorch found no room on the GPU",
        meaning=(
            "PyTorch's allocator asked the device for more and got none. The message tells how much is reserved and "
            "not allocated: where that is much, it is fragmentation; where it is little, the device is full."
        ),
        advice=(GPU_MEMORY_UTILIZATION, CUDA_EXPANDABLE_SEGMENTS, LIMIT_MM_PER_PROMPT, MAX_NUM_BATCHED_TOKENS),
    ),
    KnownMessage(
        name="memory_allocation_failure_el0004",
        marks=(("el0004",),),
        title="the NPU's runtime could not allocate (EL0004)",
        meaning=(
            "Memory_Allocation_Failure: the runtime below PyTorch could not get device memory. It comes with the "
            "message of the one who asked, and says the same."
        ),
        advice=(GPU_MEMORY_UTILIZATION, OTHER_PROCESSES, HCCL_BUFFSIZE),
    ),
    KnownMessage(
        name="runtime_result_207001",
        marks=(("207001", "memory"), ("207001", "runtime result"), ("207001", "error code")),
        title="the NPU's runtime could not allocate (207001)",
        meaning=(
            "The driver's own number for: no device memory. It comes with the message of the one who asked, and says "
            "the same."
        ),
        advice=(GPU_MEMORY_UTILIZATION, OTHER_PROCESSES, HCCL_BUFFSIZE),
    ),
    KnownMessage(
        name="pta_memory_error",
        marks=(("err00006",),),
        title="torch_npu reports a memory error (ERR00006)",
        meaning="torch_npu's number for its memory errors. The line with `tried to allocate` tells who asked for what.",
        advice=(GPU_MEMORY_UTILIZATION, NPU_EXPANDABLE_SEGMENTS),
    ),
    KnownMessage(
        name="kv_cache_does_not_fit",
        marks=(("cache is needed, which is larger than the available kv cache",),),
        title="the engine refused to start: one request of full length does not fit into the KV cache",
        meaning=(
            "What is left for the KV cache after weights and profiling is less than one request of --max-model-len "
            "needs. This stops a start; where it follows a death, look whether something else holds the device now."
        ),
        advice=(MAX_MODEL_LEN, OTHER_PROCESSES),
    ),
    KnownMessage(
        name="mm_cache_drift",
        marks=(("expected a cached item for mm_hash",),),
        title="the processor caches of API server and engine had drifted apart",
        meaning=(
            "The API server believed an image to be in the engine's processor cache, and it was not. Up to vLLM 0.13 "
            "the thread that takes requests in dies of it: every request hangs for ever, /health stays 200. It "
            "follows a /reset_mm_cache under traffic, and has been seen without one."
        ),
        advice=(RESTART, NEVER_RESET_MM_CACHE, UPGRADE_MM_CACHE, MM_PROCESSOR_CACHE),
    ),
    KnownMessage(
        name="encoder_cache_miss",
        marks=(("encoder cache miss",),),
        title="a worker lacked an encoder output that the scheduler believed to be there",
        meaning=(
            "The scheduler and a worker disagreed about the encoder cache, and the engine ends. It happens at once "
            "when the workers' cache is cleared and the scheduler's is not."
        ),
        advice=(RESTART, NEVER_CLEAR_ONE_SIDE),
    ),
    KnownMessage(
        name="broadcast_block_wait",
        marks=(("no available shared memory broadcast block",),),
        title="a process of the engine waited for another in vain",
        meaning=(
            "One process of the engine has something for the workers, and one of them does not take it: it hangs, is "
            "gone, or is in something very long, such as a compilation. Repeated, with no step in between, it is a "
            "hang; /health does not see it."
        ),
        advice=(LOOK_AT_RANKS, RESTART),
    ),
    KnownMessage(
        name="worker_died",
        marks=(("worker", "died unexpectedly"),),
        title="a worker's process ended",
        meaning=(
            "A worker is gone, and the engine ends with it. Its own last words stand above this line; where there are "
            "none, look at host memory: what the kernel kills says nothing."
        ),
        advice=(MEMORY_LIMIT,),
    ),
    KnownMessage(
        name="engine_dead",
        marks=(("enginedeaderror",), ("enginecore encountered an issue",)),
        title="the API server found its engine dead",
        meaning="A consequence, never a cause: what ended the engine stands above it in the log.",
        advice=(RESTART,),
    ),
)
