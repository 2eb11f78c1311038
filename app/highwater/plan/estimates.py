"""The parts of a device that a start takes before the KV cache: weights, activation peak, non-torch, graphs.

Each part is what an earlier start of the same kind measured, or else an estimate between bounds with its reason. The
sums and their rounding are those of vLLM's `determine_available_memory`, by version (`formula`, `requested_bytes`).
From 0.20 on the estimate of CUDA graphs is taken off too (`VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS`, there since 0.18
and off until then; vLLM's log says "default since v0.21.0", its `envs.py` of 0.20.0 has it on).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from highwater.plan import ascend
from highwater.plan.checkpoint import Tensor, architecture, entries, text_config, whole
from highwater.plan.images import largest_item
from highwater.plan.json_file import ConfigJson
from highwater.plan.weights import Ranks, element_bytes, model_dtype, weights_from_config, weights_from_files
from highwater.units import GIB, MIB, gib_text
from kvplan.errors import PlanError
from kvplan.figure import Figure, add, estimated, exact, measured
from kvplan.flags import EngineFlags
from kvplan.generations import Generation, generation_of
from kvplan.versions import Release

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's config.json, preprocessor_config.json, and the tensors of its checkpoint's files; None: no files."""

    config: ConfigJson
    preprocessor: ConfigJson = field(default_factory=dict)
    tensors: tuple[Tensor, ...] | None = None

    def largest_item(self, flags: EngineFlags) -> int | None:
        return largest_item(self.config, self.preprocessor, flags.limit_mm_per_prompt or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStart:
    """An earlier start of one rank: its memory and the flags that it was made with; None: not reported."""

    version: str
    platform: str
    architecture: str
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None  # the increase
    graphs_bytes: int | None = None  # as that start estimated and subtracted them
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBudget:
    total_bytes: int
    requested_bytes: int  # vLLM's budget of the device
    weights: Figure
    activation: Figure
    non_torch: Figure  # what is allocated outside torch: contexts, communication buffers, kernels
    graphs: Figure  # CUDA or ACL graphs
    graphs_are_subtracted: bool
    available: Figure  # what is left for the KV cache
    refusal: str | None  # why nothing is left for the KV cache, so that vLLM does not start; None: it starts
    formula: str  # how this version computes what is left, in words

    def as_json(self) -> dict[str, Any]:
        names = ("weights", "activation", "non_torch", "graphs", "available")
        figures = {f"{name}_bytes": asdict(getattr(self, name)) for name in names}
        figures["graphs_bytes"]["subtracted"] = self.graphs_are_subtracted
        ends = {"refusal": self.refusal, "formula": self.formula}
        return {"total_bytes": self.total_bytes, "requested_bytes": self.requested_bytes, **figures, **ends}


def requested_bytes(total_bytes: int, utilization: float, release: Release, platform: str) -> int:
    """Return vLLM's budget of a device, with its own rounding.

    `v1/worker/utils.py: request_memory` rounds up from 0.14 on; before, and on Ascend, the fraction is kept and lost
    when the KV cache's bytes are made whole.
    """
    product = total_bytes * utilization
    return math.ceil(product) if release >= (0, 14) and platform != "ascend" else int(product)


def estimate_start(
    model: ModelFacts,
    flags: EngineFlags,
    generation: Generation,
    measured_start: MeasuredStart | None = None,
    *,
    smallest_step: tuple[int, int] | None = None,
    stage: int = 0,
) -> StartBudget:
    """Divide the memory of one rank as this version's start would.

    ``flags`` have vLLM's defaults filled in, and `device_bytes`; ``smallest_step`` has the tokens and requests that the
    card may have in place of those. Parts are those of ``measured_start`` where its flags were the same. ``stage`` is
    the pipeline stage of the rank, from 0. Raises PlanError: a flag that is needed is missing, or the model's weights
    cannot be derived.
    """
    if flags.platform == "cpu":
        raise PlanError(
            "--platform is 'cpu': what a CPU engine has resident beside its KV cache is known to a running engine only"
        )
    total = _needed(flags.device_bytes, "--device", "the device's memory, such as 80GiB")
    utilization = _needed(flags.gpu_memory_utilization, "--gpu-memory-utilization", "a share such as 0.9")
    release = generation.release[:2]
    requested = requested_bytes(total, utilization, release, flags.platform)
    weights = weights_of(model, flags, release, stage)
    if "vision_config" in model.config and model.largest_item(flags) == 0:
        # Most versions do not load the tower then (0.32.0, model_executor/models/interfaces.py: _mark_tower_model).
        bare = ModelFacts(config={key: part for key, part in model.config.items() if key != "vision_config"})
        low = min(weights.low, weights_of(bare, flags, release, stage).low)
        weights = estimated(low, weights.bytes, weights.high, f"{weights.why}; without its vision tower at least")
    activation = activation_peak(model, flags, release)
    if smallest_step is not None:
        smallest = replace(flags, max_num_batched_tokens=smallest_step[0], max_num_seqs=smallest_step[1])
        activation = replace(activation, low=min(activation.low, activation_peak(model, smallest, release).low))
        least = min(weights.low, weights_of(model, smallest, release, stage).low)
        weights = replace(weights, low=least, grade=weights.grade if least == weights.low else "estimated")
    non_torch, graphs = non_torch_increase(flags, release), graph_memory(model, flags)
    if measured_start is not None and _is_comparable(measured_start, model, flags, release, weights):
        start, why = measured_start, f"measured by a start of vLLM {measured_start.version}"
        weights = measured(start.weights_bytes or 0, why)
        activation = _measured_activation(start, activation, model, flags, release)
        if start.non_torch_bytes is not None:
            non_torch = measured(start.non_torch_bytes, why)
        if start.graphs_bytes is not None and start.max_num_seqs == flags.max_num_seqs:
            graphs = measured(start.graphs_bytes, why)
    subtracted = subtracts_graphs(release, flags.platform)
    others = exact(flags.in_use_bytes or 0, "in use by others, which this version counts off")
    counted = (*((graphs,) if subtracted else ()), *((others,) if counts_others(release, flags.platform) else ()))
    taken = add((weights, activation, non_torch, *counted), "what a start takes")
    available = _available(requested, taken, flags, release)
    is_given = available.grade == "exact"
    if flags.in_use_bytes and total - requested - flags.in_use_bytes < non_torch.high:
        # The start is refused if the engine's own context, made before it looks, takes more than that.
        available = replace(available, low=0, grade="estimated")
    nothing_left = (
        f"Nothing is left for the KV cache: what a start takes ({gib_text(taken.bytes)}, {taken.grade}) is more than"
        f" vLLM's share of the card ({gib_text(requested)}). A larger --gpu-memory-utilization,"
        " --tensor-parallel-size or card is needed."
    )
    return StartBudget(
        total_bytes=total,
        requested_bytes=requested,
        weights=weights,
        activation=activation,
        non_torch=non_torch,
        graphs=graphs,
        graphs_are_subtracted=subtracted,
        available=available,
        refusal=None if available.bytes else nothing_left,
        formula=available.why if is_given else formula(release, flags.platform),
    )


def subtracts_graphs(release: Release, platform: str) -> bool:
    """Return whether an estimate of the graphs is taken off the budget where no variable says otherwise."""
    return release in ascend.SUBTRACTS_GRAPHS if platform == "ascend" else release >= (0, 20)


def counts_others(release: Release, platform: str) -> bool:
    """Return whether what others have in use is taken off the KV cache; else a start is refused that it leaves no room.

    vllm 0.11.0 v1/worker/gpu_worker.py:185, vllm 0.32.0 v1/worker/utils.py:716.
    """
    return platform == "ascend" and release in ascend.COUNTS_THE_WHOLE_CARD


def formula(release: Release, platform: str) -> str:
    if counts_others(release, platform):
        return "total * utilization - (torch's allocated peak + what of the card is used beside torch's tensors)"
    if release < (0, 27) or platform == "ascend":  # utils/mem_utils.py
        words = "requested - (weights + torch peak increase + non-torch increase)"
    else:
        words = "requested - (consumed since the start + transient peak above it)"
    return f"{words} - estimate of the graphs" if subtracts_graphs(release, platform) else words


def _available(requested: int, taken: Figure, flags: EngineFlags, release: Release) -> Figure:
    """Return the bytes left for the KV cache: 0 where the parts come to more than the budget."""
    given = flags.kv_cache_memory_bytes
    if given is not None and (flags.platform != "ascend" or release in ascend.TAKES_KV_CACHE_MEMORY_BYTES):
        return exact(given, "--kv-cache-memory-bytes, which vLLM takes as it is")
    ignored = "; this version of vllm-ascend ignores --kv-cache-memory-bytes" if given is not None else ""
    return Figure(
        max(requested - taken.bytes, 0),
        max(requested - taken.high, 0),
        max(requested - taken.low, 0),
        taken.grade,
        f"the budget less what a start takes of it{ignored}",
    )


def _needed(value: _Number | None, key: str, right: str) -> _Number:
    if value is None:
        raise PlanError(f"{key} is missing: {right} is needed to estimate what is left for the KV cache")
    return value


def weights_of(model: ModelFacts, flags: EngineFlags, release: Release, stage: int) -> Figure:
    ranks = Ranks(
        tensor=flags.tensor_parallel_size,
        pipeline=flags.pipeline_parallel_size,
        stage=stage,
        experts=flags.tensor_parallel_size * flags.data_parallel_size if flags.enable_expert_parallel else 1,
        expandable_segments=flags.platform == "ascend" and release in ascend.EXPANDABLE_SEGMENTS,
    )
    dtype = None if flags.dtype in (None, "auto") else flags.dtype
    if model.tensors:
        weights = weights_from_files(model.config, model.tensors, ranks, quantization=flags.quantization, dtype=dtype)
    else:
        weights = weights_from_config(model.config, ranks, quantization=flags.quantization, dtype=dtype)
    tower = model.config.get("vision_config")
    if isinstance(tower, Mapping) and (levels := len(entries(tower, "deepstack_visual_indexes"))):
        # Qwen3-VL keeps a step's embeddings for each (0.11.0 to 0.33.0, models/qwen3_vl.py: deepstack_input_embeds).
        width = whole(text_config(model.config), "hidden_size") * element_bytes(dtype or model_dtype(model.config))
        buffers = exact(levels * (flags.max_num_batched_tokens or 0) * width, "buffers of a step")
        weights = add((weights, buffers), weights.why)
    if flags.platform != "ascend":
        return weights
    # One start is known: Qwen3-VL-8B with two NPUs logged 9.19 where this counts 9.18 GiB.
    why = f"{weights.why}; on Ascend, operators keep copies and tables of their own beside them"
    return estimated(weights.low, weights.bytes, round(weights.high * 1.02) + GIB, why)


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    likely: float
    high: float

    def times(self, factor: float) -> _Range:
        return _Range(self.low * factor, self.likely * factor, self.high * factor)

    def plus(self, other: _Range) -> _Range:
        return _Range(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def or_larger(self, other: _Range) -> _Range:
        return _Range(max(self.low, other.low), max(self.likely, other.likely), max(self.high, other.high))


def activation_peak(model: ModelFacts, flags: EngineFlags, release: Release) -> Figure:
    """Estimate the peak of vLLM's profile run.

    The run (`gpu_model_runner.py: profile_run`) encodes images, passes `max_num_batched_tokens` tokens through the
    layers, and then samples for `max_num_seqs` requests while the layers' and the encoder's outputs are still held.
    The larger of both steps is the peak; with 1,024 sequences it is sampling, for its copies of the logits.
    """
    text = text_config(model.config)
    tokens = _needed(flags.max_num_batched_tokens, "--max-num-batched-tokens", "a number of tokens")
    sequences = min(_needed(flags.max_num_seqs, "--max-num-seqs", "a number of requests"), tokens)
    element = element_bytes(flags.dtype if flags.dtype not in (None, "auto") else model_dtype(model.config))
    hidden = whole(text, "hidden_size", "n_embd", "d_model")
    state = tokens * hidden * element
    logits = _bytes_per_logit(release, flags.platform).times(sequences * whole(text, "vocab_size"))
    encoder_output, encoder_peak = _encoder(model, flags, release, hidden, element)
    held = _Range(1.0, 1.6, 3.0).times(state).plus(_Range(16 * MIB, 44 * MIB, 128 * MIB)).plus(encoder_output)
    sampling = logits.plus(held).plus(_Range(0, *_expert_buffers(text, flags, tokens, element)))
    passing = _layer_peak(text, flags, tokens, hidden, element).plus(encoder_output)
    peak = sampling.or_larger(passing).or_larger(encoder_peak)
    why = f"a profile run of {tokens} tokens that samples for {sequences} requests"
    return estimated(round(peak.low), round(peak.likely), round(peak.high), why)


def _bytes_per_logit(release: Release, platform: str) -> _Range:
    """Bytes that sampling takes for each element of the logits, from the starts that were recorded.

    Up to 0.16 top-k and top-p sort the logits (`topk_topp_sampler.py`); from 0.17 a kernel selects in place
    (`topk_topp_triton.py`), or FlashInfer's, which later versions prefer.
    """
    if platform == "ascend":
        # The profile run computes logits and does not sample (model_runner_v1.py: _dummy_sampler_run).
        return _Range(2, 4, 8)
    if release < (0, 17):
        return _Range(14, 37.5, 44)
    return _Range(13.9, 14.35, 15.3) if release < (0, 20) else _Range(10, 14.35, 22)


def _layer_peak(text: ConfigJson, flags: EngineFlags, tokens: int, hidden: int, element: int) -> _Range:
    inner = whole(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden) / flags.tensor_parallel_size
    likely = tokens * element * (2 * hidden + 3 * inner)
    experts_likely, experts_high = _expert_buffers(text, flags, tokens, element)
    return _Range(tokens * element * hidden, likely + experts_likely, 1.5 * (likely + experts_high) + 128 * MIB)


def _expert_buffers(text: ConfigJson, flags: EngineFlags, tokens: int, element: int) -> tuple[float, float]:
    """Return the buffers of a mixture of experts, likely and at most: each token is there once for each expert."""
    chosen = whole(text, "num_experts_per_tok", "moe_topk", "num_experts_per_token", default=0, least=0)
    if not chosen:
        return 0.0, 0.0
    hidden = whole(text, "hidden_size")
    inner = whole(text, "moe_intermediate_size", "intermediate_size") / flags.tensor_parallel_size
    rows = tokens * chosen * element
    return rows * (max(2 * inner, hidden) + inner), rows * (2 * inner + 2 * hidden + inner)


def _encoder(
    model: ModelFacts, flags: EngineFlags, release: Release, hidden: int, element: int
) -> tuple[_Range, _Range]:
    """Return the bytes of the encoder's outputs and inputs, and the peak of its own pass.

    It is profiled with as many of the largest items as the larger of a step and one item holds
    (v1/core/encoder_cache_manager.py: compute_mm_encoder_budget).
    """
    item = model.largest_item(flags)
    nothing = _Range(0, 0, 0)
    # vllm-ascend did not profile it (model_runner_v1.py: profile_run): what it takes later is in no budget.
    if item == 0 or (flags.platform == "ascend" and release in ascend.SKIPS_ENCODER):
        return nothing, nothing
    described = model.config.get("vision_config")
    tower = described if isinstance(described, Mapping) else {}
    tokens = max(flags.max_num_batched_tokens or 0, item or 0)
    is_gemma3 = architecture(model.config).startswith("Gemma3")
    merge = 16 if is_gemma3 else whole(tower, "spatial_merge_size", default=2) ** 2
    patches = tokens * merge
    levels = 1 + len(entries(tower, "deepstack_visual_indexes"))
    pixels = patches * 3 * whole(tower, "patch_size", default=14) ** 2 * whole(tower, "temporal_patch_size", default=1)
    outputs = tokens * hidden * levels * element
    if item and release < (0, 13):
        outputs *= tokens // item  # each was padded to all of them (0.11.0, v1/worker/gpu_model_runner.py:3374)
    width = whole(tower, "hidden_size", "embed_dim", default=1024)
    inner = whole(tower, "intermediate_size", default=4 * width) / flags.tensor_parallel_size
    one_pass = patches * element * 2 * (width + inner)
    held = _Range(0, outputs + pixels * element, 1.5 * (outputs + pixels * element) + 256 * MIB)
    if item is None:
        held = replace(held, high=flags.device_bytes or 0)  # no more is there
    return held, _Range(0, one_pass, 2 * one_pass).plus(held)


def non_torch_increase(flags: EngineFlags, release: Release) -> Figure:
    """Estimate what a start allocates outside torch, and from 0.27 on the tensors that stay beside the weights."""
    figure = _outside_torch(flags)
    if flags.platform == "ascend" or release < (0, 27):
        return figure
    why = f"{figure.why}; this version counts tensors that stay beside the weights too"
    return estimated(figure.low, figure.bytes + 150 * MIB, figure.high + GIB, why)


def _outside_torch(flags: EngineFlags) -> Figure:
    ranks = flags.tensor_parallel_size * flags.pipeline_parallel_size
    if flags.platform == "ascend":
        # HCCL takes a buffer to send and one to receive, 200 MB each, for each group of ranks (utils.py:
        # get_default_buffer_config; HCCL_BUFFSIZE changes it).
        if ranks == 1:
            return estimated(100 * MIB, 350 * MIB, 1536 * MIB, "context and operators of one NPU, without HCCL")
        return estimated(400 * MIB, 600 * MIB, 3 * GIB, "context, operators and HCCL's buffers (HCCL_BUFFSIZE)")
    if ranks == 1:
        return estimated(100 * MIB, 250 * MIB, 512 * MIB, "the starts recorded with one GPU had 0.13 to 0.46 GiB")
    return estimated(
        512 * MIB, round(2.1 * GIB), round(2.6 * GIB), "the starts recorded with several GPUs had 2.07 to 2.17 GiB"
    )


def graph_memory(model: ModelFacts, flags: EngineFlags) -> Figure:
    text = text_config(model.config)
    layers = whole(text, "num_hidden_layers", "n_layer")
    mixture = whole(text, "num_experts", "num_local_experts", "n_routed_experts", default=0, least=0) > 0
    likely = (0.4 + 0.0115 * layers + 0.3 * mixture + 0.3 * (flags.tensor_parallel_size > 1)) * GIB
    sequences = _needed(flags.max_num_seqs, "--max-num-seqs", "a number of requests")
    # Sizes are captured up to twice the sequences, at most 512 (config/vllm.py: _set_cudagraph_sizes).
    likely *= 0.3 + 0.7 * min(2 * sequences, 512) / 512
    why = f"graphs of {layers} layers; 0 with --enforce-eager"
    return estimated(round(0.2 * likely), round(likely), round(1.8 * likely), why)


_SAME_MODEL = 0.02


def _is_comparable(
    start: MeasuredStart, model: ModelFacts, flags: EngineFlags, release: Release, weights: Figure
) -> bool:
    """Return whether a start was of this model, version and division into ranks.

    Models of one architecture differ in size and quantization: its weights must be as large as these.
    """
    return (
        start.platform == flags.platform
        and start.architecture == architecture(model.config)
        and generation_of(start.version).release[:2] == release
        and start.tensor_parallel_size == flags.tensor_parallel_size
        and start.pipeline_parallel_size == flags.pipeline_parallel_size
        and start.weights_bytes is not None
        and weights.low * (1 - _SAME_MODEL) <= start.weights_bytes <= weights.high * (1 + _SAME_MODEL)
    )


def _measured_activation(
    start: MeasuredStart, estimate: Figure, model: ModelFacts, flags: EngineFlags, release: Release
) -> Figure:
    """Return the measured peak, or the estimate scaled by how far that start's peak was from its own estimate."""
    tokens, requests = start.max_num_batched_tokens, start.max_num_seqs
    if start.activation_bytes is None:
        return estimate
    if (tokens, requests) == (flags.max_num_batched_tokens, flags.max_num_seqs):
        return measured(start.activation_bytes, f"measured by a start of vLLM {start.version}")
    if tokens is None or requests is None:
        return estimate
    of_start = activation_peak(model, replace(flags, max_num_batched_tokens=tokens, max_num_seqs=requests), release)
    factor = start.activation_bytes / max(of_start.bytes, 1)
    scaled = round(estimate.bytes * factor)
    return estimated(
        min(round(estimate.low * factor), scaled, start.activation_bytes),
        scaled,
        max(round(estimate.high * factor), scaled),
        f"measured with {tokens} tokens and {requests} requests by a start of vLLM {start.version}, scaled",
    )
