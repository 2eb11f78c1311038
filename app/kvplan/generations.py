"""The rules by which each version of vLLM sizes a KV cache, each with its source.

A generation is the rules of the oldest version with every change applied that a later version has. The sources were
read in the wheels of 0.12.0 to 0.32.0 (every minor release, the first and the last patch of each) and in 0.33.0, which
sizes as 0.32 does; a file and line is that of the version named beside it. ``utils`` is
vllm/v1/core/kv_cache_utils.py, ``specs`` is vllm/v1/kv_cache_interface.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from kvplan import MIB, PlanError

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(.*)", re.DOTALL)
# What may follow the three numbers: 0.19.2rc1.dev8+g4b7f5ea1a, 0.12.0.post2, 0.18.0+cpu.
_SUFFIX = re.compile(r"(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?(?:\+[\w.]+)?")

# The numbers of a version: 0.20.1 is (0, 20, 1). A minor release, (0, 20), compares with it too.
Release: TypeAlias = tuple[int, ...]

OLDEST_KNOWN: Final[Release] = (0, 11, 0)  # planned by the rules of the next
OLDEST_READ: Final[Release] = (0, 12, 0)
NEWEST_KNOWN: Final[Release] = (0, 33, 0)
NEWEST_TESTED: Final[Release] = (0, 32, 0)  # docs/tested.toml (tests/helm/test_tested.py)
DEFAULT_UTILIZATION: Final = 0.92  # of that one, where no `--gpu-memory-utilization` is given


def text_of(release: Release) -> str:
    return ".".join(map(str, release))


@dataclass(frozen=True, slots=True)
class Span:
    """The releases from one on, up to another that is not among them; None: up to the newest.

    Its text names the last minor release of the span.
    """

    since: Release
    until: Release | None = None

    def __contains__(self, release: Release) -> bool:
        return self.since <= release and (self.until is None or release < self.until)

    def __str__(self) -> str:
        return f"{text_of(self.since)} " + (f"to 0.{self.until[1] - 1}" if self.until else "and newer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    version: str  # as vLLM writes it
    release: Release  # its three numbers
    note: str | None = None  # what is uncertain about these rules; None: nothing
    # "GPU KV cache size" is computed from the blocks divided by the groups (``blocks``), or is the maximum
    # concurrency times the maximum length (``length``).
    tokens_printed: Literal["blocks", "length"] = "blocks"
    # The bytes are checked at start against each worker's layers one by one, before they are grouped (``own``),
    # against the first group alone, or against all groups.
    checked_layers: Literal["own", "first_group", "groups"] = "own"
    # Each worker is checked with its own part of the groups; else the whole model against the smallest worker.
    checked_workers: bool = True
    null_block_reserved: bool = False  # the block that the pool keeps for itself is taken off before the check
    override_checked: bool = False  # `num_gpu_blocks_override` replaces the available bytes before the check
    split_uniform_types: bool = False  # a group of one type and several sizes is split among pipeline stages
    # Groups are as large as the largest type of layer where that is less than so many times the smallest.
    padding_threshold: float = 1.25
    # Layers whose page is padded where that does not divide: none, those whose kernel indexes by the block
    # stride, or all but MLA.
    pads_pages: Literal["none", "by_stride", "all_but_mla"] = "none"
    pads_mamba: bool = False  # the page of a state is padded to that of the largest layer
    merges_windows: bool = False  # full attention layers that differ in their recorded window share groups
    # Layers with a window or chunk are promoted to full attention where the hybrid manager is off; with this also
    # sliding window layers that cannot share pages with MLA.
    promotes_beside_mla: bool = False
    promoted_keep_padding: bool = False  # a promoted layer keeps its padded page
    # Promoted layers that keep a value size of their own.
    promoted_keep_value_size: Literal["none", "sliding", "all"] = "none"
    promoted_take_block: bool = False  # a promoted layer takes the block size of full attention layers
    merge_compares_value_size: bool = False  # layers whose values differ in size have groups of their own
    merge_compares_mla: bool = False  # MLA layers that differ in size have groups of their own
    mamba_has_modes: bool = False  # a state takes blocks by the cache mode; else as many as the length has
    mamba_all_adds_drafts: bool = False  # the cache mode ``all`` adds the blocks of a draft
    mamba_has_all: bool = True  # the cache mode ``all`` exists
    mamba_uniform_page: bool = False  # states are of one type only where their pages are equal
    in_flight_tokens: bool = False  # windows reserve for the tokens of all steps under way; else of one step
    prefill_context_counts: bool = True  # the ranks of the prefill's context parallelism share the tokens too
    gib_digits: Literal["fixed", "short"] = "fixed"  # a refusal writes GiB as 7.00 (``fixed``) or 7.0


@dataclass(frozen=True, slots=True)
class Change:
    """New values of `Generation` from a version on, with the file and line in that version."""

    since: Release
    rules: Mapping[str, Any]
    source: str


CHANGES: Final = (
    # From here on the start is checked by groups, but by the first one alone, times the size of a group.
    Change((0, 14, 0), {"checked_layers": "first_group", "checked_workers": False}, "utils:1348, utils:1515"),
    Change((0, 14, 0), {"gib_digits": "short"}, "vllm/utils/mem_utils.py:22"),
    Change((0, 15, 0), {"mamba_has_modes": True}, "specs:292"),
    Change((0, 15, 0), {"promoted_keep_padding": True}, "utils:1188"),
    Change((0, 17, 0), {"checked_workers": True, "split_uniform_types": True}, "utils:1465"),
    Change((0, 18, 0), {"padding_threshold": 1.5}, "utils:1043"),
    Change((0, 19, 0), {"checked_layers": "groups"}, "utils:1362"),
    Change((0, 20, 1), {"tokens_printed": "length"}, "utils:1706"),
    Change((0, 20, 1), {"override_checked": True}, "utils:2001"),
    Change((0, 21, 0), {"promoted_keep_value_size": "sliding"}, "utils:1391"),
    Change((0, 22, 0), {"mamba_all_adds_drafts": True}, "specs:586"),
    Change((0, 24, 0), {"pads_pages": "by_stride"}, "utils:1089"),
    Change((0, 26, 0), {"in_flight_tokens": True}, "specs:523, specs:595, vllm/config/vllm.py:525"),
    Change((0, 26, 0), {"prefill_context_counts": False}, "specs:261"),
    Change((0, 26, 0), {"pads_mamba": True}, "utils:1098"),
    Change((0, 27, 0), {"merges_windows": True}, "utils:1217"),
    Change((0, 27, 0), {"promoted_take_block": True}, "utils:1503"),
    Change((0, 27, 0), {"promotes_beside_mla": True}, "utils:1534"),
    Change((0, 27, 0), {"merge_compares_mla": True}, "specs:463"),
    Change((0, 28, 0), {"merge_compares_value_size": True, "promoted_keep_value_size": "all"}, "specs:222"),
    Change((0, 29, 0), {"null_block_reserved": True}, "utils:2319"),
    Change((0, 29, 0), {"pads_pages": "all_but_mla"}, "utils:1185"),
    Change((0, 29, 0), {"mamba_uniform_page": True}, "specs:914"),
    Change((0, 32, 0), {"mamba_has_all": False}, "specs:1077"),
)


def generation_of(version: str) -> Generation:
    """Return the rules of a version.

    One that is newer than those that were read gets the newest rules and a note, 0.11 the oldest; so does a development
    version, whose sources lie between two releases. Raises PlanError: the version is not understood, or older.
    """
    match = _VERSION.fullmatch(version.strip())
    if match is None or _SUFFIX.fullmatch(match[4]) is None:
        raise PlanError(
            f"vllm_version: {version!r} is not understood; write it as vLLM does, such as {text_of(NEWEST_KNOWN)}"
        )
    release = (int(match[1]), int(match[2]), int(match[3] or 0))
    if release < OLDEST_KNOWN:
        raise PlanError(f"vllm_version: {version!r} is older than the oldest version known, {text_of(OLDEST_KNOWN)}")
    note = None
    if release < OLDEST_READ:
        note = f"vLLM {version} is older than {text_of(OLDEST_READ)}; the rules of that are used."
    elif release[:2] > NEWEST_KNOWN[:2]:
        newest = text_of(NEWEST_KNOWN)
        note = f"vLLM {version} is newer than {newest}, the newest that was read; the rules of that are used."
    elif "dev" in match[4]:
        note = f"vLLM {version} is a development version; the rules of {text_of(release)} are used."
    generation = Generation(version=version, release=release, note=note)
    for change in CHANGES:
        if change.since <= release:
            generation = replace(generation, **change.rules)
    return generation


NEWEST: Final = generation_of(text_of(NEWEST_TESTED))


# --- what a start counts beside the KV cache, as far as a running engine's budget and plan follow it ---

# `docs/ascend_rules.toml` says where those of vllm-ascend were read; releases after the newest are taken to keep them.
# vllm-ascend's profile does not count the multimodal encoder.
ASCEND_SKIPS_ENCODER: Final = Span((0, 11), (0, 13))
ASCEND_TAKES_KV_CACHE_BYTES: Final = Span((0, 19))  # `--kv-cache-memory-bytes`, which it ignored before
# It fits what the profile left to its own layout of the KV cache, before it stores the figure, and once more before it
# returns it (vllm-ascend 0.27.1rc1, 0.30.0rc2 worker/worker.py `determine_available_memory`).
ASCEND_RESCALES: Final = Span((0, 24))
# Model runner V2 profiles the encoder (vllm 0.27.0 v1/worker/gpu/model_runner.py:702; not in 0.26.0, there line 673).
V2_PROFILES_ENCODER: Final = Span((0, 27))
# What vLLM's log leaves free beside the KV cache that it suggests (vllm 0.32.0 v1/worker/gpu_worker.py:994).
SUGGESTION_MARGIN: Final = 150 * MIB


def requested_bytes(total_bytes: int, utilization: float, release: Release, platform: str) -> int:
    """Return vLLM's budget of a device, with its own rounding.

    `v1/worker/utils.py: request_memory` rounds up from 0.14 on; before, and on Ascend, the fraction is kept and lost
    when the KV cache's bytes are made whole.
    """
    product = total_bytes * utilization
    return math.ceil(product) if release >= (0, 14) and platform != "ascend" else int(product)
