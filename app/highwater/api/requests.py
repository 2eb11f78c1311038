"""The parts that the routes share: strict models, the format of the response, and what a command ends with."""

from __future__ import annotations

from typing import Any, Final, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict

from highwater.exit_codes import EXIT_STATUS_HEADER

# For what no cache may keep, and no browser may guess the type of.
NO_STORE: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
# What a route says of its responses on the OpenAPI page where it takes a `FormatQuery`.
OR_TEXT: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {"text/plain": {}}}}


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FormatQuery(StrictModel):
    format: Literal["json", "text"] | None = None


def wants_text(request: Request, chosen: str | None = None) -> bool:
    if chosen is not None:
        return chosen == "text"
    accept = request.headers.get("accept", "")
    return "text/plain" in accept and "application/json" not in accept


def ending(status: int) -> dict[str, str]:
    """Return the header by which a command that shows this response knows its exit status."""
    return {EXIT_STATUS_HEADER: str(status)}
