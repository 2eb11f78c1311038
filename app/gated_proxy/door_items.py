"""One request's images and videos as they are shown: what each is, what they cost, and what became of them. Values.

Never compiled: the sidecar's JSON is made by these annotations, and a compiled class keeps only `type` of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["png", "jpeg", "webp", "gif", "bmp", "mp4", "url", "unknown"]
State = Literal["waiting", "inside", "passed", "refused"]

# Pillow keeps a pixel of an RGB image in four bytes, and vLLM converts each image to RGB.
BYTES_PER_PIXEL = 4


@dataclass(frozen=True, slots=True)
class Media:
    """One image or video of a request; width and height are 0 where they are not known."""

    form: Form
    width: int = 0
    height: int = 0
    frames: int = 1

    @property
    def pixels(self) -> int:
        """Of one frame."""
        return self.width * self.height

    @property
    def decoded_bytes(self) -> int:
        return self.pixels * BYTES_PER_PIXEL * self.frames


@dataclass(frozen=True, slots=True)
class Cost:
    decoded_bytes: int = 0
    encoder_tokens: int = 0
    items: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.decoded_bytes + other.decoded_bytes,
            self.encoder_tokens + other.encoder_tokens,
            self.items + other.items,
        )

    def __sub__(self, other: Cost) -> Cost:
        return self + Cost(-other.decoded_bytes, -other.encoder_tokens, -other.items)


@dataclass(frozen=True, slots=True)
class RequestItems:
    """One request's images and videos, without content: who sent what, and what became of it.

    ``client`` is a hash of the API key, None without one; ``largest`` are the first few by pixels. ``inside`` lasts to
    the first byte of the response, or to its end where that says nothing about the encoder: then it has ``passed``.
    Times are Unix seconds; ``ended_at`` and ``status`` are None while the request runs.
    """

    request_id: str
    client: str | None
    path_class: str
    state: State
    cost: Cost
    largest: tuple[Media, ...]
    started_at: float
    waited_seconds: float
    ended_at: float | None
    status: int | None
