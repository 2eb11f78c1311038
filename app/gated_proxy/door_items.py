"""The images and videos of requests: what each is, what it costs the engine, and what became of them. Pure values.

Never compiled: the sidecar's JSON is made by these annotations, and a compiled class keeps only `type` of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MIB = 1024 * 1024

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
        return self + other * -1

    def __mul__(self, number: int) -> Cost:
        return Cost(self.decoded_bytes * number, self.encoder_tokens * number, self.items * number)


NOTHING = Cost()


@dataclass(frozen=True, slots=True)
class TokenRule:
    """The tokens that an encoder makes of pixels: one for each square of so many, within bounds.

    Above ``max_pixels`` the engine scales an image down, below ``min_pixels`` up. None: not known.
    """

    side_pixels: int = 28  # patch size times merge size
    min_pixels: int = 0
    max_pixels: int | None = None
    is_engines: bool = False  # as the engine's processor has it; else a common one, of Qwen2-VL's

    def tokens(self, width: int, height: int) -> int:
        """Return a bound: scaling keeps an image's shape, which costs it a part of a row and of a column."""
        area = self.side_pixels**2
        tokens = math.ceil(width / self.side_pixels) * math.ceil(height / self.side_pixels)
        if self.max_pixels is not None:
            tokens = min(tokens, self.max_pixels // area)
        return max(tokens, self.min_pixels // area, 1)


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """The most that may be in flight at once, and the longest that a request may wait. None: no limit."""

    decoded_bytes: int | None = None
    ceiling_bytes: int | None = None  # of one request, whatever room there is; `None`: `decoded_bytes`
    encoder_tokens: int | None = None
    device_tokens: int | None = None  # of one request: the device has no memory for more just now
    items: int | None = None
    item_tokens: int | None = None  # of the engine's largest item
    unknown_bytes: int = 64 * MIB  # decoded, of an item whose size is not known
    wait_seconds: float = 10.0
    max_waiting: int = 256  # requests; each keeps up to 320 KiB of its body
    token_rule: TokenRule = TokenRule()

    @property
    def request_bytes(self) -> int | None:
        """The most decoded bytes that a request can ever bring."""
        return self.decoded_bytes if self.ceiling_bytes is None else self.ceiling_bytes


FIGURES = (
    ("decoded_bytes", "bytes once decoded"),
    ("encoder_tokens", "encoder tokens"),
    ("items", "images and videos"),
)


def cost_of(media: Media, limits: DoorLimits) -> Cost:
    """Return what an item takes; one of unknown size counts as the engine's largest, within what can ever fit."""
    rule = limits.token_rule
    if not media.pixels:
        side = math.isqrt(limits.unknown_bytes // BYTES_PER_PIXEL)
        most = limits.request_bytes
        decoded_bytes = limits.unknown_bytes if most is None else min(limits.unknown_bytes, most)
        return Cost(decoded_bytes, limits.item_tokens or rule.tokens(side, side), 1)
    tokens = rule.tokens(media.width, media.height) * media.frames
    if limits.item_tokens is not None:
        tokens = min(tokens, limits.item_tokens)
    return Cost(media.decoded_bytes, tokens, 1)


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
