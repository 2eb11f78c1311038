"""Differences of vllm-ascend from vLLM where memory is divided: each rule with its version, file and line.

Read in vllm-ascend 0.11.0 to 0.30.0rc2. Later versions are taken to keep the newest rule.
`tests/compat/test_plan_ascend.py` looks every place up in the published packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from highwater.plan.errors import PlanError
from highwater.plan.terms import Release

KERNEL_BLOCK = 128
_ALIGNED_HYBRID = "qwen3_next"


@dataclass(frozen=True, slots=True)
class Source:
    """A place in vllm-ascend's sources.

    Attributes:
        version: The version that was read.
        path: The file within the package `vllm_ascend`.
        line: The line.
        text: What that line says, or begins with.
    """

    version: str
    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One difference from vLLM.

    Attributes:
        topic: What it is about.
        since: The first release with it.
        until: The first release without it; None: it still holds.
        effect: What it does, in a sentence.
        sources: Where it says so.
    """

    topic: str
    since: Release
    until: Release | None
    effect: str
    sources: tuple[Source, ...]

    def holds(self, release: Release) -> bool:
        """Return whether a release follows the rule."""
        return self.since <= release and (self.until is None or release < self.until)


_WORKER_V1, _WORKER = "worker/worker_v1.py", "worker/worker.py"
_RUNNER = "worker/model_runner_v1.py"
_MAMBA = "patch/platform/patch_mamba_config.py"

# Rules that a plan asks for by name.
_SCALED_GROUPS = Rule(
    "groups", (0, 28), None,
    "Where layers are in several groups, the bytes are scaled down so that each layer can have a buffer of its own:"
    " a plan of such a model is refused.",
    (
        Source("0.28.0rc1", _WORKER, 655, "def _scale_kv_cache_memory_for_multi_group("),
        Source("0.30.0rc2", _WORKER, 625, "self.available_kv_cache_memory_bytes = self._scale_kv_cache_memory_for"),
    ),
)  # fmt: skip
_FULL_WINDOWS = Rule(
    "sliding windows", (0, 11), (0, 14),
    "Every decoder layer is sized as full attention: a sliding window saves nothing.",
    (
        Source("0.12.0rc1", _RUNNER, 2921, "kv_cache_spec[layer_name] = FullAttentionSpec("),
        Source("0.13.0", _RUNNER, 2969, "kv_cache_spec[layer_name] = FullAttentionSpec("),
    ),
)  # fmt: skip
_UNPROFILED_ENCODER = Rule(
    "profiling", (0, 11), (0, 13),
    "Images are not profiled: what the encoder takes later is in no budget.",
    (
        Source("0.11.0", _RUNNER, 2567, "def profile_run(self) -> None:"),
        Source("0.12.0rc1", _RUNNER, 2282, "def profile_run(self) -> None:"),
    ),
)  # fmt: skip
_REMAINDER = Rule(
    "budget", (0, 11), (0, 15),
    "The KV cache gets total * utilization less the allocated peak and less everything on the card that is not"
    " torch's: what other processes hold is taken off too, and never below 0.",
    (
        Source("0.12.0rc1", _WORKER_V1, 263, "non_torch_allocations = total_allocated_bytes - "),
        Source("0.13.0", _WORKER, 301, "non_torch_allocations = total_allocated_bytes - "),
    ),
)  # fmt: skip
_GIVEN_BYTES = Rule(
    "budget", (0, 19), None,
    "`--kv-cache-memory-bytes` is taken as it is.",
    (
        Source("0.19.1rc1", _WORKER, 339, "if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes:"),
        Source("0.30.0rc2", _WORKER, 572, "if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes:"),
    ),
)  # fmt: skip
_SUBTRACTED_GRAPHS = Rule(
    "graphs", (0, 21), (0, 23),
    "An estimate of the ACL graphs is taken off the budget (`VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS`, on).",
    (Source("0.21.0rc1", _WORKER, 390, "npugraph_memory_estimate = self.model_runner.profile_cudagraph_memory()"),),
)  # fmt: skip
_EXPANDABLE_SEGMENTS = Rule(
    "allocator", (0, 14), None,
    "`PYTORCH_NPU_ALLOC_CONF` gets `expandable_segments:True` unless sleep mode is on or `max_split_size_mb` or"
    " `garbage_collection_threshold` is set.",
    (
        Source("0.18.0", "platform.py", 523, 'npu_alloc_configs = os.getenv("PYTORCH_NPU_ALLOC_CONF", '),
        Source("0.30.0rc2", "platform.py", 1442, 'npu_alloc_configs = os.getenv("PYTORCH_NPU_ALLOC_CONF", '),
    ),
)  # fmt: skip

RULES: Sequence[Rule] = (
    Rule(
        "block size", (0, 11), None,
        "A block holds 128 tokens where `--block-size` is not given.",
        (
            Source("0.11.0", "platform.py", 270, "cache_config.block_size = 128"),
            Source("0.12.0rc1", "utils.py", 1041, "cache_config.block_size = 128"),
            Source("0.30.0rc2", "utils.py", 1428, "cache_config.block_size = 128"),
        ),
    ),
    Rule(
        "block size", (0, 11), None,
        "Another `--block-size` is replaced by 128 with prefix caching or chunked prefill, both on by default; not for"
        " hybrids of attention and Mamba (up to 0.16 only not for qwen3_next, in 0.17 nor for qwen3_5).",
        (
            Source("0.11.0", "platform.py", 279, "cache_config.block_size = 128"),
            Source("0.12.0rc1", "utils.py", 1052, "cache_config.block_size = 128"),
            Source("0.30.0rc2", "utils.py", 1462, "cache_config.block_size = 128"),
        ),
    ),
    Rule(
        "Mamba page", (0, 11), (0, 16),
        "The attention's block grows by multiples of 128 until its page is no smaller than Mamba's, and Mamba's page is"
        " padded to it.",
        (
            Source("0.11.0", _MAMBA, 60, "attn_block_size = block_alignment_bytes * cdiv("),
            Source("0.12.0rc1", _MAMBA, 61, "attn_block_size = block_alignment_bytes * cdiv("),
        ),
    ),
    Rule(
        "Mamba page", (0, 16), (0, 28),
        "The keys of one block take exactly what an SSM state takes, else the start fails; Mamba's page is the"
        " attention's page and the convolution's state: a plan of a hybrid is refused.",
        (
            Source("0.18.0", _MAMBA, 58, "attn_block_size = kernel_block_size * cdiv(ssm_block_page_size"),
            Source("0.18.0", _MAMBA, 59, "assert attn_single_token_k_page_size * attn_block_size == "),
            Source("0.27.1rc1", _MAMBA, 94, "attn_block_size = kernel_block_size * cdiv(ssm_block_page_size"),
        ),
    ),
    Rule(
        "Mamba page", (0, 28), None,
        "Mamba's page is aligned with the attention's by several rules, which depend on the kernels: a plan of a"
        " hybrid is refused.",
        (
            Source("0.28.0rc1", _MAMBA, 118, "attn_block_size = alignment_tokens * cdiv("),
            Source("0.28.0rc1", _MAMBA, 127, "attn_block_size = kernel_block_size * cdiv("),
            Source("0.30.0rc2", _MAMBA, 126, "attn_block_size = alignment_tokens * cdiv("),
        ),
    ),
    _SCALED_GROUPS,
    _FULL_WINDOWS,
    Rule(
        "sparse MLA", (0, 11), (0, 15),
        "A layer of sparse MLA (DSA) is sized as full attention with one head: twice its latent vector.",
        (Source("0.12.0rc1", _RUNNER, 2947, "kv_cache_spec[layer_name] = FullAttentionSpec("),),
    ),
    Rule(
        "sparse MLA", (0, 18), None,
        "A layer of sparse MLA keeps its latent vector, its rotary part and the indexer's key in one page"
        " (`kv_lora_rank + qk_rope_head_dim + index_head_dim`).",
        (
            Source("0.18.0", _RUNNER, 3276, "head_size=sum(self.sparse_head_dim),"),
            Source("0.23.0", _RUNNER, 4977, "head_size=sum(sparse_head_dim),"),
        ),
    ),
    _UNPROFILED_ENCODER,
    Rule(
        "profiling", (0, 13), None,
        "The encoder is profiled as in vLLM.",
        (
            Source("0.13.0", _RUNNER, 2365, "super().profile_run()"),
            Source("0.30.0rc2", _RUNNER, 4352, "super().profile_run()"),
        ),
    ),
    Rule(
        "profiling", (0, 11), None,
        "Logits are computed for `max_num_seqs` requests, but nothing is sampled: the sampler's memory is in no"
        " budget.",
        (
            Source("0.12.0rc1", _RUNNER, 2312, "# TODO: need to rum a dummy sampler for generate task"),
            Source("0.30.0rc2", _RUNNER, 4331, "# TODO: need to rum a dummy sampler for generate task"),
        ),
    ),
    _REMAINDER,
    Rule(
        "budget", (0, 15), None,
        "The KV cache gets requested less weights, activation peak and non-torch increase, as in vLLM up to 0.26;"
        " requested is not rounded up. A start with less free memory than requested is refused.",
        (
            Source("0.15.0rc1", _WORKER, 259, "self.requested_memory = self.init_snapshot.total_memory * "),
            Source("0.23.0", _WORKER, 469, "self.requested_memory = self.init_snapshot.total_memory * "),
            Source("0.30.0rc2", _WORKER, 455, "self.requested_memory = self.init_snapshot.total_memory * "),
            Source("0.30.0rc2", _WORKER, 624, "self.available_kv_cache_memory_bytes = self.requested_memory - "),
        ),
    ),
    Rule(
        "budget", (0, 11), (0, 19),
        "`--kv-cache-memory-bytes` is ignored.",
        (Source("0.18.0", _WORKER, 339, "with memory_profiling("),),
    ),
    _GIVEN_BYTES,
    _SUBTRACTED_GRAPHS,
    Rule(
        "graphs", (0, 11), (0, 21),
        "ACL graphs are taken off nothing; how many sizes are captured is limited by streams, not memory.",
        (Source("0.18.0", "utils.py", 464, "MAX_CAPTURE_SIZE = 1800"),),
    ),
    Rule(
        "graphs", (0, 23), None,
        "ACL graphs are taken off nothing again; their size is logged with a suggestion for `--kv-cache-memory`.",
        (Source("0.23.0", _WORKER, 732, "npugraph_memory_bytes = self.model_runner.capture_model()"),),
    ),
    Rule(
        "HCCL", (0, 11), None,
        "Each group of ranks has buffers of 200 MB to send and to receive, outside torch; the group of MC2 takes"
        " `HCCL_BUFFSIZE`.",
        (
            Source("0.11.0", "utils.py", 57, "_DEFAULT_BUFFER_SIZE = 200"),
            Source("0.30.0rc2", "utils.py", 73, "_DEFAULT_BUFFER_SIZE = 200"),
        ),
    ),
    _EXPANDABLE_SEGMENTS,
    Rule(
        "allocator", (0, 11), None,
        "Sleep mode and `expandable_segments:True` exclude each other.",
        (
            Source("0.11.0", "device_allocator/camem.py", 148, 'assert "expandable_segments:True" not in conf'),
            Source("0.30.0rc2", "device_allocator/camem.py", 153, 'assert "expandable_segments:True" not in conf'),
        ),
    ),
    Rule(
        "310P", (0, 18), None,
        "On 310P half of what is left goes to the KV cache; the rest is kept for operators' workspaces.",
        (Source("0.18.0", "_310p/worker_310p.py", 93, "# Divide the available memory by 2"),),
    ),
)  # fmt: skip


def block_size(given: int | None, *, reuses_blocks: bool) -> int:
    """Return the tokens of one block of a model without states.

    Args:
        given: `--block-size`; None: not given.
        reuses_blocks: Prefix caching or chunked prefill is on.
    """
    return KERNEL_BLOCK if given is None or reuses_blocks else given


def check_hybrid(release: Release, model_type: str) -> None:
    """Check that the pages of a model that mixes attention and Mamba layers can be planned.

    Raises:
        PlanError: vllm-ascend aligns them by rules that are not modelled, or not at all.
    """
    if release >= (0, 16):
        raise PlanError("--platform: 'ascend'; vllm-ascend from 0.16 on lays out a hybrid's states in a way of its own")
    if model_type != _ALIGNED_HYBRID:
        raise PlanError(
            f"--platform: 'ascend'; vllm-ascend up to 0.15 keeps the larger blocks that a hybrid's states need for"
            f" {_ALIGNED_HYBRID} only, and this model is {model_type!r}"
        )


def keeps_sliding_as_full(release: Release) -> bool:
    """Return whether sliding windows are sized as full attention."""
    return _FULL_WINDOWS.holds(release)


def scales_several_groups(release: Release) -> bool:
    """Return whether the bytes are scaled down, by a rule that is not modelled, where layers are in several groups."""
    return _SCALED_GROUPS.holds(release)


def profiles_encoder(release: Release) -> bool:
    """Return whether the start's profile counts the multimodal encoder."""
    return not _UNPROFILED_ENCODER.holds(release)


def counts_the_whole_card(release: Release) -> bool:
    """Return whether everything on the card that is not torch's is taken off the KV cache."""
    return _REMAINDER.holds(release)


def splits_every_block(release: Release) -> bool:
    """Return whether torch's allocator has expandable segments by default."""
    return _EXPANDABLE_SEGMENTS.holds(release)


def takes_off_graphs(release: Release) -> bool:
    """Return whether an estimate of the graphs is taken off the budget."""
    return _SUBTRACTED_GRAPHS.holds(release)


def kv_cache_memory_bytes_counts(release: Release) -> bool:
    """Return whether `--kv-cache-memory-bytes` is looked at."""
    return _GIVEN_BYTES.holds(release)
