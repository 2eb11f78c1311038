"""The route of the verdicts on growth and the floors behind them. It calls no worker, so everybody may read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field, TypeAdapter

from highwater.api.requests import OR_TEXT, FormatQuery, wants_text
from highwater.api.services import Services
from highwater.diagnose.case import of_report
from highwater.diagnose.finding import in_words
from highwater.diagnose.rules.book import known_causes
from highwater.growth.floors import Floor
from highwater.readings.growth import SeriesGrowth
from highwater.readings.schema import SCHEMA
from highwater.text.growth import growth_table


class GrowthQuery(FormatQuery):
    series: str | None = Field(None, max_length=256, description="one series by its name, with its floors")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthFloor:
    """One floor of a series: its value, and the engine's work until then."""

    at: float
    value: float
    requests: float | None
    images: float | None
    new_images: float | None
    tokens: float | None
    sleeps: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthAnswer:
    """The verdicts, the leaks first; with the floors of a series that was requested by name, oldest first."""

    schema: int = SCHEMA
    series: tuple[SeriesGrowth, ...]
    floors: tuple[GrowthFloor, ...] = ()
    # The known causes of what has grown since the engine was ready, a paragraph each, with the first thing to do.
    causes: tuple[str, ...] = ()


_ANSWER = TypeAdapter(GrowthAnswer)


def _floor(floor: Floor) -> GrowthFloor:
    counts = {name: getattr(floor, name) for name in ("requests", "images", "new_images", "tokens", "sleeps")}
    known = {name: None if math.isnan(count) else count for name, count in counts.items()}
    return GrowthFloor(at=floor.wall, value=floor.value, **known)


def growth_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["memory"])

    @router.get("/memory/growth", response_model=GrowthAnswer, responses=OR_TEXT)
    async def growth(request: Request, query: Annotated[GrowthQuery, Query()]) -> Response:
        """Return the verdict on every series of memory: flat, plateau, step, leak or not known.

        With ``series`` its verdict alone, and the floors behind it.
        """
        verdicts = services.growth.verdicts()
        floors: tuple[GrowthFloor, ...] = ()
        if query.series is not None:
            found = services.growth.find(query.series)
            verdicts, floors = (found,), tuple(map(_floor, services.growth.data(found.series, found.ground)))
        poller = services.poller
        causes = tuple(
            map(in_words, known_causes(of_report("running", poller.current(), baseline=poller.life.baseline)))
        )
        if wants_text(request, query.format):
            return PlainTextResponse(growth_table(verdicts, causes))
        answer = GrowthAnswer(series=verdicts, floors=floors, causes=causes)
        return Response(_ANSWER.dump_json(answer), media_type="application/json")

    return router
