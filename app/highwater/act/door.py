"""The door's mode and limits, from what is known of the engine and its host. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gated_proxy.door import Mode
from gated_proxy.door_items import DoorLimits, TokenRule
from highwater.model.engine_budget import EncoderLimits, EngineBudget
from highwater.model.rank import RankKey, RankReading
from highwater.model.units import MIB

# Of what the container can still take. A pixel that is four bytes once decoded takes up to 17 while vLLM prepares it
# (0.32.0, Qwen3-VL's processor: the decoded image, its array, its copy for the resizing), and vLLM's own caches of
# prepared images grow meanwhile: with a quarter a flood filled a container of 5 GiB.
FREE_SHARE = 8
# What is encoded, and what is prepared meanwhile.
ENCODER_CACHES = 2
# Of the device memory that could be allocated: a reading is up to a second old, what was encoded since stays in the
# encoder cache, and the allocator's reserve is in pieces.
DEVICE_SHARE = 2
# Of less the text beside it takes more than the image does.
MIN_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorFacts:
    """The figures that the derivation reads. None: not known.

    Attributes:
        free_bytes: What the host memory of the engine's container can still take, what is in flight included.
        limit_bytes: The whole of which that is left.
        has_container_limit: It is the container's; else the machine's.
        budget: The engine's, as a worker reports it.
        encoder_is_profiled: False: the KV cache is known to have been sized without the encoder; on CPU it never is.
        peaks: What encoding took at most.
        device_room_bytes: What the fullest rank could allocate now.
    """

    free_bytes: int | None = None
    limit_bytes: int | None = None
    has_container_limit: bool = False
    budget: EngineBudget | None = None
    encoder_is_profiled: bool = True
    peaks: EncoderPeaks | None = None
    device_room_bytes: int | None = None


def mode_of(given: Mode | None, facts: DoorFacts) -> tuple[Mode, str]:
    """Return the mode, and the reason for it as a clause."""
    if given is not None:
        return given, "door.mode is set"
    if not facts.encoder_is_profiled:
        return "on", "this engine did not count its encoder's memory when it started"
    if facts.has_container_limit:
        return "on", "the engine's container has a memory limit"
    return "observe", "no memory limit of the engine's container is known"


def limits_of(given: DoorLimits, facts: DoorFacts) -> DoorLimits:
    """Return the limits with those derived that were not given."""
    found, encoder = given, facts.budget.encoder if facts.budget and facts.budget.encoder else EncoderLimits()
    if given.decoded_bytes is None and facts.free_bytes is not None:
        most = facts.free_bytes if facts.limit_bytes is None else facts.limit_bytes
        found = replace(found, decoded_bytes=_share(facts.free_bytes), ceiling_bytes=_share(most))
    if (rule := encoder.image_rule) is not None:
        side = rule.patch_size * rule.merge_size
        found = replace(found, token_rule=TokenRule(side, rule.min_pixels or 0, rule.max_pixels, is_engines=True))
    largest = max((tokens for tokens in (encoder.max_tokens_per_item or {}).values() if tokens), default=None)
    found = replace(found, item_tokens=largest)
    if given.encoder_tokens is None:
        cached = ENCODER_CACHES * max(encoder.cache_size, largest or 0) if encoder.cache_size else None
        device = _device_tokens(facts)
        # Before the first image nothing is known of an encoder that no start has tried: one at a time.
        first = 1 if facts.peaks and facts.peaks.is_untried and not facts.encoder_is_profiled else None
        known = [tokens for tokens in (cached, device, first) if tokens is not None]
        # Only what images were seen to take is a reason to let none in: a record of before may be of anything.
        is_seen = facts.peaks is not None and facts.peaks.risen > 0
        found = replace(found, encoder_tokens=min(known, default=None), device_tokens=device if is_seen else None)
    return found


def _share(size: int) -> int:
    return size // FREE_SHARE // MIB * MIB


def _device_tokens(facts: DoorFacts) -> int | None:
    """Return the encoder tokens that there is device memory for; None where the start set that aside, or not known."""
    peaks, room = facts.peaks, facts.device_room_bytes
    if peaks is None or room is None or (per_token := peaks.bytes_per_token) is None:
        return None
    profiled = facts.budget.memory.peak_activation_bytes if facts.budget and facts.encoder_is_profiled else 0
    if profiled is None or peaks.transient_bytes <= profiled or (facts.encoder_is_profiled and not peaks.risen):
        return None
    return int(room / DEVICE_SHARE / per_token)


class EncoderPeaks:
    """The most that a rank allocated for a moment in this life of the engine, by its own record of peaks.

    Divided by the largest item that was encoded it bounds what a token takes, whatever else ran in that step. What is
    known better are peaks that rose: no more tokens than were in flight can have been in that step.
    """

    def __init__(self) -> None:
        self._lives: tuple[object, ...] = ()
        self._begin()

    def _begin(self) -> None:
        self.transient_bytes = 0
        self._last: dict[RankKey, tuple[int, int]] = {}  # peak and allocated bytes
        self._encoded_tokens = 0  # of the largest item
        self._taken_at = -math.inf
        self._since = self._before = (0, 0)  # the door's figures since the last reading, and those before it
        self.risen = 0.0  # bytes for each token, by peaks that rose while images were in flight; 0: none did

    @property
    def bytes_per_token(self) -> float | None:
        """None before it was seen what an item took."""
        if not (self._encoded_tokens and self.transient_bytes):
            return None
        return max(1.0, min(self.risen or math.inf, self.transient_bytes / self._encoded_tokens))

    @property
    def is_untried(self) -> bool:
        """True if there are peaks to learn from, and nothing was learnt yet."""
        return bool(self._last) and self.bytes_per_token is None

    def notice(self, ranks: Sequence[RankReading], *, encoded_tokens: int, tokens_in_flight: int) -> None:
        """Take each rank's reading, with the door's figures since the last call.

        Args:
            ranks: All of the engine's.
            encoded_tokens: Of the largest item whose request was answered.
            tokens_in_flight: The most at once.
        """
        lives = tuple((rank.key, rank.pid, rank.pid_started) for rank in ranks)
        if ranks and lives != self._lives:
            self._begin()
            self._lives = lives
        self._since = max(self._since[0], encoded_tokens), max(self._since[1], tokens_in_flight)
        taken_at = min((rank.taken_at for rank in ranks), default=-math.inf)
        if taken_at <= self._taken_at:
            return
        # A reading may be older than an answer: what was answered counts from the next one on.
        in_flight = max(self._since[1], self._before[1])
        self._encoded_tokens = max(self._encoded_tokens, self._before[0])
        self._taken_at, self._before, self._since = taken_at, self._since, (0, 0)
        for rank in ranks:
            peak, allocated = rank.torch.peak_allocated_bytes, rank.torch.allocated_bytes
            if peak is None or allocated is None:
                continue
            last = self._last.get(rank.key)
            self._last[rank.key] = peak, allocated
            cached = rank.encoder_cache.device_bytes if rank.encoder_cache else 0
            if last is None:  # it may be of a time when the encoder cache was empty
                self.transient_bytes = max(self.transient_bytes, peak - allocated + cached)
            elif peak > last[0]:
                transient = peak - min(allocated, last[1])
                self.transient_bytes = max(self.transient_bytes, transient)
                if in_flight >= MIN_TOKENS:
                    self.risen = max(self.risen, transient / in_flight)
