"""The door's mode and limits, from what is known."""

from __future__ import annotations

import pytest

from gated_proxy.door_items import DoorLimits, TokenRule
from highwater.act.door import DoorFacts, EncoderPeaks, limits_of, mode_of
from highwater.model.engine_budget import EncoderLimits, EngineBudget, ImageRule, StartMemory
from highwater.model.rank import EncoderCache, TorchMemory
from tests.fakes.incident import reading

MIB = 1024**2
ENCODER = EngineBudget(
    encoder=EncoderLimits(cache_size=8192, max_tokens_per_item={"image": 4096, "video": 16_384, "audio": None})
)


@pytest.mark.parametrize(
    ("given", "facts", "mode", "why"),
    [
        (None, DoorFacts(), "observe", "no memory limit"),
        (None, DoorFacts(has_container_limit=True), "on", "has a memory limit"),
        (None, DoorFacts(encoder_is_profiled=False), "on", "did not count its encoder"),
        ("off", DoorFacts(has_container_limit=True), "off", "door.mode is set"),
        ("on", DoorFacts(), "on", "door.mode is set"),
    ],
)
def test_the_mode_has_a_reason(given, facts, mode, why):
    found, reason = mode_of(given, facts)
    assert found == mode
    assert why in reason


def test_what_is_not_known_of_the_encoder_is_no_reason():
    """On CPU nothing says whether it was profiled."""
    assert mode_of(None, DoorFacts()) == ("observe", "no memory limit of the engine's container is known")


def test_without_facts_nothing_is_derived():
    assert limits_of(DoorLimits(), DoorFacts()) == DoorLimits()


def test_the_limits_are_those_of_container_and_encoder():
    limits = limits_of(DoorLimits(items=7), DoorFacts(free_bytes=1000 * MIB + 5, budget=ENCODER))
    assert (limits.decoded_bytes, limits.encoder_tokens, limits.items) == (125 * MIB, 32_768, 7)
    assert limits.item_tokens == 16_384


def test_what_is_set_stays():
    given = DoorLimits(decoded_bytes=5, encoder_tokens=6)
    limits = limits_of(given, DoorFacts(free_bytes=1000 * MIB, limit_bytes=2000 * MIB, budget=ENCODER))
    assert limits.request_bytes == 5
    assert (limits.decoded_bytes, limits.encoder_tokens) == (5, 6)


def test_an_engine_that_does_not_say_its_encoders_size_has_no_limit_of_tokens():
    limits = limits_of(DoorLimits(), DoorFacts(budget=EngineBudget(encoder=EncoderLimits())))
    assert (limits.encoder_tokens, limits.item_tokens) == (None, None)


def test_what_can_never_fit_is_the_containers_and_not_what_is_free_just_now():
    for free in (1000, 100, 0):
        limits = limits_of(DoorLimits(), DoorFacts(free_bytes=free * MIB, limit_bytes=4000 * MIB))
        assert (limits.decoded_bytes, limits.request_bytes) == (free * MIB // 8 // MIB * MIB, 500 * MIB)


def test_tokens_are_counted_by_the_engines_own_processor_where_it_is_known():
    rule = ImageRule(patch_size=16, merge_size=2, min_pixels=65_536, max_pixels=16_777_216)
    limits = limits_of(DoorLimits(), DoorFacts(budget=EngineBudget(encoder=EncoderLimits(image_rule=rule))))
    assert limits.token_rule == TokenRule(32, 65_536, 16_777_216, is_engines=True)
    assert not limits_of(DoorLimits(), DoorFacts(budget=ENCODER)).token_rule.is_engines


# --- device memory ---


class Engine:
    """One rank's readings, in MiB, and what the door says since the one before."""

    def __init__(self) -> None:
        self.peaks, self.pid, self.at = EncoderPeaks(), 1, 0.0

    def seen(self, *, allocated: int, peak: int, cached: int = 0, encoded: int = 0, in_flight: int = 0) -> float | None:
        torch = TorchMemory(allocated_bytes=allocated * MIB, peak_allocated_bytes=peak * MIB)
        cache = EncoderCache(entries=1, device_bytes=cached * MIB)
        self.at += 1
        rank = reading(pid=self.pid, taken_at=self.at, torch=torch, encoder_cache=cache)
        self.peaks.notice([rank], encoded_tokens=encoded, tokens_in_flight=in_flight)
        found = self.peaks.bytes_per_token
        return None if found is None else found / MIB

    def limits(self, room: int, *, is_profiled: bool = False, profile: int | None = None) -> DoorLimits:
        budget = EngineBudget(
            encoder=ENCODER.encoder,
            memory=StartMemory(peak_activation_bytes=None if profile is None else profile * MIB),
        )
        facts = DoorFacts(
            budget=budget, encoder_is_profiled=is_profiled, peaks=self.peaks, device_room_bytes=room * MIB
        )
        return limits_of(DoorLimits(), facts)


def test_an_encoder_that_nobody_has_tried_gets_one_item_at_a_time():
    engine = Engine()
    assert engine.seen(allocated=1000, peak=1010) is None
    limits = engine.limits(500)
    assert (limits.encoder_tokens, limits.device_tokens) == (1, None)  # one that is alone may take any number
    assert engine.limits(500, is_profiled=True).encoder_tokens == 32_768


def test_the_first_image_teaches_what_a_token_takes():
    engine = Engine()
    engine.seen(allocated=1000, peak=1010)
    engine.seen(allocated=1014, peak=1110, in_flight=1000, encoded=1000)
    assert engine.seen(allocated=1014, peak=1110) == pytest.approx(0.11)
    limits = engine.limits(500)
    assert (limits.encoder_tokens, limits.device_tokens) == (2272, 2272)


def test_what_was_answered_counts_once_a_later_reading_has_seen_it():
    engine = Engine()
    engine.seen(allocated=1000, peak=1010)
    engine.seen(allocated=1000, peak=1010, in_flight=1000, encoded=1000)
    for _ in range(3):  # the same reading again
        engine.at -= 1
        assert engine.seen(allocated=1000, peak=1010) is None
    assert engine.seen(allocated=1000, peak=1110) == pytest.approx(0.11)
    assert engine.limits(500).device_tokens == 2272


def test_several_images_in_one_step_are_not_taken_for_one():
    engine = Engine()
    engine.seen(allocated=1000, peak=1010)
    engine.seen(allocated=1000, peak=1100, in_flight=1000, encoded=1000)
    engine.seen(allocated=1000, peak=1400, in_flight=4000)
    assert engine.seen(allocated=1000, peak=1400) == pytest.approx(0.1)


def test_it_is_a_bound_and_no_mean():
    engine = Engine()
    engine.seen(allocated=1000, peak=1010)
    engine.seen(allocated=1000, peak=1200, in_flight=1000, encoded=1000)
    engine.seen(allocated=1000, peak=1210, in_flight=4000, encoded=100)
    assert engine.seen(allocated=1000, peak=1210) == pytest.approx(0.2)


def test_a_larger_image_that_took_no_more_lowers_it():
    engine = Engine()
    engine.seen(allocated=1000, peak=1010)
    engine.seen(allocated=1000, peak=1050, in_flight=300, encoded=300)
    assert engine.seen(allocated=1000, peak=1050) == pytest.approx(50 / 300)
    engine.seen(allocated=1000, peak=1050, in_flight=1000, encoded=1000)
    assert engine.seen(allocated=1000, peak=1050) == pytest.approx(0.05)


def test_a_peak_of_before_the_first_reading_may_be_of_an_empty_cache():
    engine = Engine()
    engine.seen(allocated=1200, peak=1250, cached=200, encoded=1000)
    assert engine.seen(allocated=1200, peak=1250) == pytest.approx(0.25)
    limits = engine.limits(500)
    assert (limits.encoder_tokens, limits.device_tokens) == (1000, None)  # several wait for each other; one goes in


def test_what_a_text_took_beside_a_thumbnail_keeps_no_image_out():
    engine = Engine()
    engine.seen(allocated=1000, peak=1010)
    engine.seen(allocated=1000, peak=3000, in_flight=64, encoded=64)
    engine.seen(allocated=1000, peak=3000)
    assert engine.limits(500).device_tokens is None


def test_another_life_of_the_engine_begins_anew_and_a_silent_one_does_not():
    engine = Engine()
    engine.seen(allocated=1000, peak=1100, encoded=1000)
    assert engine.seen(allocated=1000, peak=1100) == pytest.approx(0.1)
    engine.peaks.notice([], encoded_tokens=0, tokens_in_flight=0)
    assert engine.seen(allocated=1000, peak=1100) == pytest.approx(0.1)
    engine.pid = 2
    assert engine.seen(allocated=900, peak=900) is None


def test_what_the_start_set_aside_does_not_count_and_what_exceeds_it_does():
    engine = Engine()
    engine.seen(allocated=1000, peak=1010)
    engine.seen(allocated=1000, peak=1100, in_flight=1000, encoded=1000)
    engine.seen(allocated=1000, peak=1100)
    assert engine.limits(50, is_profiled=True).device_tokens is None
    assert engine.limits(50, is_profiled=True, profile=200).device_tokens is None
    assert engine.limits(50, is_profiled=True, profile=90).device_tokens == 250
