"""The door's present state: what images and videos are in flight, and how many requests wait for room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorFigure:
    taken: int
    limit: int | None = None  # `None`: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorState:
    mode: Literal["off", "observe", "on"]
    why: str  # the reason for the mode
    held_for: str | None = None  # why nobody is let in just now; `None` where requests are
    requests_waiting: int
    decoded_bytes: DoorFigure  # once decoded; for `encoder_tokens` and `items` likewise: of what is in flight
    encoder_tokens: DoorFigure
    items: DoorFigure
    requests_total: int = 0  # with images or videos, since the sidecar started
    waits_total: int = 0
    refused_total: int = 0  # in mode `observe`: that would have been, as `waits_total`
