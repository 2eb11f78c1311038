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
    # The most decoded bytes that one request may bring, whatever room there is, and the encoder tokens of one that the
    # device has memory for just now. `None`: no limit.
    request_decoded_bytes: int | None = None
    device_tokens: int | None = None
    bytes_per_token: int | None = None  # of device memory, at most, while it is encoded; `None`: not known
    # An image makes a token for each square of so many pixels; by the engine's own processor, or by a common one.
    token_side_pixels: int = 28
    uses_engines_rule: bool = False
    requests_total: int = 0  # with images or videos, since the sidecar started
    waits_total: int = 0
    refused_total: int = 0  # in mode `observe`: that would have been, as `waits_total`
