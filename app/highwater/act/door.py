"""The door's mode and limits, from what is known of the engine and its host. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gated_proxy.door import DoorLimits, Mode
from highwater.model.engine_budget import EncoderLimits
from highwater.model.units import MIB

# Of what the container can still take. A pixel that is four bytes once decoded takes up to 17 while vLLM prepares it
# (0.32.0, Qwen3-VL's processor: the decoded image, its array, its copy for the resizing), and vLLM's own caches of
# prepared images grow meanwhile: with a quarter a flood filled a container of 5 GiB.
FREE_SHARE = 8
# What is encoded, and what is prepared meanwhile.
ENCODER_CACHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorFacts:
    """The figures that the derivation reads. None: not known.

    Attributes:
        free_bytes: What the host memory of the engine's container can still take, what is in flight included.
        has_container_limit: Its limit is what ``free_bytes`` is measured by.
        encoder: The limits of the engine's encoder; likewise ``encoder_is_profiled``.
    """

    free_bytes: int | None = None
    has_container_limit: bool = False
    encoder: EncoderLimits | None = None
    encoder_is_profiled: bool = True


def mode_of(given: Mode | None, facts: DoorFacts) -> tuple[Mode, str]:
    """Return the mode, and the reason for it as a clause."""
    if given is not None:
        return given, "door.mode is set"
    if not facts.encoder_is_profiled:
        return "on", "this engine did not count its encoder's memory when it started"
    if facts.has_container_limit:
        return "on", "the engine's container has a memory limit"
    return "observe", "no memory limit of the engine's container is known, and the engine profiles its encoder"


def limits_of(given: DoorLimits, facts: DoorFacts) -> DoorLimits:
    """Return the limits with those derived that were not given."""
    decoded_bytes, encoder_tokens = given.decoded_bytes, given.encoder_tokens
    if decoded_bytes is None and facts.free_bytes is not None:
        decoded_bytes = facts.free_bytes // FREE_SHARE // MIB * MIB
    item_tokens = None
    if facts.encoder is not None:
        largest = [tokens for tokens in (facts.encoder.max_tokens_per_item or {}).values() if tokens]
        item_tokens = max(largest, default=None)
        if encoder_tokens is None and facts.encoder.cache_size:
            encoder_tokens = ENCODER_CACHES * max(facts.encoder.cache_size, item_tokens or 0)
    return replace(given, decoded_bytes=decoded_bytes, encoder_tokens=encoder_tokens, item_tokens=item_tokens)
