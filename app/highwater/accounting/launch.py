"""The settings of a worker's start that its memory depends on later, as it reports them itself. Pure.

torch_npu reads PYTORCH_NPU_ALLOC_CONF, and PYTORCH_ALLOC_CONF too from 2.13 on, where both are an error; of an option
that is set twice the last one counts (Ascend/pytorch csrc/core/npu/NPUCachingAllocator.cpp, `parseArgs`). vllm-ascend
from 0.14 on appends `expandable_segments:True` before it starts its workers, unless sleep mode is on or an option that
excludes it is set, and takes it out where sleep mode is on (vllm-ascend pull request 5855; 0.30.0rc2 platform.py:1436).
So the variables of the worker's own process show the outcome, whatever the version.
"""

from __future__ import annotations

import re
from typing import Final

from highwater.accounting.engine_budget import EngineBudget
from highwater.readings.rank import RankReading

_ON: Final = frozenset({"true", "1"})
_READS_EVERY_ALLOCATORS_VARIABLE: Final = (2, 13)
# An NPU's allocator takes none of these together with expandable segments.
EXCLUDED: Final = ("max_split_size_mb", "garbage_collection_threshold")


def allocator_options(text: str | None) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for part in (text or "").split(","):
        key, _, value = part.partition(":")
        if key.strip():
            options.setdefault(key.strip(), []).append(value.strip())
    return options


def sets_expandable_segments(text: str | None) -> bool:
    return allocator_options(text).get("expandable_segments", [""])[-1].lower() in _ON


def expandable_segments(budget: EngineBudget | None) -> bool | None:
    """Return whether an NPU worker's allocator has expandable segments; ``None`` where its variables do not say.

    A driver that cannot reserve addresses switches them off again, with a warning in the log alone.
    """
    if budget is None:
        return None
    own, shared = (budget.environment.get(name) for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if allocator_options(own) or not sets_expandable_segments(shared):
        return sets_expandable_segments(own)
    release = re.match(r"(\d+)\.(\d+)", budget.torch_npu_version or "")
    return None if release is None else tuple(map(int, release.groups())) >= _READS_EVERY_ALLOCATORS_VARIABLE


def may_fragment(rank: RankReading) -> bool:
    """Return whether images may fragment the memory below PyTorch's allocator, so that what is not its grows.

    On an NPU that is not known to have expandable segments (vllm-ascend issue 5339 and pull request 5855).
    """
    serves_images = rank.device.type == "npu" and rank.encoder_cache is not None
    return serves_images and rank.launch.expandable_segments is not True
