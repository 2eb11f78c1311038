"""A plan from a config.json alone: it needs no engine, no weights and no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from highwater.plan import ascend
from highwater.plan.checkpoint import Tensor
from highwater.plan.errors import PlanError
from highwater.plan.estimates import (
    MeasuredStart,
    ModelFacts,
    StartBudget,
    counts_others,
    estimate_start,
    requested_bytes,
)
from highwater.plan.flags import EngineFlags
from highwater.plan.generations import Generation, generation_of
from highwater.plan.json_file import read_object
from highwater.plan.layers import worker_layers
from highwater.plan.limits import Limits
from highwater.plan.models.drafts import read_draft
from highwater.plan.models.kept import Model
from highwater.plan.models.model import read_model
from highwater.plan.pool import KvPool, plan_pool
from highwater.plan.resolve import SMALL_STEP, Resolved, resolve, share_of, speculative_method
from highwater.plan.safetensors_header import checkpoint_tensors
from highwater.plan.specs import Layers
from highwater.readings.versions import NEWEST_TESTED, text_of
from highwater.units import size_text

DEFAULT_VERSION: Final = text_of(NEWEST_TESTED)
PREPROCESSOR: Final = "preprocessor_config.json"
UNKNOWN_ITEM: Final = (
    "No lower bound: a start profiles the encoder with the largest image, video or sound, whose size these files do not"
    " say. --limit-mm-per-prompt '{\"video\": 0}' beside a preprocessor_config.json, --measured or"
    " --kv-cache-memory-bytes settles it."
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
    # The bytes for the KV cache of one rank of each pipeline stage; None: not known.
    available_bytes: Sequence[int] | None
    # The device of the rank that binds, divided; None: no device was named, or that is not known.
    budget: StartBudget | None
    notes: tuple[str, ...]  # assumptions and warnings, in sentences
    why_unknown: str | None = None  # why the bytes for the KV cache are not known though a device was named
    # The KV pool with the fewest and with the most bytes that are expected; None: the bytes are exact or measured,
    # or not known.
    bounds: tuple[KvPool, KvPool] | None = None

    @property
    def fits(self) -> bool | None:
        """True if vLLM starts; None where that depends on bytes that are not known, or not known well enough."""
        if self.available_bytes is None:
            return None
        low, high = self.bounds or (self.pool, self.pool)
        return low.fits if low.fits == high.fits else None


def read_config(place: str) -> Mapping[str, Any]:
    """Takes its path or its folder's. Raises PlanError: the file is missing, or does not hold a JSON object."""
    path = Path(place)
    path = path / "config.json" if path.is_dir() else path
    values = _read_object(path)
    beside = path.with_name(MODELOPT_CONFIG)
    if path.name == "config.json" and values.get("quantization_config") is None and beside.exists():
        values = {**values, "quantization_config": _modelopt(_read_object(beside), beside)}
    return values


def _read_object(path: Path) -> dict[str, Any]:
    needed = MODELOPT_CONFIG if path.name == MODELOPT_CONFIG else "config.json"
    return read_object(path, MAX_CONFIG_BYTES, f"a model's {needed}")


def _modelopt(described: dict[str, Any], path: Path) -> dict[str, Any]:
    """Name the method of ModelOpt's own file, as vLLM does (model_arch_config_convertor.py, from its producer)."""
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
    limits, available = resolved.limits, left.available or [ANY_BYTES] * len(layers)
    limits = limits if left.available is not None else replace(limits, num_gpu_blocks_override=None)
    pool = plan_pool(layers, available, limits, generation)
    notes = [generation.note] if generation.note else []
    notes += [*resolved.notes, *left.notes, *dict.fromkeys(stage.refusal for stage in left.budgets if stage.refusal)]
    return OfflinePlan(
        model=model,
        generation=generation,
        resolved=resolved,
        layers=layers,
        pool=pool,
        available_bytes=left.available,
        budget=left.budgets[pool.binding_worker] if left.budgets else None,
        notes=(*notes, *_platform_note(flags, generation, pool)),
        why_unknown=left.why_unknown,
        bounds=_bounds(layers, left.budgets, resolved.limits, generation),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """The bytes that a start leaves for the KV cache of one rank of each stage."""

    available: Sequence[int] | None = None  # in bytes; None: not known
    budgets: Sequence[StartBudget] = ()  # how the start divides the devices, where one is named
    notes: tuple[str, ...] = ()
    why_unknown: str | None = None


def _left(
    facts: ModelFacts, resolved: Resolved, generation: Generation, measured: MeasuredStart | None, *, stages: int
) -> _Left:
    flags = resolved.given
    notes, is_refused = _beside_others(flags, generation)
    if is_refused:
        return _Left(available=[0] * stages, notes=notes)
    if flags.kv_cache_memory_bytes is not None:
        return _Left(available=[flags.kv_cache_memory_bytes] * stages, notes=notes)
    if flags.device_bytes is None:
        return _Left(notes=("The bytes for the KV cache are not known: give --kv-cache-memory-bytes, or --device.",))
    if speculative_method(flags) not in _WITHOUT_WEIGHTS and measured is None:
        return _unknown("the weights and the activation of a drafter are not counted in the budget of a device")
    smallest = SMALL_STEP if resolved.assumes_a_card else None
    try:
        budgets = [
            estimate_start(facts, resolved.flags, generation, measured, smallest_step=smallest, stage=stage)
            for stage in range(stages)
        ]
    except PlanError as exc:
        return _unknown(str(exc))
    if any(stage.activation.high >= stage.total_bytes for stage in budgets):
        notes = (*notes, UNKNOWN_ITEM)
    return _Left(available=[stage.available.bytes for stage in budgets], budgets=budgets, notes=notes)


def _beside_others(flags: EngineFlags, generation: Generation) -> tuple[tuple[str, ...], bool]:
    """Return what the memory that others have in use does to a start, and whether it is refused for that."""
    used, total = flags.in_use_bytes, flags.device_bytes
    if used is None:
        return (), False
    if total is None or flags.platform == "cpu":
        raise PlanError("--in-use: it is of a card, whose memory is needed: give --device")
    version, release = generation.version, generation.release[:2]
    share = share_of(flags, generation)
    wanted = requested_bytes(total, share, release, flags.platform)
    left = total - used - wanted
    if counts_others(release, flags.platform):
        return (f"vLLM {version} takes the {size_text(used)} in use by others off the KV cache.",), False
    if left < 0:
        text = f"vLLM {version} refuses to start: {size_text(total - used)} of the card are free beside others, and"
        return (f"{text} its share of {share} is {size_text(wanted)}.",), True
    return (
        f"Others have {size_text(used)} of the card in use, which vLLM {version} does not take off the KV cache; beside"
        f" them and a share of {size_text(wanted)} {size_text(left)} are left. This engine's graphs and contexts,"
        " and whatever the others take later, come from that; if the contexts alone are more, the start is refused.",
    ), False


def _unknown(why: str) -> _Left:
    note = f"The bytes for the KV cache are not known: {why}. Give --kv-cache-memory-bytes."
    return _Left(notes=(note,), why_unknown=why)


def _bounds(
    layers: Sequence[Layers], budgets: Sequence[StartBudget], limits: Limits, generation: Generation
) -> tuple[KvPool, KvPool] | None:
    """Return the pools with the fewest and with the most bytes; None where the bytes are no estimates."""
    if all(stage.available.low == stage.available.high for stage in budgets):
        return None
    return (
        plan_pool(layers, [stage.available.low for stage in budgets], limits, generation),
        plan_pool(layers, [stage.available.high for stage in budgets], limits, generation),
    )


def _platform_note(flags: EngineFlags, generation: Generation, pool: KvPool) -> list[str]:
    """Return what another platform does with given bytes; raises PlanError where its rule is not modelled."""
    version, release, given = generation.version, generation.release, flags.kv_cache_memory_bytes
    if flags.platform == "ascend" and len(pool.groups) > 1 and release[:2] in ascend.SCALES_SEVERAL_GROUPS:
        raise PlanError(
            f"--vllm-version: {version}; vllm-ascend from 0.28 on scales the bytes of a model whose layers"
            f" are in several groups (here {len(pool.groups)}) by a rule that is not modelled: plan for 0.27 or older"
        )
    if given is None:
        return []
    if flags.platform == "ascend" and release[:2] not in ascend.TAKES_KV_CACHE_MEMORY_BYTES:
        return [
            "vllm-ascend of this version ignores --kv-cache-memory-bytes: the plan is for a start that logs as many"
            " bytes as available."
        ]
    if flags.platform != "cpu":
        return []
    # v1/worker/cpu_worker.py, platforms/cpu.py
    if release < (0, 20, 0):
        return [
            f"vLLM {version} on a CPU ignores --kv-cache-memory-bytes: the KV cache gets VLLM_CPU_KVCACHE_SPACE, in"
            f" whole GiB, 4 where it is not set. The plan is for a start with {given:,} bytes."
        ]
    return ["VLLM_CPU_KVCACHE_SPACE, where it is set, replaces --kv-cache-memory-bytes on a CPU."]
