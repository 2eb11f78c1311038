"""A plan of a running engine, in the form of docs/plan-by-vllm.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from highwater.accounting.engine_budget import EncoderLimits
from highwater.plan.command_line import UNNAMED
from highwater.plan.kv_view import LiveEngine
from highwater.plan.live import LivePlan
from highwater.plan.wish import Granted, wish_json
from highwater.readings.schema import SCHEMA
from kvplan.figure import GRADES, Grade

# They follow from the layers; the other figures of a pool are known as well as its bytes are.
_OF_LAYERS: Final = ("bytes_per_block", "block_size", "groups", "needed_bytes")
_OF_BYTES: Final = ("available_bytes", "blocks", "tokens", "max_concurrency", "fits", "max_model_len_that_fits")


def live_json(engine: LiveEngine, plan: LivePlan, granted: Granted | None = None) -> dict[str, Any]:
    """Return a plan of a running engine, or of the flags that a wish was granted with, as `POST /memory/plan` does."""
    pool, available, fits = asdict(plan.pool), plan.available, plan.fits
    chosen = None if granted is None else granted.chosen
    needed = plan.pool.needed_bytes if chosen is None else chosen.needed_bytes
    if available.low is not None and available.high is not None:
        fits = fits if (needed <= available.low) == (needed <= available.high) else None
    line, architecture = str(UNNAMED.changed(plan.changed)), engine.workers[0].budget.architecture
    others = f", with {line.removeprefix(f'{UNNAMED} ')}" if plan.changed else ""
    pool |= {"fits": fits, "block_size": min(group.block_size for group in plan.pool.groups)}
    # The pool as it runs is the engine's own; the same formulas on other numbers are known as well as the bytes.
    sized: Grade = max(available.grade, "exact" if plan.changed else "engine", key=GRADES.index)
    grades: dict[str, Grade] = {**dict.fromkeys(_OF_LAYERS, "exact"), **dict.fromkeys(_OF_BYTES, sized)}
    grades |= {"available_bytes": available.grade, "fits": sized if plan.card is None else "estimated"}
    return {
        "schema": SCHEMA,
        "status": {True: "fits", False: "does_not_fit", None: "may_not_fit"}[fits],
        "road": f"{architecture} on vLLM {engine.version}, as it started{others}",
        "versions": {"vllm": engine.version},
        "architecture": architecture,
        "flags": asdict(plan.flags),
        "changed": dict(plan.changed),
        "kv_cache": {
            **{name: pool[name] for name in (*_OF_BYTES, *_OF_LAYERS)},
            "max_model_len": plan.flags.max_model_len,
            "available_bytes_low": available.low,
            "available_bytes_high": available.high,
            "refusal": plan.refusal,
            "on_card": None if plan.card is None else plan.card.why,
            "grades": grades,
        },
        "encoder": None if plan.encoder is None else _encoder_json(plan.encoder),
        "command_line": line if plan.changed else None,
        "notes": [*available.notes, *plan.notes],
        **({} if granted is None else {"wish": wish_json(granted)}),
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
