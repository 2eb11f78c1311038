"""A plan from a config.json alone: no engine, no weights and no device are asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from highwater.plan.errors import PlanError
from highwater.plan.flags import EngineFlags
from highwater.plan.generations import NEWEST, Generation, generation_of
from highwater.plan.layers import worker_layers
from highwater.plan.models.drafts import read_draft
from highwater.plan.models.kept import Model
from highwater.plan.models.model import read_model
from highwater.plan.pool import Pool, plan_pool
from highwater.plan.resolve import Resolved, resolve
from highwater.plan.specs import Layers

NEWEST_VERSION: Final = ".".join(map(str, NEWEST))
# A config.json is a few KiB; anything of this size is another file.
MAX_CONFIG_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePlan:
    """What would happen with a model and a command line.

    Attributes:
        model: The model.
        generation: The version's rules.
        resolved: Every flag.
        layers: The layers of one rank of each pipeline stage.
        pool: The KV pool; where its bytes are not known, that of one request of the maximum length.
        available_bytes: The bytes for the KV cache; None: not known.
        notes: What a reader should know.
    """

    model: Model
    generation: Generation
    resolved: Resolved
    layers: Sequence[Layers]
    pool: Pool
    available_bytes: int | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether vLLM starts; None where that depends on bytes that are not known."""
        return None if self.available_bytes is None else self.pool.fits


def read_config(place: str) -> Mapping[str, Any]:
    """Return a model's config.json.

    Args:
        place: The file, or the folder that holds it.

    Raises:
        PlanError: There is none, or it is no JSON object.
    """
    path = Path(place)
    path = path / "config.json" if path.is_dir() else path
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise PlanError(f"{path}: larger than any config.json; name the model's config.json or its folder")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise PlanError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except (UnicodeDecodeError, ValueError, RecursionError) as exc:
        raise PlanError(f"{path}: is no JSON: {exc}") from exc
    if not isinstance(values, dict):
        raise PlanError(f"{path}: a JSON object is needed, this is a {type(values).__name__}")
    return values


def plan_offline(
    values: Mapping[str, Any],
    flags: EngineFlags,
    version: str = NEWEST_VERSION,
    *,
    available_bytes: Sequence[int] | None = None,
) -> OfflinePlan:
    """Plan a command line for a model.

    Args:
        values: The model's config.json.
        flags: The command line.
        version: The version of vLLM.
        available_bytes: The bytes for the KV cache of each pipeline stage's ranks, where they were worked out; None:
            `kv_cache_memory_bytes`, else they are not known.

    Raises:
        PlanError: vLLM would refuse it, or a figure of it cannot be had exactly.
    """
    generation = generation_of(version)
    model = read_model(values, generation.release)
    draft = read_draft(flags.speculative_config, values, model)
    resolved = resolve(flags, model, generation, speculative_tokens=draft.tokens)
    layers = worker_layers(model, resolved, generation, draft.kept)
    notes = [*((generation.note,) if generation.note else ()), *model.notes, *resolved.notes]
    if available_bytes is None and flags.kv_cache_memory_bytes is not None:
        available_bytes = [flags.kv_cache_memory_bytes] * len(layers)
    if available_bytes is not None:
        pool = plan_pool(layers, available_bytes, resolved.limits, generation)
        return OfflinePlan(
            model=model,
            generation=generation,
            resolved=resolved,
            layers=layers,
            pool=pool,
            available_bytes=pool.available_bytes,
            notes=tuple(notes),
        )
    notes.append("The bytes for the KV cache are not known: give --kv-cache-memory-bytes, or --device.")
    # Any bytes do: what one request needs does not depend on them.
    unknown = replace(resolved.limits, num_gpu_blocks_override=None)
    pool = plan_pool(layers, [1 << 50] * len(layers), unknown, generation)
    return OfflinePlan(
        model=model,
        generation=generation,
        resolved=resolved,
        layers=layers,
        pool=pool,
        available_bytes=None,
        notes=tuple(notes),
    )
