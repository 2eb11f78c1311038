"""A plan of a running engine as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from highwater.accounting.engine_budget import EncoderLimits
from highwater.plan.command_line import UNNAMED
from highwater.plan.kv_view import LiveEngine
from highwater.plan.live import LivePlan
from kvplan.figure import GRADES, Grade

SCHEMA: Final = 1
# They follow from the layers; the other figures of a pool are known as well as its bytes are.
_OF_LAYERS: Final = ("bytes_per_block", "block_size", "groups", "needed_bytes")
_OF_BYTES: Final = ("available_bytes", "blocks", "tokens", "max_concurrency", "fits", "max_model_len_that_fits")


def live_json(engine: LiveEngine, plan: LivePlan) -> dict[str, Any]:
    """Return a plan of a running engine for programs, as `POST /memory/plan` does."""
    pool, available = asdict(plan.pool), plan.available
    pool |= {"fits": plan.fits, "block_size": min(group.block_size for group in plan.pool.groups)}
    # The pool as it runs is the engine's own; the same formulas on other numbers are known as well as the bytes.
    sized: Grade = max(available.grade, "exact" if plan.changed else "engine", key=GRADES.index)
    grades: dict[str, Grade] = {**dict.fromkeys(_OF_LAYERS, "exact"), **dict.fromkeys(_OF_BYTES, sized)}
    grades |= {"available_bytes": available.grade, "fits": sized if plan.card is None else "estimated"}
    return {
        "schema": SCHEMA,
        "vllm_version": engine.version,
        "platform": plan.flags.platform,
        "model": {
            "architecture": engine.workers[0].budget.architecture,
            "layers": len({name for layers in engine.layers for name in layers}),
            "max_position_embeddings": None,
        },
        "flags": asdict(plan.flags),
        "changed": dict(plan.changed),
        "kv_cache": {
            **{name: pool[name] for name in (*_OF_BYTES, *_OF_LAYERS)},
            "available_bytes_low": available.low,
            "available_bytes_high": available.high,
            "refusal": plan.refusal,
            "on_card": None if plan.card is None else plan.card.why,
            "grades": grades,
        },
        "encoder": None if plan.encoder is None else _encoder_json(plan.encoder),
        "command_line": str(UNNAMED.changed(plan.changed)) if plan.changed else None,
        "notes": [*available.notes, *plan.notes],
    }


def _encoder_json(encoder: EncoderLimits) -> dict[str, Any]:
    size, width, element = encoder.cache_size, encoder.embed_width, encoder.embed_bytes
    return {
        "compute_embeddings": encoder.compute_budget,
        "cache_embeddings": size,
        "cache_bytes": None if size is None or width is None or element is None else size * width * element,
        "items": {
            modality: {"max_embeddings": largest, "cached": size // largest if size is not None and largest else None}
            for modality, largest in (encoder.max_tokens_per_item or {}).items()
        },
    }
