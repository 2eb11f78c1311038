"""The door's mode and limits, from what is known."""

from __future__ import annotations

import pytest

from gated_proxy.door import DoorLimits
from highwater.act.door import DoorFacts, limits_of, mode_of
from highwater.model.engine_budget import EncoderLimits

MIB = 1024**2
ENCODER = EncoderLimits(cache_size=8192, max_tokens_per_item={"image": 4096, "video": 16_384, "audio": None})


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


def test_without_facts_nothing_is_derived():
    assert limits_of(DoorLimits(), DoorFacts()) == DoorLimits()


def test_the_limits_are_those_of_container_and_encoder():
    limits = limits_of(DoorLimits(items=7), DoorFacts(free_bytes=1000 * MIB + 5, encoder=ENCODER))
    assert (limits.decoded_bytes, limits.encoder_tokens, limits.items) == (125 * MIB, 32_768, 7)
    assert limits.item_tokens == 16_384


def test_what_is_set_stays():
    given = DoorLimits(decoded_bytes=5, encoder_tokens=6)
    limits = limits_of(given, DoorFacts(free_bytes=1000 * MIB, encoder=ENCODER))
    assert (limits.decoded_bytes, limits.encoder_tokens) == (5, 6)


def test_an_engine_that_does_not_say_its_encoders_size_has_no_limit_of_tokens():
    limits = limits_of(DoorLimits(), DoorFacts(encoder=EncoderLimits()))
    assert (limits.encoder_tokens, limits.item_tokens) == (None, None)
