"""The door follows what is seen: the container's room, the encoder's limits, and a rank that is very short."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from gated_proxy.door import Door
from gated_proxy.door_items import Cost
from highwater.host.reading import ContainerMemory, HostReading, MachineMemory, ProcessMemory
from highwater.model.engine_budget import EncoderLimits, EngineBudget
from highwater.model.rank import Launch, TorchMemory
from highwater.server.door import HOLD_SECONDS, MAX_HOLD_SECONDS, DoorWatch
from highwater.server.settings.sections import DoorSettings
from tests.fakes.clock import FakeClock
from tests.fakes.incident import reading

MIB = 1024**2
LIMITED = HostReading(taken_at=1.0, container=ContainerMemory(key="c", limit_bytes=1000 * MIB, kept_bytes=600 * MIB))


class Situation:
    def __init__(self, **settings) -> None:
        self.clock, self.level = FakeClock(), "calm"
        self.ranks = (reading(launch=Launch()),)
        self.budget = EngineBudget(encoder=EncoderLimits(cache_size=8192, max_tokens_per_item={"image": 4096}))
        self.host: HostReading | None = None
        self.door = Door(clock=self.clock, later=lambda *_: None)
        self.watch = DoorWatch(
            self.door,
            DoorSettings(**settings),
            budget_of=lambda _: self.budget,
            host=lambda: self.host,
            level=lambda: self.level,
            clock=self.clock,
        )
        self.poll()

    def poll(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.watch.notice(SimpleNamespace(ranks=self.ranks))

    def see_peak(self, mib: int) -> None:
        """Of a rank whose start did not count the encoder."""
        torch = TorchMemory(allocated_bytes=1000 * MIB, reserved_bytes=1050 * MIB, peak_allocated_bytes=mib * MIB)
        launch = Launch(encoder_unprofiled_by="vllm_ascend")
        self.ranks = (
            reading(
                pid=1, taken_at=self.clock.now, launch=launch, free_bytes=150 * MIB, torch=torch, encoder_cache=None
            ),
        )
        self.poll(1.0)


def test_before_anything_is_seen_the_door_observes():
    situation = Situation()
    assert (situation.door.mode, situation.door.limits.decoded_bytes) == ("observe", None)
    assert situation.door.limits.encoder_tokens == 16_384


def test_a_container_with_a_limit_closes_the_door_to_what_it_cannot_take(caplog):
    situation = Situation()
    with caplog.at_level(logging.INFO, "highwater"):
        situation.host = LIMITED
        situation.poll()
        situation.host = LIMITED
        situation.poll()
    assert (situation.door.mode, situation.door.limits.decoded_bytes) == ("on", 50 * MIB)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "images and videos at the door: on, because the engine's container has a memory limit (door.mode)"


def test_what_is_in_flight_does_not_shrink_the_room():
    situation = Situation()
    situation.door.inside = Cost(decoded_bytes=80 * MIB)
    situation.host = LIMITED
    situation.poll()
    assert situation.door.limits.decoded_bytes == 60 * MIB


def test_without_a_limit_the_machine_has_the_room():
    process = ProcessMemory(pid=1, role="engine_core", name="EngineCore")
    machine = MachineMemory(total_bytes=8000 * MIB, available_bytes=4000 * MIB)
    situation = Situation()
    situation.host = HostReading(taken_at=1.0, processes=(process,), machine=machine)
    situation.poll()
    assert (situation.door.mode, situation.door.limits.decoded_bytes) == ("observe", 500 * MIB)


def test_an_engine_that_does_not_profile_its_encoder_closes_the_door():
    situation = Situation()
    situation.ranks = (reading(launch=Launch(encoder_unprofiled_by="vllm_ascend")),)
    situation.poll()
    assert situation.door.mode == "on"


def test_what_an_image_took_bounds_the_next_ones():
    situation = Situation(mode="on")
    situation.see_peak(1000)
    assert situation.watch.state().encoder_tokens.limit == 1
    situation.door.encoded_tokens = situation.door.most_tokens = 1000
    situation.see_peak(1100)
    situation.see_peak(1100)
    state = situation.watch.state()
    assert (state.bytes_per_token, state.device_tokens, state.encoder_tokens.limit) == (round(MIB / 10), 1000, 1000)


def test_no_more_is_encoded_at_once_than_a_step_takes():
    situation = Situation(mode="on")
    situation.budget = EngineBudget(encoder=EncoderLimits(cache_size=8192, compute_budget=500))
    situation.see_peak(1000)
    situation.door.encoded_tokens, situation.door.most_tokens = 100, 1000
    situation.see_peak(1100)
    situation.see_peak(1100)
    assert situation.watch.state().bytes_per_token == round(MIB / 5)


def test_a_request_that_can_never_fit_is_one_larger_than_the_container_allows():
    situation = Situation()
    situation.host = LIMITED
    situation.poll()
    assert situation.watch.state().request_decoded_bytes == 125 * MIB


def test_images_wait_while_a_rank_is_very_short_and_not_for_ever():
    situation = Situation(mode="on")
    situation.level = "urgent"
    situation.poll()
    assert situation.door.held_for is not None
    assert "very short of device memory" in situation.watch.state().held_for
    for _ in range(int(MAX_HOLD_SECONDS)):
        assert situation.door.held_for is not None
        situation.poll(1.0)
    situation.poll(HOLD_SECONDS)
    assert situation.door.held_for is None
    situation.level = "calm"
    situation.poll(1.0)
    situation.level = "urgent"
    situation.poll(1.0)
    assert situation.door.held_for is not None


def test_a_hold_ends_with_its_reason():
    situation = Situation(mode="on")
    situation.level = "urgent"
    situation.poll()
    situation.level = "short"
    situation.poll(0.2)
    assert situation.watch.state().held_for is None


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_a_door_that_is_not_on_holds_nobody(mode):
    situation = Situation(mode=mode)
    situation.level = "urgent"
    situation.poll()
    assert situation.door.held_for is None


def test_the_state_has_what_is_taken_beside_its_limit():
    situation = Situation(items=7, decoded_bytes=MIB)
    situation.door.inside = Cost(decoded_bytes=3, encoder_tokens=2, items=1)
    state = situation.watch.state()
    assert (state.decoded_bytes.taken, state.decoded_bytes.limit) == (3, MIB)
    assert (state.items.taken, state.items.limit) == (1, 7)
    assert (state.encoder_tokens.taken, state.encoder_tokens.limit) == (2, 16_384)
