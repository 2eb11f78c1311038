"""A plan from a config.json alone: it needs no engine, no weights and no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from highwater.plan import ascend
from highwater.plan.card import OnCard, fullest, judge_card
from highwater.plan.checkpoint import Tensor
from highwater.plan.estimates import (
    MeasuredStart,
    ModelFacts,
    StartBudget,
    counts_others,
    estimate_start,
    requested_bytes,
)
from highwater.plan.json_file import read_object
from highwater.plan.layers import worker_layers
from highwater.plan.models.drafts import read_draft
from highwater.plan.models.kept import Model
from highwater.plan.models.model import read_model
from highwater.plan.resolve import SMALL_STEP, Resolved, resolve, share_of, speculative_method
from highwater.plan.safetensors_header import checkpoint_tensors
from highwater.units import size_text
from kvplan.errors import PlanError
from kvplan.figure import add
from kvplan.flags import EngineFlags
from kvplan.generations import Generation, generation_of
from kvplan.pool import KvPool, plan_pool
from kvplan.specs import Layers
from kvplan.versions import NEWEST_TESTED, text_of

DEFAULT_VERSION: Final = text_of(NEWEST_TESTED)
PREPROCESSOR: Final = "preprocessor_config.json"
UNKNOWN_ITEM: Final = (
    "No lower bound: a start profiles the encoder with the largest image, video or sound, whose size these files do not"
    " say. --limit-mm-per-prompt '{\"video\": 0}' beside a preprocessor_config.json, or --measured,"
    " settles it."
)
# A config.json is a few KiB; anything of this size is another file.
MAX_CONFIG_BYTES: Final = 8 << 20
# ModelOpt up to 0.29 describes its quantization there (transformers_utils/config.py); later ones in the config.json.
MODELOPT_CONFIG: Final = "hf_quant_config.json"
# What drafters need no model of their own (vllm 0.32.0 config/speculative.py).
_WITHOUT_WEIGHTS: Final = (None, "ngram", "ngram_gpu", "suffix")
ANY_BYTES: Final = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePlan:
    model: Model
    generation: Generation
    resolved: Resolved
    layers: Sequence[Layers]  # the layers of one rank of each pipeline stage
    pool: KvPool  # the KV pool; where its bytes are not known, any pool that holds one request of the maximum length
    # The bytes for the KV cache of one rank of each pipeline stage; None: not known, or the start ends before.
    available_bytes: Sequence[int] | None
    # The device of the rank that binds, divided; None: no device was named, or that is not known.
    budget: StartBudget | None
    notes: tuple[str, ...]  # assumptions and warnings, in sentences
    why_unknown: str | None = None  # why what a start takes of the device that was named is not known
    on_card: OnCard | None = None  # None: no device was named, or vLLM sizes the KV cache by its share of it
    # The KV pool with the fewest and with the most bytes that are expected; None: the bytes are exact or measured,
    # or not known.
    bounds: tuple[KvPool, KvPool] | None = None

    @property
    def refusal(self) -> str | None:
        """The card's reason that vLLM does not start, whatever the length; None: it is no reason."""
        return self.on_card.why if self.on_card is not None and self.on_card.fits is False else None

    @property
    def fits(self) -> bool | None:
        """True if vLLM starts; None where that depends on bytes that are not known, or not known well enough."""
        if self.refusal is not None:
            return False
        if self.available_bytes is None:
            return None
        low, high = self.bounds or (self.pool, self.pool)
        if low.fits != high.fits:
            return None
        return self.on_card.fits if low.fits and self.on_card is not None else low.fits


def read_config(place: str) -> Mapping[str, Any]:
    """Takes its path or its folder's. Raises PlanError: the file is missing, or does not hold a JSON object."""
    path = Path(place)
    path = path / "config.json" if path.is_dir() else path
    values = read_object(path, MAX_CONFIG_BYTES, "a model's config.json")
    beside = path.with_name(MODELOPT_CONFIG)
    if path.name == "config.json" and values.get("quantization_config") is None and beside.exists():
        values = {**values, "quantization_config": _modelopt(beside)}
    return values


def _modelopt(path: Path) -> dict[str, Any]:
    """Name the method of ModelOpt's own file, as vLLM does (model_arch_config_convertor.py, from its producer)."""
    described = read_object(path, MAX_CONFIG_BYTES, f"a model's {MODELOPT_CONFIG}")
    producer, inner = described.get("producer"), described.get("quantization")
    if not isinstance(inner, dict):
        raise PlanError(f"{path}: quantization: {inner!r}; an object is needed")
    if not isinstance(producer, dict) or producer.get("name") != "modelopt":
        return described
    algorithm = str(inner.get("quant_algo")).upper()
    return {**described, "quant_method": "modelopt_fp4" if algorithm == "NVFP4" else "modelopt"}


def read_preprocessor(place: str) -> Mapping[str, Any]:
    """Return the file beside a config.json, or in its folder; empty without one. Raises PlanError as `read_config`."""
    path = Path(place)
    path = (path if path.is_dir() else path.parent) / PREPROCESSOR
    return read_object(path, MAX_CONFIG_BYTES, f"a model's {PREPROCESSOR}") if path.exists() else {}


def read_tensors(place: str) -> tuple[Tensor, ...] | None:
    """Return the tensors of the checkpoint in a folder, from the headers of its files; None if it has no such files."""
    folder = Path(place)
    return checkpoint_tensors(folder) if folder.is_dir() and any(folder.glob("*.safetensors")) else None


def plan_offline(
    values: Mapping[str, Any],
    flags: EngineFlags,
    version: str = DEFAULT_VERSION,
    *,
    preprocessor: Mapping[str, Any] = MappingProxyType({}),
    tensors: tuple[Tensor, ...] | None = None,
    measured: MeasuredStart | None = None,
) -> OfflinePlan:
    """Plan a command line for a model, of this config.json and ``preprocessor``, its preprocessor_config.json.

    ``tensors`` of the checkpoint's files give the weights of a device's budget; None: they are estimated. What an
    earlier start ``measured`` replaces estimates where its flags were the same. Raises PlanError: vLLM would refuse it,
    or it follows a rule that is not modelled.
    """
    generation = generation_of(version)
    model = read_model(values, generation.release)
    draft = read_draft(flags.speculative_config, values, model)
    resolved = resolve(flags, model, generation, speculative_tokens=draft.tokens)
    layers = worker_layers(model, resolved, generation, draft.kept)
    facts = ModelFacts(config=values, preprocessor=preprocessor, tensors=tensors)
    left = _left(facts, resolved, generation, measured, stages=len(layers))
    # Any bytes do where they are not known: what one request needs does not depend on them.
    limits, available = resolved.limits, left.available or [0 if left.refusal else ANY_BYTES] * len(layers)
    limits = limits if left.available is not None else replace(limits, num_gpu_blocks_override=None)
    pool = plan_pool(layers, available, limits, generation)
    bounds, each = None, [stage.available for stage in left.budgets]
    if flags.kv_cache_memory_bytes is None and any(one.low != one.high for one in each):
        least = plan_pool(layers, [one.low for one in each], limits, generation)
        bounds = least, plan_pool(layers, [one.high for one in each], limits, generation)
    on_card = _on_card(flags, left, pool)
    if on_card is not None and on_card.fits is False:
        pool = replace(pool, fits=False, max_model_len_that_fits=0)
    refusals = dict.fromkeys(stage.refusal for stage in left.budgets if stage.refusal)
    notes = [*resolved.notes, *left.notes, *refusals, *([] if on_card is None else [on_card.why])]
    return OfflinePlan(
        model=model,
        generation=generation,
        resolved=resolved,
        layers=layers,
        pool=pool,
        available_bytes=left.available,
        budget=left.budgets[pool.binding_worker] if left.budgets and left.why_unknown is None else None,
        notes=(*notes, *_platform_note(flags, generation, pool)),
        why_unknown=left.why_unknown,
        on_card=on_card,
        bounds=bounds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """The bytes that a start leaves for the KV cache of one rank of each stage."""

    available: Sequence[int] | None = None  # in bytes; None: not known, or the start ends before
    budgets: Sequence[StartBudget] = ()  # how the start divides the devices, where one is named
    notes: tuple[str, ...] = ()
    why_unknown: str | None = None
    refusal: str | None = None  # why the start ends before it sizes the KV cache


def _left(
    facts: ModelFacts, resolved: Resolved, generation: Generation, measured: MeasuredStart | None, *, stages: int
) -> _Left:
    flags = resolved.given
    notes, refusal = _beside_others(flags, generation)
    given = None if flags.kv_cache_memory_bytes is None else [flags.kv_cache_memory_bytes] * stages
    if refusal is not None:
        return _Left(refusal=refusal)
    if flags.device_bytes is None:
        text = "The bytes for the KV cache are not known: give --kv-cache-memory-bytes, or --device."
        return _Left(available=given, notes=notes if given else (text,))
    has_drafter = speculative_method(flags) not in _WITHOUT_WEIGHTS and measured is None
    why = "the weights and the activation of a drafter are not counted in the budget of a device"
    smallest = SMALL_STEP if resolved.assumes_a_card else None
    shared = replace(resolved.flags, gpu_memory_utilization=share_of(flags, generation))
    try:
        budgets = [
            estimate_start(facts, shared, generation, measured, smallest_step=smallest, stage=stage)
            for stage in range(stages)
        ]
    except PlanError as exc:
        budgets, why = [], why if has_drafter else str(exc)
    is_unknown = has_drafter or not budgets
    if given is not None:
        return _Left(available=given, budgets=budgets, notes=notes, why_unknown=why if is_unknown else None)
    if is_unknown:
        note = f"The bytes for the KV cache are not known: {why}. Give --kv-cache-memory-bytes."
        return _Left(notes=(note,), why_unknown=why)
    if any(stage.activation.high >= stage.total_bytes for stage in budgets):
        notes = (*notes, UNKNOWN_ITEM)
    return _Left(available=[stage.available.bytes for stage in budgets], budgets=budgets, notes=notes)


def _on_card(flags: EngineFlags, left: _Left, pool: KvPool) -> OnCard | None:
    """Judge the rank whose card is the fullest; the lower bound of the weights alone proves that it is too full."""
    if left.refusal is not None:
        return OnCard(fits=False, why=left.refusal)
    total, used, cards = flags.device_bytes, flags.in_use_bytes or 0, []
    is_sized = flags.kv_cache_memory_bytes is None and flags.num_gpu_blocks_override is None
    if total is None or left.available is None or is_sized:
        return None
    for cache, budget in zip_longest(pool.cache_bytes, left.budgets):
        parts = () if budget is None else (budget.activation, budget.non_torch, budget.graphs)
        cards.append(
            judge_card(
                total,
                used,
                cache,
                None if budget is None else budget.weights,
                add(parts, "beside weights and KV cache"),
                why_unknown=left.why_unknown,
                # No lower bound of given bytes: the start may be refused for what others have in use.
                may_start=flags.kv_cache_memory_bytes is None or budget is None or budget.available.low > 0,
            )
        )
    return fullest(cards)


def _beside_others(flags: EngineFlags, generation: Generation) -> tuple[tuple[str, ...], str | None]:
    """Return notes on the memory that others have in use, or why a start is refused for it."""
    used, total = flags.in_use_bytes, flags.device_bytes
    if used is None:
        return (), None
    if total is None or flags.platform == "cpu":
        raise PlanError("--in-use: it is of a card, whose memory is needed: give --device")
    if used > total:
        raise PlanError(f"--in-use: {size_text(used)} are more than --device, {size_text(total)}, has")
    version, release = generation.version, generation.release[:2]
    share = share_of(flags, generation)
    wanted = requested_bytes(total, share, release, flags.platform)
    left = total - used - wanted
    if counts_others(release, flags.platform):
        return (f"vLLM {version} takes the {size_text(used)} in use by others off the KV cache.",), None
    if left < 0:
        text = f"vLLM {version} refuses to start: {size_text(total - used)} of the card are free beside others, and"
        return (), f"{text} its share of {share} is {size_text(wanted)}."
    return (
        f"Others have {size_text(used)} of the card in use, which vLLM {version} does not take off the KV cache; beside"
        f" them and a share of {size_text(wanted)} {size_text(left)} are left. This engine's graphs and contexts,"
        " and whatever the others take later, come from that; if the contexts alone are more, the start is refused.",
    ), None


def _platform_note(flags: EngineFlags, generation: Generation, pool: KvPool) -> list[str]:
    """Return what another platform does with given bytes; raises PlanError where its rule is not modelled."""
    version, release, given = generation.version, generation.release, flags.kv_cache_memory_bytes
    if flags.platform == "ascend" and len(pool.groups) > 1 and release[:2] in ascend.SCALES_SEVERAL_GROUPS:
        raise PlanError(
            f"--vllm-version: {version}; vllm-ascend from 0.28 on scales the bytes of a model whose layers"
            f" are in several groups (here {len(pool.groups)}) by a rule that is not modelled: plan for 0.27 or older"
        )
    if given is not None and flags.platform == "ascend" and release[:2] not in ascend.TAKES_KV_CACHE_MEMORY_BYTES:
        return [
            "vllm-ascend of this version ignores --kv-cache-memory-bytes: the plan is for a start that logs as many"
            " bytes as available."
        ]
    if given is None or flags.platform != "cpu":
        return []
    # v1/worker/cpu_worker.py, platforms/cpu.py
    if release < (0, 20, 0):
        return [
            f"vLLM {version} on a CPU ignores --kv-cache-memory-bytes: the KV cache gets VLLM_CPU_KVCACHE_SPACE, in"
            f" whole GiB, 4 where it is not set. The plan is for a start with {given:,} bytes."
        ]
    return ["VLLM_CPU_KVCACHE_SPACE, where it is set, replaces --kv-cache-memory-bytes on a CPU."]
