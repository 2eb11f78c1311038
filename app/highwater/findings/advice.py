"""Known settings: what to change, and what that costs. Pure.

Everything here was measured or read (docs/engine.md, docs/relief.md); figures are of one machine: two NPUs of 60.96 GiB
with Qwen3-VL-8B on vLLM 0.12.0 and vllm-ascend 0.12.0rc1. Where a cost was not measured, it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from highwater.accounting.components import COMPONENTS
from highwater.findings.finding import Advice, Finding
from highwater.readings import EngineStatus

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
        "Let the policy act earlier: a rule of your own on device_free_bytes with more free at high_water, on "
        "encoder_cache_bytes or on device_growth_bytes; and mode act, where it is observe."
    ),
    cost="Cached outputs are copied or encoded again sooner. Waters that the engine cannot reach at rest are refused.",
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
MAX_NUM_SEQS: Final = Advice(
    setting="--max-num-seqs",
    change=(
        "Lower it, as the message says: the sampler is warmed up with that many requests at once, after the KV cache "
        "has been sized."
    ),
    cost="Fewer requests run at the same time. Needs a restart.",
)
MORE_FOR_THE_KV_CACHE: Final = Advice(
    setting="--gpu-memory-utilization, --tensor-parallel-size",
    change=(
        "Nothing is left for the KV cache after weights and profiling. Give vLLM a larger share where the device has "
        "room beside it, spread the model over more devices, or take a smaller or quantized model."
    ),
    cost="A larger share leaves less for workspaces, collectives and graphs. Needs a restart.",
)
WHO_KILLED: Final = Advice(
    setting="Exit status 137 (128 + 9, SIGKILL)",
    change=(
        "Look who killed it: OOMKilled in the container's last state (kubectl describe pod, docker inspect) and "
        "`Killed process` in the kernel's log (dmesg) say that it was for host memory; else a stop that took longer "
        "than its grace, a failed liveness probe, or somebody's kill -9."
    ),
    cost="Nothing.",
)
COMMAND_LINE: Final = Advice(
    setting="The engine's command line",
    change="Correct the option that the log names.",
    cost="Nothing.",
)
SHM_SIZE: Final = Advice(
    setting="--shm-size (docker), an emptyDir with medium: Memory at /dev/shm (Kubernetes)",
    change="Raise it: vLLM's processes exchange data through /dev/shm, and writing beyond its size is a bus error.",
    cost="Host memory, as far as it is used; on Kubernetes it counts towards the container's limit.",
)
VLLM_TIMEOUT: Final = Advice(
    setting="VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    change="Raise it only where a single step may take that long, as with a first compilation.",
    cost="A real hang is noticed later. Needs a restart.",
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
    """Return what keeps PyTorch's allocator from holding what nobody uses, on this kind of device."""
    settings = {"npu": (NPU_EXPANDABLE_SEGMENTS, NPU_MAX_SPLIT), "cuda": (CUDA_EXPANDABLE_SEGMENTS,)}
    return settings.get(device_type or "", ())


COMPONENT_MEANING: Final[Mapping[str, str]] = {row.name: row.explained for row in COMPONENTS}


def for_component(name: str, device_type: str | None) -> tuple[Advice, ...]:
    """Return what keeps a component of used bytes small.

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


def possible(finding: Finding, engine: EngineStatus) -> Finding:
    """Return the finding without advice that this engine cannot follow."""
    # Before an engine was asked what it can do, everything stands at False, and no version is known.
    if engine.version is not None and engine.capabilities.get("reset_encoder_cache") is False:
        return replace(finding, advice=tuple(each for each in finding.advice if each is not RESET_ENCODER_CACHE))
    return finding
