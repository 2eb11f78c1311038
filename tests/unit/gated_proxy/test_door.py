"""The door: who goes in, who waits, who is refused; and that nothing is lost or counted twice."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gated_proxy.door import Door
from gated_proxy.door_items import NOTHING, Cost, DoorLimits, Media, TokenRule, cost_of
from gated_proxy.door_media import BY_URL, UNKNOWN
from gated_proxy.failures import RETRY_AFTER_SECONDS, Refused
from gated_proxy.heads import parse_head
from tests.fakes.clock import FakeClock

MIB = 1024 * 1024
LIMITS = DoorLimits(decoded_bytes=8 * MIB, items=100, encoder_tokens=100_000)
FAR = 10**9


class Timers:
    """The loop's timers by a fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.calls: list[Timer] = []

    def __call__(self, seconds, call):
        timer = Timer(self.clock.now + seconds, call, self)
        self.calls.append(timer)
        return timer

    def run(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        while due := [timer for timer in self.calls if timer.at <= self.clock.now]:
            due[0].cancel()
            due[0].call()


class Timer:
    def __init__(self, at, call, timers):
        self.at, self.call, self.timers = at, call, timers

    def cancel(self):
        if self in self.timers.calls:
            self.timers.calls.remove(self)


class Client:
    """A request: its images come one by one, each of so many MiB once decoded."""

    def __init__(self, at: Desk, key: str | None, line: str | None = None) -> None:
        lines = f"{line}\r\n" if line else ""
        lines += f"authorization: Bearer {key}\r\n" if key else ""
        head = parse_head(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{lines}\r\n".encode())
        self.door = at.door
        self.visit = at.door.visit(head, "chat_completions", b"{", opens=self.door_opens, refuses=self.door_refuses)
        self.opened = 0
        self.failure = None

    def door_opens(self):
        self.opened += 1

    def door_refuses(self, failure):
        self.failure = failure
        self.leave(failure.status)

    def brings(self, *mib: float) -> bool:
        return self.door.ask(self.visit, [image(each) for each in mib])

    def finish(self) -> bool:
        return self.door.finish(self.visit)

    def leave(self, status: int = 200) -> None:
        self.door.end(self.visit, status)


def image(mib: float) -> Media:
    return Media("png", 512, round(mib * 512))


class Desk:
    def __init__(self, limits: DoorLimits = LIMITS, mode: str = "on") -> None:
        self.clock = FakeClock()
        self.timers = Timers(self.clock)
        self.door = Door(mode=mode, limits=limits, clock=self.clock, wall=self.clock, later=self.timers)

    def client(self, key: str | None = None, line: str | None = None) -> Client:
        return Client(self, key, line)

    def pass_time(self, seconds: float) -> None:
        """In small steps, so that what comes again and again does."""
        for _ in range(round(seconds * 8)):
            self.timers.run(1 / 8)

    @property
    def mib(self) -> float:
        return self.door.inside.decoded_bytes / MIB


def test_a_closed_door_has_no_visits():
    assert Desk(mode="off").client().visit is None


def test_images_go_in_while_there_is_room_and_then_wait():
    desk = Desk()
    first, second, third = (desk.client() for _ in range(3))
    assert first.brings(4)
    assert second.brings(4)
    assert not third.brings(1)
    assert (desk.mib, desk.door.waiting, desk.door.counts.requests) == (8, 1, 3)
    first.leave()
    desk.timers.run()
    assert (third.opened, desk.mib, desk.door.waiting) == (1, 5, 0)
    second.leave()
    third.leave()
    assert desk.door.inside == NOTHING
    assert [(each.state, each.status) for each in desk.door.requests()] == [("passed", 200)] * 3


def test_a_later_one_that_would_fit_does_not_overtake():
    desk = Desk()
    inside, large, small = (desk.client() for _ in range(3))
    assert inside.brings(4)
    assert [large.brings(6), small.brings(1)] == [False, False]
    inside.leave()
    desk.timers.run()
    assert (large.opened, small.opened) == (1, 1)


def test_a_request_with_a_part_inside_goes_before_those_without():
    desk = Desk()
    growing, other, new = (desk.client() for _ in range(3))
    assert growing.brings(2)
    assert other.brings(6)
    assert [new.brings(5), growing.brings(4)] == [False, False]
    other.leave()
    desk.timers.run()
    assert (growing.opened, new.opened) == (1, 0)


def test_two_halves_of_bodies_do_not_wait_for_each_other():
    desk = Desk()
    first, second = desk.client(), desk.client()
    assert first.brings(4)
    assert second.brings(4)
    assert [first.brings(2), second.brings(2)] == [False, False]
    desk.timers.run()
    assert (first.opened, second.opened) == (1, 0)
    first.leave()
    desk.timers.run()
    assert second.opened == 1


def test_a_request_alone_may_take_more_tokens_and_items_than_several():
    desk = Desk(DoorLimits(items=2, encoder_tokens=100))
    alone = desk.client()
    assert [alone.brings(1, 1), alone.brings(1, 1)] == [True, True]
    assert not desk.client().brings(1)


def test_a_request_that_can_never_fit_is_refused_with_figure_limit_and_setting():
    desk = Desk()
    alone = desk.client()
    assert alone.brings(7)
    with pytest.raises(Refused) as refusal:
        alone.brings(7)
    failure = refusal.value.failure
    assert (failure.status, failure.reason) == (413, "door_too_large")
    for words in ("14680064 bytes once decoded", "at most 8388608", "(door.decoded_bytes)"):
        assert words in failure.message
    assert desk.door.counts.refused == {"door_too_large": 1}


def test_what_may_fit_later_waits_and_gets_503():
    desk = Desk(replace(LIMITS, ceiling_bytes=32 * MIB))
    inside, large, small = (desk.client() for _ in range(3))
    assert inside.brings(1)
    assert not large.brings(16)
    assert small.brings(1)  # nobody waits behind what no end of another's would help
    inside.leave()
    small.leave()
    desk.timers.run(10)
    assert (large.failure.status, large.failure.retry_after) == (503, RETRY_AFTER_SECONDS)
    with pytest.raises(Refused, match=r"at most 33554432 .*door\.decoded_bytes"):
        desk.client().brings(33)


def test_room_that_grows_lets_in_what_was_too_large_for_it():
    desk = Desk(replace(LIMITS, ceiling_bytes=32 * MIB))
    large = desk.client()
    assert not large.brings(16)
    desk.door.change(mode="on", limits=replace(desk.door.limits, decoded_bytes=16 * MIB))
    desk.timers.run()
    assert large.opened == 1


def test_an_image_for_which_the_device_has_no_memory_waits_and_others_do_not():
    desk = Desk(DoorLimits(encoder_tokens=100, device_tokens=100))
    large, small = desk.client(), desk.client()
    assert not large.brings(1)
    assert small.brings(0.05)
    desk.timers.run(10)
    for words in ("take 361 encoder tokens", "memory for 100 just now", "door.encoder_tokens"):
        assert words in large.failure.message


def test_the_tokens_that_were_in_flight_and_answered_are_told_once():
    desk = Desk()
    one, two, failed = (desk.client() for _ in range(3))
    sizes = [cost_of(image(mib), LIMITS).encoder_tokens for mib in (1, 2, 4)]
    for client, mib in ((one, 1), (two, 2), (failed, 4)):
        client.brings(mib)
    one.leave()
    two.leave()
    failed.leave(500)
    assert desk.door.take_tokens() == (sizes[1], sum(sizes))
    assert desk.door.take_tokens() == (0, 0)
    assert [(each.state, each.status) for each in desk.door.requests()][:2] == [("inside", 500), ("passed", 200)]


def test_the_deadline_ends_in_503_with_figure_limit_and_setting():
    desk = Desk()
    inside, waiting = desk.client(), desk.client()
    assert inside.brings(8)
    assert not waiting.brings(1)
    desk.timers.run(9.9)
    assert waiting.failure is None
    desk.timers.run(0.1)
    assert (waiting.failure.status, waiting.failure.reason) == (503, "door_timeout")
    assert waiting.failure.retry_after
    for words in ("10 s (door.wait_seconds)", "8388608 of 8388608 bytes once decoded", "door.decoded_bytes", "1048576"):
        assert words in waiting.failure.message
    assert (desk.door.waiting, desk.door.inside.items) == (0, 1)
    assert [each.state for each in desk.door.requests()] == ["inside", "refused"]


def test_all_of_a_requests_waits_together_have_the_deadline():
    desk = Desk()
    other, waiting = desk.client(), desk.client()
    assert other.brings(8)
    assert not waiting.brings(1)
    desk.timers.run(7)
    other.leave()
    desk.timers.run()
    assert waiting.opened == 1
    assert desk.client().brings(7)
    assert not waiting.brings(1)
    desk.timers.run(3)
    assert waiting.failure.reason == "door_timeout"


def test_a_client_that_leaves_makes_room_at_once():
    desk = Desk()
    inside, gone, next_one = (desk.client() for _ in range(3))
    assert inside.brings(8)
    assert [gone.brings(8), next_one.brings(1)] == [False, False]
    gone.leave(499)
    inside.leave()
    desk.timers.run()
    assert (gone.opened, next_one.opened) == (0, 1)


def test_one_client_takes_at_most_half_of_the_room_while_others_send_images():
    desk = Desk()
    desk.client("other").brings(1)
    greedy = [desk.client("greedy") for _ in range(4)]
    assert [each.brings(2) for each in greedy] == [True, True, False, False]
    other = desk.client("other")
    assert other.brings(1)
    assert desk.mib == 6
    greedy[0].leave()
    desk.timers.run()
    assert [each.opened for each in greedy] == [0, 0, 1, 0]
    assert desk.mib == 6


def test_the_others_are_whoever_has_sent_images_lately():
    desk = Desk()
    for key in ("first", "second", "greedy", "third"):
        desk.client(key).brings(0.1)
    assert [desk.client("greedy").brings(2) for _ in range(3)] == [True, False, False]


def test_a_single_client_has_all_of_the_room():
    desk = Desk()
    assert [desk.client("one").brings(2) for _ in range(4)] == [True] * 4
    assert Desk().client("one").brings(8)


def test_an_image_of_more_than_half_goes_in_where_its_key_has_nothing_else_inside():
    desk = Desk()
    desk.client("other").brings(1)
    one, two = desk.client("one"), desk.client("one")
    assert [one.brings(6), two.brings(1)] == [True, False]
    one.leave()
    desk.timers.run()
    assert two.opened == 1


@pytest.mark.parametrize("line", ["api-key: {}", "x-api-key: {}", "API-Key:Bearer {}"])
def test_another_line_beside_its_key_makes_no_other_client(line):
    desk = Desk()
    desk.client("other").brings(1)
    greedy = [desk.client("greedy", line.format(at)) for at in range(4)]
    assert [each.brings(2) for each in greedy] == [True, True, False, False]


def test_clients_without_keys_share_nothing():
    desk = Desk()
    desk.client("key").brings(1)
    assert [desk.client().brings(2) for _ in range(3)] == [True] * 3


def test_a_client_that_has_sent_none_for_a_minute_takes_no_part():
    desk = Desk()
    desk.client("other").brings(1)
    desk.timers.run(61)
    assert [desk.client("one").brings(2) for _ in range(3)] == [True] * 3


def test_the_client_is_known_by_a_hash_of_its_key():
    desk = Desk()
    desk.client("sk-secret").brings(1)
    (record,) = desk.door.requests()
    assert record.client == hashlib.sha256(b"sk-secret").hexdigest()[:12]


@pytest.mark.parametrize("figure", ["items", "encoder_tokens"])
def test_any_figure_may_be_the_one_that_is_short(figure):
    desk = Desk(DoorLimits(**{figure: cost_of(image(1), LIMITS).encoder_tokens if figure != "items" else 1}))
    assert desk.client().brings(1)
    waiting = desk.client()
    assert not waiting.brings(1)
    desk.timers.run(10)
    assert f"door.{figure}" in waiting.failure.message


def test_without_limits_everything_goes_in():
    desk = Desk(DoorLimits())
    assert desk.client().brings(*[100.0] * 50)
    assert desk.client().brings(100.0)


def test_while_the_door_is_held_images_wait_and_for_no_longer_than_asked():
    desk = Desk()
    desk.door.hold(2.0, "rank 0 is very short of device memory")
    one = desk.client()
    assert not one.brings(1)
    desk.timers.run(1.9)
    assert one.opened == 0
    desk.timers.run(0.1)
    assert (one.opened, desk.door.held_for) == (1, None)


def test_a_hold_may_end_early():
    desk = Desk()
    desk.door.hold(60.0, "relief runs")
    one, two = desk.client(), desk.client()
    assert [one.brings(1), two.brings(8)] == [False, False]
    desk.timers.run(5)
    desk.door.hold(0.0, "")
    desk.timers.run()
    assert (one.opened, two.opened) == (1, 0)


def test_the_deadline_of_a_held_door_says_why():
    desk = Desk()
    desk.door.hold(60.0, "rank 0 is very short of device memory")
    one = desk.client()
    one.brings(1)
    desk.timers.run(10)
    assert one.failure.message.endswith("rank 0 is very short of device memory")


def test_too_many_that_wait_are_refused():
    desk = Desk(DoorLimits(items=1, max_waiting=2))
    assert desk.client().brings(1)
    assert [desk.client().brings(1) for _ in range(2)] == [False, False]
    with pytest.raises(Refused, match=r"2 requests wait already .*door\.max_waiting") as refusal:
        desk.client().brings(1)
    assert (refusal.value.failure.status, refusal.value.failure.reason) == (503, "door_full")


def test_one_key_has_half_of_the_places_to_wait_where_others_want_some():
    desk = Desk(DoorLimits(items=1, max_waiting=4))
    assert desk.client("greedy").brings(1)
    greedy = [desk.client("greedy") for _ in range(4)]
    assert [each.brings(1) for each in greedy] == [False] * 4
    others = [desk.client("other"), desk.client()]
    assert [each.brings(1) for each in others] == [False, False]
    assert [each.failure and each.failure.reason for each in greedy] == [None, None, "door_full", "door_full"]
    for key in ("greedy", "third"):  # nobody has more than half
        with pytest.raises(Refused, match=r"door\.max_waiting"):
            desk.client(key).brings(1)
    assert (desk.door.waiting, desk.door.counts.refused) == (4, {"door_full": 4})


def test_a_slow_body_lends_its_room_while_others_wait_and_takes_it_back_before_its_end():
    desk = Desk()
    slow, whole, other = (desk.client() for _ in range(3))
    assert [slow.brings(5), whole.brings(2), whole.finish()] == [True, True, True]
    desk.pass_time(60)
    assert not other.brings(7)
    desk.pass_time(4.8)
    assert (other.opened, desk.mib) == (0, 7)
    desk.pass_time(0.4)
    assert (slow.visit.state, desk.mib, other.opened) == ("waiting", 2, 0)  # what is whole keeps its room
    whole.leave()
    desk.timers.run()
    assert (other.opened, desk.mib) == (1, 7)
    assert slow.brings(1)  # it comes on
    assert [slow.finish(), slow.finish()] == [False, False]
    other.leave()
    desk.timers.run()
    assert (slow.opened, slow.finish(), slow.visit.state, desk.mib) == (1, True, "inside", 6)


def test_a_slow_body_may_be_slow_for_so_long_in_all():
    desk = Desk()
    slow = desk.client()
    assert slow.brings(8)
    for _ in range(3):
        waiting = desk.client()
        assert not waiting.brings(8)
        desk.pass_time(1.5)
        waiting.leave()
        desk.pass_time(60)
    last = desk.client()
    assert not last.brings(8)
    desk.pass_time(1.5)
    assert (last.opened, slow.finish(), desk.door.waiting) == (1, False, 1)
    desk.timers.run(10)
    assert slow.failure.reason == "door_timeout"


def test_a_body_that_lent_its_room_goes_in_at_once_where_there_is_some():
    desk = Desk()
    slow, other = desk.client("a"), desk.client("b")
    assert slow.brings(8)
    assert not other.brings(8)
    desk.pass_time(5)
    other.leave()
    assert (desk.mib, slow.finish(), desk.mib) == (0, True, 8)
    with pytest.raises(Refused, match=r"door\.decoded_bytes"):
        slow.brings(1)


def test_an_observing_door_only_counts():
    desk = Desk(mode="observe")
    assert desk.client().brings(8)
    assert desk.client().brings(60, 40)
    assert desk.client().brings(4)
    desk.door.hold(5, "why")
    assert desk.client().brings(1)
    assert (desk.door.counts.waited, desk.door.counts.refused) == (2, {"door_too_large": 1})
    assert (desk.mib, desk.door.waiting) == (113, 0)


@pytest.mark.parametrize("change", [{"mode": "observe"}, {"mode": "off"}, {"limits": DoorLimits()}])
def test_a_changed_door_lets_those_in_who_waited(change):
    desk = Desk()
    assert desk.client().brings(8)
    waiting = desk.client()
    assert not waiting.brings(8)
    desk.door.change(**{"mode": "on", "limits": LIMITS, **change})
    desk.timers.run()
    assert waiting.opened == 1


def test_a_fault_of_the_scanner_fails_nobody(monkeypatch, caplog):
    desk = Desk()
    one = desk.client()
    monkeypatch.setattr("gated_proxy.door_scanner.Scanner.feed", lambda *_: 1 / 0)
    with caplog.at_level(logging.CRITICAL, "highwater.door"):
        assert desk.door.take(one.visit, b"anything")
    assert desk.door.take(one.visit, b"more")
    assert desk.door.counts.faults == 1


def test_once_the_engine_responds_the_rest_of_a_body_is_not_looked_at():
    desk = Desk()
    one = desk.client()
    one.brings(1)
    desk.door.leave(one.visit)
    assert desk.door.take(one.visit, b'"image_url":"https://example.com/x.png"')
    assert desk.door.inside == NOTHING


def test_the_largest_items_are_kept_with_their_sizes():
    desk = Desk(DoorLimits())
    one = desk.client()
    one.brings(*range(1, 40))
    (record,) = desk.door.requests()
    assert [each.height // 512 for each in record.largest] == [39, 38, 37, 36, 35, 34, 33, 32]
    assert (record.cost.items, record.ended_at, record.status) == (39, None, None)
    one.brings(*[50] * 3, *[1] * 1000)
    (record,) = desk.door.requests()
    assert [each.height // 512 for each in record.largest] == [50, 50, 50, 39, 38, 37, 36, 35]
    assert (record.cost.items, desk.door.counts.items) == (1042, {"png": 1042})


@pytest.mark.parametrize(
    ("media", "tokens"),
    [
        (Media("png", 64, 64), 4),
        (Media("png", 65, 1), 4),
        (Media("png", 1, 1), 4),  # scaled up
        (Media("png", 8192, 8192), 1024),  # scaled down
        (Media("mp4", 64, 64, 32), 128),
        (Media("mp4", 8192, 8192, 32), 2000),
        (UNKNOWN, 2000),
        (BY_URL, 2000),
    ],
)
def test_tokens_are_the_encoders_own(media, tokens):
    rule = TokenRule(side_pixels=32, min_pixels=4096, max_pixels=1024 * 1024)
    limits = DoorLimits(token_rule=rule, item_tokens=2000, unknown_bytes=7)
    assert cost_of(media, limits) == Cost(media.decoded_bytes or 7, tokens, 1)


def test_an_unknown_size_without_an_engine_has_the_tokens_of_its_bytes():
    assert cost_of(UNKNOWN, DoorLimits(unknown_bytes=4 * 280 * 280)).encoder_tokens == 100


class AnyTraffic(RuleBasedStateMachine):
    """Whatever happens: sums agree, nobody waits for nothing, everything is given back."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(DoorLimits(decoded_bytes=8 * MIB, ceiling_bytes=12 * MIB, items=6, max_waiting=6))
        self.clients: list[Client] = []

    @rule(key=st.sampled_from([None, "a", "b"]), mib=st.lists(st.integers(1, 18), min_size=1, max_size=3))
    def arrive(self, key, mib):
        client = self.desk.client(key)
        self.clients.append(client)
        self.bring(client, mib)

    @rule(which=st.integers(0, FAR), mib=st.lists(st.integers(1, 6), min_size=1, max_size=2))
    def grow(self, which, mib):
        if moving := [each for each in self.clients if not each.visit.waits and not each.visit.is_whole]:
            self.bring(moving[which % len(moving)], mib)

    def bring(self, client, mib):
        try:
            client.brings(*mib)
        except Refused as refusal:
            client.door_refuses(refusal.failure)

    @rule(which=st.integers(0, FAR))
    def leave(self, which):
        if self.clients:
            self.clients[which % len(self.clients)].leave()

    @rule(which=st.integers(0, FAR))
    def respond(self, which):
        if self.clients:
            self.desk.door.leave(self.clients[which % len(self.clients)].visit)

    @rule(which=st.integers(0, FAR))
    def finish(self, which):
        if moving := [each for each in self.clients if not each.visit.waits]:
            client = moving[which % len(moving)]
            try:
                client.finish()
            except Refused as refusal:
                client.door_refuses(refusal.failure)

    @rule(seconds=st.sampled_from([0.0, 1.0, 1.25, 9.0, 11.0]))
    def pass_time(self, seconds):
        self.desk.timers.run(seconds)

    @rule(seconds=st.sampled_from([0.5, 20.0]))
    def hold(self, seconds):
        self.desk.door.hold(seconds, "held")

    @rule(mode=st.sampled_from(["on", "observe", "on"]), mib=st.sampled_from([2, 8, 12]))
    def change(self, mode, mib):
        self.desk.door.change(mode=mode, limits=replace(self.desk.door.limits, decoded_bytes=mib * MIB))

    @invariant()
    def sums_agree(self):
        self.desk.timers.run()
        self.clients = [each for each in self.clients if each.visit in self.desk.door._running]
        door, visits = self.desk.door, [each.visit for each in self.clients]
        assert door.inside == sum((each.inside for each in visits), start=NOTHING)
        assert door.waiting == sum(each.waits for each in visits)
        assert (
            all(door._is_over_room(each) for each in visits if each.waits)
            or door.held_for
            or any(each.moves for each in visits)
        )
        assert door.mode == "on" or not door.waiting

    def teardown(self):
        for client in self.clients:
            client.leave()
        assert self.desk.door.inside == NOTHING


AnyTraffic.TestCase.settings = settings(deadline=None)
TestAnyTraffic = AnyTraffic.TestCase
