"""The cost of images and videos to the engine, and how much of it may be in flight at once. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gated_proxy.door_items import BYTES_PER_PIXEL, Cost, Media

MIB = 1024 * 1024


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


NOTHING = Cost()
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
