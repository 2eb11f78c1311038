"""Known settings: what to change, and what that costs. Their texts stand in advice.toml, under the names used here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from highwater.accounting.components import COMPONENTS
from highwater.readings.rank import RankReading


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A setting to change.

    Attributes:
        setting: The exact flag, variable or call.
        change: What to change, what that does, and when it helps.
        cost: What it costs, and what it does not go together with.
    """

    setting: str
    change: str
    cost: str


ADVICE: Final[Mapping[str, Advice]] = {
    name: Advice(**row)
    for name, row in tomllib.loads(Path(__file__).with_name("advice.toml").read_text("utf-8")).items()
}
COMPONENT_MEANING: Final[Mapping[str, str]] = {row.name: row.explained for row in COMPONENTS}

_AGAINST_FRAGMENTATION: Final[Mapping[str | None, tuple[str, ...]]] = {
    "npu": ("npu_expandable_segments", "npu_max_split"),
    "cuda": ("cuda_expandable_segments",),
}
_FOR_COMPONENT: Final[Mapping[str, tuple[str, ...]]] = {
    "encoder_cache_bytes": ("reset_encoder_cache", "trim_encoder_cache", "max_num_batched_tokens", "policy_earlier"),
    "other_tensors_bytes": ("limit_mm_per_prompt", "max_num_batched_tokens", "gpu_memory_utilization"),
    "torch_cached_bytes": ("release",),
    "non_torch_bytes": ("other_processes", "gpu_memory_utilization"),
}


def advices(names: Iterable[str]) -> tuple[Advice, ...]:
    return tuple(ADVICE[name] for name in dict.fromkeys(names))


def against_fragments(*, has_sleep_mode: bool) -> tuple[str, ...]:
    """Return the advice against fragments below PyTorch's allocator, on an NPU without expandable segments."""
    return ("npu_segments_or_sleep", "npu_max_split") if has_sleep_mode else ("npu_expandable_segments",)


def without_effect(ranks: Iterable[RankReading]) -> frozenset[str]:
    npus = [rank.launch.expandable_segments for rank in ranks if rank.device.type == "npu"]
    return frozenset(_AGAINST_FRAGMENTATION["npu"]) if npus and all(npus) else frozenset()


def against_fragmentation(device_type: str | None) -> tuple[str, ...]:
    return _AGAINST_FRAGMENTATION.get(device_type, ())


def for_given_pool(given: Iterable[Advice]) -> tuple[Advice, ...]:
    """Return advice for an engine that was started with its KV cache's size: no share of the device counts there."""
    void = advices(("gpu_memory_utilization", "kv_cache_memory_bytes", "more_for_the_kv_cache"))
    return tuple(dict.fromkeys(ADVICE["given_kv_cache"] if each in void else each for each in given))


def for_component(name: str, device_type: str | None) -> tuple[str, ...]:
    names = _FOR_COMPONENT.get(name, ())
    if name == "torch_cached_bytes":
        return names + against_fragmentation(device_type)
    if name == "non_torch_bytes" and device_type in {"npu", "cpu"}:
        return (*names, "hccl_buffsize") if device_type == "npu" else ()
    return names
