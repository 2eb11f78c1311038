"""The KV pool that vLLM makes of given layers and bytes: blocks, groups, tokens, or its refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from highwater.plan.generations import Generation
from highwater.plan.limits import Limits
from highwater.plan.specs import Layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share block tables.

    Attributes:
        kind: ``full``, ``sliding``, ``chunked``, ``mla``, ``mamba``, ``cross``, or ``mixed``.
        layers: How many layers it holds.
        padding_layers: How many layers' room it wastes, to be as large as the other groups.
        block_size: Tokens a block.
        page_bytes: Bytes that one layer takes of a block; of a mixed group, those of all its layers.
        blocks_per_request: Blocks that one request of the maximum length takes.
    """

    kind: str
    layers: int
    padding_layers: int
    block_size: int
    page_bytes: int
    blocks_per_request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One engine's KV cache, as its version of vLLM sizes it.

    Attributes:
        available_bytes: The bytes of the rank that binds.
        binding_worker: That rank's place in what was given.
        bytes_per_block: What one block takes of them, all layers included.
        blocks: How many there are, the null block included.
        groups: The groups that draw from them.
        tokens: "GPU KV cache size" as this version prints it; None where it would not get that far.
        max_concurrency: "Maximum concurrency" at the maximum length, as printed.
        needed_bytes: What one request of the maximum length needs.
        fits: Whether vLLM starts with it.
        max_model_len_that_fits: The longest that would fit, by vLLM's own search, which ends at the length asked for.
    """

    available_bytes: int
    binding_worker: int
    bytes_per_block: int
    blocks: int
    groups: tuple[Group, ...]
    tokens: int | None
    max_concurrency: float | None
    needed_bytes: int
    fits: bool
    max_model_len_that_fits: int


def plan_pool(workers: Sequence[Layers], available_bytes: Sequence[int], limits: Limits, generation: Generation) -> Pool:
    """Size the KV cache of an engine.

    Args:
        workers: Each worker's layers; ranks of one pipeline stage have the same.
        available_bytes: The bytes for the KV cache on each worker.
        limits: What else the size depends on.
        generation: The version's rules.

    Raises:
        PlanError: vLLM of this version would refuse these layers, whatever the bytes.
    """
    raise NotImplementedError
