"""A start that `highwater explain --json` wrote to a file, whose measures replace a plan's estimates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater.plan.estimates import MeasuredStart
from highwater.plan.json_file import read_object
from kvplan.errors import PlanError

MAX_FILE_BYTES = 20_000_000
_PLATFORMS = {"npu": "ascend", "cuda": "cuda", "cpu": "cpu"}


def read_answer(path: Path) -> dict[str, Any]:
    """Return the object in a file of `highwater explain --json`; raises PlanError if the file holds no such object."""
    return read_object(path, MAX_FILE_BYTES, "a file of `highwater explain --json`")


def read_start(path: Path) -> MeasuredStart:
    """Return the start in a file of `highwater explain --json`: of several ranks the largest of each part.

    Raises PlanError: it cannot be read, or describes no start.
    """
    explanation = _object(read_answer(path).get("explanation"))
    ranks = [_object(rank) for rank in _list(explanation.get("ranks"))]
    version, architecture = explanation.get("vllm_version"), explanation.get("architecture")
    if not ranks or not isinstance(version, str) or not isinstance(architecture, str):
        raise PlanError(
            f"{path} describes no start: explanation.ranks, .vllm_version and .architecture are needed, as"
            " `highwater explain --json` writes them"
        )
    limits, parallel = _object(explanation.get("limits")), _object(explanation.get("parallel"))
    device = _object(ranks[0].get("device")).get("type")
    return MeasuredStart(
        version=version,
        platform=_PLATFORMS.get(str(device), str(device)),
        architecture=architecture,
        weights_bytes=_largest(ranks, "weights"),
        activation_bytes=_largest(ranks, "activation"),
        non_torch_bytes=_largest(ranks, "non_torch", "persistent", "consumed"),
        graphs_bytes=_largest(ranks, "graphs"),
        tensor_parallel_size=_count(parallel.get("tensor_parallel_size")) or 1,
        pipeline_parallel_size=_count(parallel.get("pipeline_parallel_size")) or 1,
        max_num_batched_tokens=_count(limits.get("max_num_batched_tokens")),
        max_num_seqs=_count(limits.get("max_num_seqs")),
    )


def _largest(ranks: list[Mapping[str, Any]], *keys: str) -> int | None:
    """Return the largest sum of these parts over the ranks; that rank has the fewest bytes left."""
    sums = []
    for rank in ranks:
        parts = [_object(part) for part in _list(rank.get("parts"))]
        sizes = [part["bytes"] for part in parts if part.get("key") in keys and isinstance(part.get("bytes"), int)]
        if sizes:
            sums.append(sum(sizes))
    return max(sums, default=None)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
