"""The running engine's memory explained, and its KV cache with other flags, or the flags that a wish needs.

Both compute from what the workers reported: no worker is called, so any caller may send them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from highwater.diagnose.rules.book import Explained
from highwater.explain.live import grant_live, live_json, plan_live
from highwater.explain.wish import EXAMPLE, MAX_TEXT, parse_wish
from highwater.http.services import OR_TEXT, FormatQuery, Parts, StartReports, in_form
from highwater.http.text.budget import budget_text
from highwater.model.report import Report
from highwater.model.units import ceil_div
from highwater.process.errors import FAILED, OK, CannotPlan
from kvplan import PlanError

MAX_FLAGS: Final = 30
NO_BODY: Final = (
    'the body is empty; send a JSON object: vLLM\'s flags that are to be other, such as {"max_model_len": 163000}, '
    f'or a wish, such as {{"wish": "{EXAMPLE}"}}; {{}} plans the engine as it runs'
)
_EXPLAINED: Final = TypeAdapter(Explained)

router = APIRouter(tags=["memory"])


@router.get("/memory/budget", response_model=Explained, responses=OR_TEXT)
async def budget(request: Request, parts: Parts, query: Annotated[FormatQuery, Query()]) -> Response:
    """Return the memory explained: the start's budget, the KV pool, the encoder, and what was not counted.

    As a picture and tables with ``Accept: text/plain`` or ``?format=text``. No worker is called.
    """
    answer = await parts.starts.explained(parts.poller.current())
    ends_with = OK if answer.explanation.ranks else FAILED
    forms = partial(budget_text, answer), partial(_EXPLAINED.dump_json, answer)
    return in_form(request, *forms, ends_with=ends_with, chosen=query.format)


class PlanRequest(BaseModel):
    """The body of ``POST /memory/plan``: the flags of vLLM to change, or a wish.

    Other keys are vLLM's other flags: refused with the reason why they cannot be planned live.
    """

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"max_model_len": 163000}]})
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    wish: str | None = Field(None, max_length=MAX_TEXT, examples=[EXAMPLE])
    images_per_prompt: int | None = Field(None, ge=0, le=100_000)
    max_model_len: JsonValue = None
    max_num_seqs: JsonValue = None
    max_num_batched_tokens: JsonValue = None
    gpu_memory_utilization: JsonValue = None
    kv_cache_memory_bytes: JsonValue = None
    kv_cache_dtype: JsonValue = None
    tensor_parallel_size: JsonValue = None
    num_gpu_blocks_override: JsonValue = None


@router.post("/memory/plan")
async def plan(parts: Parts, body: PlanRequest | None = None) -> dict[str, Any]:
    """Return the KV cache that the running engine would have under other flags, each figure with its grade."""
    if body is None:
        raise CannotPlan(NO_BODY)
    # Any caller may send it, and a search takes some hundred plans: off the loop that proxies, and one at a time.
    async with parts.plan_turns.next():
        return await asyncio.to_thread(plan_answer, body, parts.starts, parts.poller.current())


def plan_answer(body: PlanRequest, starts: StartReports, report: Report) -> dict[str, Any]:
    flags = body.model_dump(exclude={"wish", "images_per_prompt"}, exclude_none=True)
    if len(flags) > MAX_FLAGS:
        raise CannotPlan(f"{len(flags)} flags are too many; at most {MAX_FLAGS}")
    if body.wish is not None and (flags or body.images_per_prompt is not None):
        given = ", ".join(flags) or "images_per_prompt"
        raise CannotPlan(f"{given}: a wish is answered with the flags that it needs; give the wish alone")
    try:
        live = starts.live_engine(report)
        if body.wish is not None:
            caches = [rank.encoder_cache for rank in report.ranks if rank.encoder_cache is not None]
            fullest = max(caches, key=lambda cache: cache.entries or 0, default=None)
            cached_image = None
            if fullest is not None and fullest.entries and fullest.embeds:
                cached_image = ceil_div(fullest.embeds, fullest.entries)
            granted = grant_live(live, parse_wish(body.wish), cached_image)
            # The plan of its flags, or of the engine as it runs where none were found.
            chosen = dict(granted.chosen.flags) if granted.chosen is not None else {}
            images = chosen.pop("limit_mm_per_prompt", {}).get("image")
            return live_json(live, plan_live(live, chosen, images), granted)
        answer = live_json(live, plan_live(live, flags, body.images_per_prompt))
        if report.engine.traits.is_absent:
            answer["notes"].insert(0, f"The engine does not run ({report.engine.state}): this is of its last start.")
        return answer
    except PlanError as exc:
        raise CannotPlan(str(exc)) from exc
