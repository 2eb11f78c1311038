"""The KV pool that vLLM makes of given layers and bytes: blocks, groups, tokens, or its refusal.

Follows `get_kv_cache_configs` of vllm/v1/core/kv_cache_utils.py. Every group draws its blocks from one pool, so that
one request of the maximum length takes, of every group, the blocks that its layers need; a block takes the bytes of
the largest group, because the groups lie over each other in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from kvplan import GIB, Limits, PlanError, ceil_div
from kvplan.generations import Generation
from kvplan.grouping import LayerGroup, group_layers, merge_workers
from kvplan.specs import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Layers,
    LayerSpec,
    MambaState,
    SlidingWindow,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGroup:
    """Layers that share block tables."""

    kind: str  # ``full``, ``sliding``, ``chunked``, ``mla``, ``mamba``, ``cross``, or ``mixed``
    layers: int
    padding_layers: int  # the layers whose room it wastes, to be as large as the other groups
    block_size: int  # tokens a block
    page_bytes: int  # bytes that one layer takes of a block; of a mixed group, those of all its layers
    blocks_per_request: int  # blocks that one request of the maximum length takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The figures of the error with which vLLM ends its start."""

    worker: int  # the place of the first worker that has too little
    needed_bytes: int  # the need of one request of the maximum length
    available_bytes: int  # what vLLM compares that with; it may have taken a block off
    max_model_len: int  # the estimated maximum model length; 0 where not even one token fits, and nothing is printed
    message: str  # the part of the error that holds the figures, as this version writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """One engine's KV cache, as its version of vLLM sizes it."""

    available_bytes: int  # the bytes of the rank that binds
    binding_worker: int  # that rank's place among the workers
    bytes_per_block: int  # the bytes that one block takes there, all layers included
    blocks: int  # their number, the null block included
    cache_bytes: tuple[int, ...]  # the bytes that they take on each worker
    groups: tuple[PoolGroup, ...]
    tokens: int | None  # "GPU KV cache size" as this version prints it; None where it would not get that far
    max_concurrency: float | None  # "Maximum concurrency" at the maximum length, as printed
    # The need of one request of the maximum length, as this version computes it for its check: 0.14 to 0.18 count
    # the first group only.
    needed_bytes: int
    fits: bool  # whether vLLM starts with it
    max_model_len_that_fits: int  # the longest that would fit, by vLLM's own search, which ends at the length asked for
    refusal: Refusal | None = None  # the error that vLLM would end with; None where it starts

    @property
    def blocks_per_request(self) -> int:
        return sum(group.blocks_per_request for group in self.groups)

    def answer(self, max_model_len: int) -> dict[str, Any]:
        """Return it as an answer of docs/plan-by-vllm.md has a KV cache."""
        own = {name: value for name, value in asdict(self).items() if name not in ("binding_worker", "cache_bytes")}
        return own | {
            "refusal": None if self.refusal is None else self.refusal.message,
            "block_size": min(group.block_size for group in self.groups),
            "max_model_len": max_model_len,
        }


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, where all smaller ones do; 0 where not even one fits."""
    fitting, too_large = 0, most + 1
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return fitting


@dataclass(frozen=True, slots=True)
class _Check:
    """One comparison at start: what a request of a length needs of a worker's memory, and what there is."""

    worker: int
    available_bytes: int  # less what the version reserves
    needed_bytes: Callable[[int], int]

    def longest(self, max_model_len: int) -> int:
        return largest(max_model_len, lambda length: self.needed_bytes(length) <= self.available_bytes)


def deciding_workers(workers: Sequence[Layers], available_bytes: Sequence[int]) -> list[int]:
    """Return the places of the workers that decide: of those with the same layers, the one with the fewest bytes.

    A large engine has a hundred workers, and any caller may plan a thousand.
    """
    deciding: list[int] = []
    for number, layers in enumerate(workers):
        same = next((place for place, known in enumerate(deciding) if workers[known] == layers), None)
        if same is None:
            deciding.append(number)
        elif available_bytes[number] < available_bytes[deciding[same]]:
            deciding[same] = number
    return deciding


def plan_pool(
    workers: Sequence[Layers], available_bytes: Sequence[int], limits: Limits, generation: Generation
) -> KvPool:
    """Size the KV cache of an engine from the layers of each worker, and its bytes for the KV cache.

    Raises PlanError: vLLM of this version would refuse these layers, whatever the bytes.
    """
    if not workers or len(workers) != len(available_bytes):
        raise PlanError(f"available_bytes: {len(available_bytes)} figures for {len(workers)} workers; must be as many")
    layers = merge_workers(workers)
    if not layers:
        raise PlanError("layers: none of them keeps a KV cache; there is nothing to plan")
    if not all(workers):
        raise PlanError("pipeline_parallel_size: a stage without any layer that keeps a KV cache cannot be started")
    sizing = _Sizing(limits, generation, group_layers(layers, limits, generation))
    if sizing.blocks_per_request == 0:
        raise PlanError("max_encoder_tokens: 0 leaves nothing to keep in the KV cache; must be above 0")
    block_bytes = [sizing.bytes_per_block(worker) for worker in workers]
    if limits.num_gpu_blocks_override is None:
        planned = list(available_bytes)
    else:
        planned = [limits.num_gpu_blocks_override * size for size in block_bytes]
    blocks = [max(have // size, 0) for have, size in zip(planned, block_bytes, strict=True)]
    checks = sizing.checks(workers, planned if generation.override_checked else available_bytes)
    refusal = sizing.refusal(checks)
    binding = refusal.worker if refusal else blocks.index(min(blocks))
    # A pool without a block is refused by no check of the older versions; they divide by its size and end.
    fits = refusal is None and min(blocks) > 0
    concurrency = min(blocks) / sizing.blocks_per_request
    return KvPool(
        available_bytes=available_bytes[binding],
        binding_worker=binding,
        bytes_per_block=block_bytes[binding],
        blocks=min(blocks),
        cache_bytes=tuple(min(blocks) * size for size in block_bytes),
        groups=tuple(sizing.described(group) for group in sizing.groups),
        tokens=sizing.printed_tokens(min(blocks), concurrency) if fits else None,
        max_concurrency=concurrency if fits else None,
        needed_bytes=checks[min(binding, len(checks) - 1)].needed_bytes(limits.max_model_len),
        fits=fits,
        max_model_len_that_fits=min(check.longest(limits.max_model_len) for check in checks),
        refusal=refusal,
    )


@dataclass(frozen=True, slots=True)
class _Sizing:
    """The groups of one model, sized by the limits and the version's rules."""

    limits: Limits
    generation: Generation
    groups: Sequence[LayerGroup]

    @property
    def blocks_per_request(self) -> int:
        return sum(self.blocks(group.spec, self.limits.max_model_len) for group in self.groups)

    def bytes_per_block(self, worker: Layers) -> int:
        """Return the bytes of one block on one worker: the pages of its layers of the largest group."""
        is_split = self.generation.split_uniform_types
        return max(group.page_bytes(worker if is_split or not group.is_mixed else None) for group in self.groups)

    def blocks(self, spec: LayerSpec, length: int) -> int:
        """Return the blocks that a request of a length takes of a layer (`max_memory_usage_bytes` over its page)."""
        limits = self.limits
        ahead = limits.max_in_flight_tokens if self.generation.in_flight_tokens else limits.max_num_batched_tokens
        match spec:
            case FullAttention():
                return ceil_div(ceil_div(length, self._token_ranks), spec.block_size)
            case SlidingWindow() if limits.decode_context_parallel_size > 1:
                raise PlanError(
                    f"decode_context_parallel_size: {limits.decode_context_parallel_size} cannot be used with layers "
                    "that have a sliding window; must be 1"
                )
            case SlidingWindow():
                retained = spec.window - 1 + ahead
                # One more, because the window may begin in the middle of a block.
                return ceil_div(min(retained, length), spec.block_size) + 1
            case ChunkedLocal():
                return ceil_div(min(spec.chunk + ahead, length), spec.block_size)
            case CrossAttention():
                return ceil_div(limits.max_encoder_tokens, spec.block_size)
            case MambaState():
                return self._state_blocks(spec, length)
        raise PlanError(f"layers: a cache of the kind {type(spec).__name__} cannot be planned")

    def _state_blocks(self, spec: MambaState, length: int) -> int:
        generation, mode = self.generation, self.limits.mamba_cache_mode
        if not generation.mamba_has_modes:
            return ceil_div(length, spec.block_size)
        if mode == "align":
            return 2 + spec.speculative_blocks + spec.checkpoint_blocks
        if mode == "none":
            return 1 + spec.speculative_blocks
        if mode == "all" and generation.mamba_has_all:
            return ceil_div(length, spec.block_size) + spec.speculative_blocks * generation.mamba_all_adds_drafts
        known = "none, align or all" if generation.mamba_has_all else "none or align"
        raise PlanError(f"mamba_cache_mode: {mode!r} is not known to vLLM {generation.version}; must be {known}")

    @property
    def _token_ranks(self) -> int:
        limits = self.limits
        prefill = limits.prefill_context_parallel_size if self.generation.prefill_context_counts else 1
        return limits.decode_context_parallel_size * prefill

    def checks(self, workers: Sequence[Layers], available_bytes: Sequence[int]) -> list[_Check]:
        rules = self.generation

        def of_layers(layers: Layers, length: int) -> int:
            return sum(spec.page_bytes * self.blocks(spec, length) for spec in layers.values())

        def of_groups(block_bytes: int, length: int) -> int:
            checked = self.groups[:1] if rules.checked_layers == "first_group" else self.groups
            return block_bytes * sum(self.blocks(group.spec, length) for group in checked)

        if rules.checked_layers == "own":
            return [
                _Check(place, available_bytes[place], partial(of_layers, worker))
                for place, worker in enumerate(workers)
            ]
        if not rules.checked_workers:
            smallest = available_bytes.index(min(available_bytes))
            size = max(group.page_bytes() for group in self.groups)
            return [_Check(smallest, available_bytes[smallest], partial(of_groups, size))]
        sizes = [self.bytes_per_block(worker) for worker in workers]
        return [
            _Check(place, available - size * rules.null_block_reserved, partial(of_groups, size))
            for place, (available, size) in enumerate(zip(available_bytes, sizes, strict=True))
        ]

    def refusal(self, checks: Sequence[_Check]) -> Refusal | None:
        length = self.limits.max_model_len
        check = next((one for one in checks if not 0 < one.available_bytes >= one.needed_bytes(length)), None)
        if check is None:
            return None
        needed, available, longest = check.needed_bytes(length), check.available_bytes, check.longest(length)
        message = "No available memory for the cache blocks."
        if available > 0:
            message = (
                f"max seq len ({length}), ({self._gib(needed)} GiB KV cache is needed, "
                f"which is larger than the available KV cache memory ({self._gib(available)} GiB)."
            )
        if longest:
            message += f" Based on the available memory, the estimated maximum model length is {longest}."
        return Refusal(
            worker=check.worker, needed_bytes=needed, available_bytes=available, max_model_len=longest, message=message
        )

    def _gib(self, size: int) -> str:
        return f"{size / GIB:.2f}" if self.generation.gib_digits == "fixed" else str(round(size / GIB, 2))

    def printed_tokens(self, blocks: int, concurrency: float) -> int:
        if self.generation.tokens_printed == "length":
            return int(concurrency * self.limits.max_model_len)
        smallest = min(group.spec.block_size for group in self.groups)
        return blocks // len(self.groups) * smallest * self._token_ranks

    def described(self, group: LayerGroup) -> PoolGroup:
        return PoolGroup(
            kind=group.kind,
            layers=len(group.layers),
            padding_layers=group.padding_layers,
            block_size=group.spec.block_size,
            page_bytes=group.page_bytes() if group.is_mixed else group.spec.page_bytes,
            blocks_per_request=self.blocks(group.spec, self.limits.max_model_len),
        )
