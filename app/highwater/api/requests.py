"""The parts that the routes' requests share: strict models and the format of the response."""

from __future__ import annotations

from typing import Any, Final, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict

# For what no cache may keep, and no browser may guess the type of.
NO_STORE: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
# What a route says of its responses on the OpenAPI page where it takes a `FormatQuery`.
OR_TEXT: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {"text/plain": {}}}}


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FormatQuery(StrictModel):
    format: Literal["json", "text"] | None = None


def wants_text(request: Request, chosen: str | None) -> bool:
    if chosen is not None:
        return chosen == "text"
    accept = request.headers.get("accept", "")
    return "text/plain" in accept and "application/json" not in accept
