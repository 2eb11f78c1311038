"""One rank's part of a model: its layers, and its KV heads."""

from __future__ import annotations

from kvplan.errors import PlanError


def stage_bounds(layers: int, stages: int) -> list[tuple[int, int]]:
    """Return the first layer and the end of each stage (vllm/distributed/utils.py, get_pp_indices).

    Layers that are left over go to the stages before the last, from the back.
    """
    sizes = [layers // stages] * stages
    for extra in range(layers % stages):
        sizes[-(extra + 2)] += 1
    starts = [sum(sizes[:i]) for i in range(stages)]
    return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def rank_heads(heads: int, ranks: int, key: str = "--tensor-parallel-size") -> int:
    """Return the KV heads of one rank: a part of them, or one, which several ranks then have alike.

    Raises PlanError: vLLM would refuse to spread them; the message names the ranks by `key`.
    """
    if heads >= ranks and heads % ranks:
        raise PlanError(f"{key}: {ranks}; the model's {heads} KV heads must be divisible by it")
    if heads < ranks and ranks % heads:
        raise PlanError(f"{key}: {ranks}; a multiple of the model's {heads} KV heads is needed")
    return max(1, heads // ranks)
