"""Decide, act, measure, record: on the policy's behalf and on operators'."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from app.errors import NotAvailable, Refused, UnknownName
from app.policy import SIGNAL_REMEDIES, Rule
from app.remedies import REMEDIES, Run
from app.remedies.release import Release
from tests.fakes.engine import CACHED, IMAGE_BYTES, IMAGES, MIB, TOTAL, USED_AFTER, USED_READY, Core, core_on

ENCODER_BYTES = 2 * IMAGES * IMAGE_BYTES
DEVICE = Rule(
    name="device",
    signal="device_used_ratio",
    high_water=0.93,
    low_water=0.85,
    cooldown_seconds=60.0,
    remedies=("release", "reset_encoder_cache"),
)
HOST = replace(DEVICE, signal="host_used_ratio", high_water=0.2, low_water=0.1, remedies=("reset_mm_cache",))
FLAT = replace(DEVICE, signal="encoder_cache_bytes", high_water=MIB, low_water=0, remedies=("release",))


async def grown(rule: Rule = DEVICE, version: str = "0.32.0", **knobs) -> Core:
    """A core that has seen the engine ready; then the benchmark came, and nobody has polled since."""
    core = core_on(version, rules=[rule], **knobs)
    await core.tick()
    core.fake.serve_images()
    core.clock.advance(0.5)
    return core


def resets(core: Core) -> list[str]:
    """What the engine was told to do, in order."""
    acted = [call for call in core.fake.calls if call.method == "POST" and call.op != "memory"]
    return [call.op or call.path for call in acted]


def phases(core: Core) -> list[str]:
    return [summary.partition(" at ")[0].partition(": ")[2] for summary in core.summaries("policy")]


# --- the policy's side ---


async def test_below_high_water_nothing_is_done():
    """57,766 MiB are the engine's own."""
    core = core_on(rules=[DEVICE])
    await core.tick()
    assert (resets(core), core.summaries("reset"), core.governor.status().state) == ([], [], "below")


async def test_the_ladder_climbs_until_low_water():
    """Release first, as it costs nothing; not enough, so the encoder cache, and release after it for the device."""
    core = await grown()
    await core.tick()
    assert resets(core) == ["release"]
    await core.tick()
    assert resets(core) == ["release", "/reset_encoder_cache", "release"]
    assert phases(core) == ["below -> acting", "acting -> above", "above -> acting", "acting -> cooling"]
    assert core.poller.current().ranks[0].used_bytes == USED_READY - CACHED


async def test_every_step_is_measured_and_recorded():
    """What each remedy freed, in total, by component and by rank."""
    core = await grown()
    await core.tick()
    await core.tick()
    first, second = [event.result for event in reversed(core.history.events()) if event.kind == "reset"]
    assert (first.freed_bytes, first.freed_components.torch_cached_bytes) == (2 * CACHED, 2 * CACHED)
    assert (second.remedy, second.outcome, second.freed_bytes) == ("reset_encoder_cache", "done", ENCODER_BYTES)
    assert [rank.components.encoder_cache_bytes for rank in second.ranks] == [IMAGES * IMAGE_BYTES] * 2
    assert core.counted.remedies == [("release", "policy", "done"), ("reset_encoder_cache", "policy", "done")]
    assert f"reset_encoder_cache done, freed {ENCODER_BYTES / MIB:,.1f} MiB" in core.summaries("reset")[1]


async def test_after_relief_it_cools_and_comes_back():
    """No reset inside the cooldown, whatever comes; afterwards it looks again."""
    core = await grown()
    await core.tick()
    await core.tick()
    done = resets(core)
    core.fake.serve_images(120)
    await core.tick(59.0)
    assert (resets(core), core.governor.status().state) == (done, "cooling")
    await core.tick(2.0)
    assert resets(core) == [*done, "release"]


async def test_observe_decides_and_does_nothing():
    """Recorded and counted as observed; the engine is told nothing."""
    core = await grown(mode="observe")
    await core.tick()
    await core.tick()
    assert resets(core) == []
    assert core.counted.remedies == [("release", "policy", "observed"), ("reset_encoder_cache", "policy", "observed")]
    assert core.summaries("reset")[0] == "release observed: the policy is in observe mode"


@pytest.mark.parametrize("state", ["stale", "unresponsive", "down", "sleeping"])
async def test_no_fresh_report_no_action(state):
    """The policy fails closed."""
    core = await grown()
    await core.poller.poll()
    if state == "stale":
        core.clock.advance(11.0)
    elif state == "unresponsive":
        core.fake.hang = asyncio.Event()
        await core.poller.poll()
    else:
        core.fake.down, core.fake.asleep = state == "down", state == "sleeping"
        await core.poller.poll()
    await core.governor.consider()
    assert resets(core) == []
    assert core.governor.status().rules[0].value is None
    await core.engine.aclose()


async def test_a_paused_engine_may_be_relieved():
    """Its requests wait; its memory is as full."""
    core = await grown()
    core.fake.paused = True
    await core.tick()
    assert resets(core) == ["release"]


async def test_what_frees_too_little_is_futile():
    """Release cannot lower the encoder cache: tried once, then left, and said so."""
    core = await grown(FLAT)
    for _ in range(5):
        await core.tick(5.0)
    assert resets(core) == ["release"]
    (rule,) = core.governor.status().rules
    assert (rule.phase, core.governor.status().state) == ("futile", "futile")
    assert (rule.remedies[0].futile, rule.remedies[0].last_freed_bytes) == (True, 0)


async def test_a_futile_remedy_comes_back_after_its_backoff():
    """A minute, then two."""
    core = await grown(FLAT)
    await core.tick()
    await core.tick(61.0)
    assert resets(core) == ["release"] * 2
    await core.tick(61.0)
    assert resets(core) == ["release"] * 2
    await core.tick(60.0)
    assert resets(core) == ["release"] * 3


async def test_a_refused_remedy_is_recorded_and_the_next_is_tried():
    """On 0.12 there is no /reset_encoder_cache."""
    rule = replace(DEVICE, remedies=("reset_encoder_cache", "release"))
    core = await grown(rule, "0.12.0")
    await core.tick()
    await core.tick()
    assert resets(core) == ["release"]
    (refusal,) = [event for event in core.history.events() if event.kind == "refusal"]
    assert refusal.result is not None
    assert "this engine has no /reset_encoder_cache" in (refusal.result.reason or "")
    assert core.counted.remedies[0] == ("reset_encoder_cache", "policy", "refused")


@pytest.mark.parametrize(
    ("version", "acts"), [("0.12.0", False), ("0.27.0", False), ("0.28.0", True), ("0.32.0", True)]
)
async def test_reset_mm_cache_is_automatic_only_where_it_heals_itself(version, acts):
    """Before 0.28 it fails requests, or hangs the engine; then the policy leaves it alone."""
    core = core_on(version, rules=[HOST])
    await core.tick()
    assert resets(core) == (["/reset_mm_cache"] if acts else [])
    assert core.counted.remedies == [("reset_mm_cache", "policy", "done" if acts else "refused")]


async def test_host_rules_are_judged_by_host_memory():
    """A gibibyte less on the host is an effect, though the device's use has not moved."""
    core = core_on(rules=[HOST])
    await core.tick()
    (rule,) = core.governor.status().rules
    assert rule.remedies[0].last_freed_bytes == 1024 * MIB
    assert not rule.remedies[0].futile


async def test_a_rule_under_the_baseline_is_reported_once():
    """It would fire for ever: an event, a log line and a problem in the status, and then silence."""
    core = core_on(rules=[replace(DEVICE, high_water=0.5, low_water=0.4)])
    for _ in range(5):
        await core.tick()
    (event,) = [event for event in core.history.events() if event.kind == "baseline"]
    assert f"the engine's own baseline {USED_READY / TOTAL:g} after start" in event.summary
    assert core.governor.status().rules[0].problem == event.summary


async def test_a_baseline_problem_goes_with_its_rule():
    """A better rule is looked at afresh."""
    core = core_on(rules=[replace(DEVICE, high_water=0.5, low_water=0.4)])
    await core.tick()
    core.governor.replace_policy([DEVICE], "act", "policy changed")
    await core.tick()
    assert core.governor.status().rules[0].problem is None


async def test_an_engine_that_goes_during_a_reset_is_a_failed_reset():
    """The rule is not stuck in acting, and the loop goes on."""
    core = await grown()
    await core.poller.poll()
    core.fake.breaks = True
    await core.governor.consider()
    assert core.counted.remedies == [("release", "policy", "failed")]
    assert core.governor.status().rules[0].phase == "above"
    assert core.summaries("reset")[0].startswith("release failed: worker call release")


async def test_a_cancelled_reset_does_not_leave_the_rule_acting():
    """The sidecar stops in the middle of one."""
    core = await grown()
    await core.poller.poll()
    core.engine._rpc_deadline = 60.0
    core.fake.hang = asyncio.Event()
    task = asyncio.create_task(core.governor.consider())
    for _ in range(100):
        await asyncio.sleep(0)
    assert core.governor.status().state == "acting"
    task.cancel()
    await asyncio.wait({task})
    assert core.governor.status().state == "above"
    await core.engine.aclose()


async def test_one_odd_report_does_not_end_the_watch(monkeypatch):
    """It is logged, and the next report is looked at."""
    core = core_on(rules=[DEVICE])
    looked: list[int] = []
    done = asyncio.Event()

    async def consider():
        looked.append(1)
        if len(looked) < 3:
            core.governor.notice(core.poller.current())
            raise ZeroDivisionError
        done.set()

    monkeypatch.setattr(core.governor, "consider", consider)
    core.governor.notice(core.poller.current())
    task = asyncio.create_task(core.governor.run())
    await done.wait()
    task.cancel()
    await asyncio.wait({task})
    assert len(looked) == 3


async def test_replacing_the_policy_keeps_what_is_known_of_unchanged_rules():
    """A new rule starts afresh; the mode changes at once, and an event says so."""
    core = await grown()
    await core.tick()
    core.governor.replace_policy([DEVICE, replace(HOST, name="host")], "observe", "policy changed: by test")
    device, host = core.governor.status().rules
    assert (device.phase, host.phase, core.governor.status().mode) == ("above", "below", "observe")
    core.governor.replace_policy([replace(DEVICE, high_water=0.94)], "act", "again")
    assert core.governor.status().rules[0].phase == "below"
    assert "policy changed: by test" in core.summaries("policy")


async def test_the_status_shows_the_most_urgent_rule():
    """And each rule's value, times and worn-out remedies in Unix time."""
    core = await grown()
    core.governor.replace_policy([replace(HOST, name="host"), DEVICE], "act", "both")
    await core.poller.poll()
    status = core.governor.status()
    assert (status.state, [rule.phase for rule in status.rules]) == ("below", ["below", "below"])
    assert [rule.value for rule in status.rules] == [0.25, USED_AFTER / TOTAL]


# --- the operators' side ---


async def test_reclaim_runs_in_order_and_tells_before_and_after():
    """Each with the readings around it."""
    core = await grown()
    first, second = await core.governor.reclaim(["reset_encoder_cache", "release"], mode="safe", dry_run=False)
    assert resets(core) == ["/reset_encoder_cache", "release", "release"]
    assert (first.before[0].used_bytes, first.after[0].used_bytes) == (USED_AFTER, USED_READY - CACHED)
    assert first.result.freed_bytes == ENCODER_BYTES + 2 * CACHED
    assert (second.before[0].used_bytes, second.result.freed_bytes) == (USED_READY - CACHED, 0)
    assert core.counted.remedies == [("reset_encoder_cache", "reclaim", "done"), ("release", "reclaim", "done")]


async def test_a_dry_run_does_nothing():
    """It tells what would be refused, and leaves neither event nor count."""
    core = await grown(version="0.12.0")
    events = core.summaries()
    would, would_not = await core.governor.reclaim(["release", "reset_encoder_cache"], mode="safe", dry_run=True)
    assert (would.result.outcome, would.result.reason) == ("observed", "dry run")
    assert would_not.result.outcome == "refused"
    assert (resets(core), core.summaries(), core.counted.remedies) == ([], events, [])


async def test_an_unknown_remedy_is_named_before_anything_is_done():
    """Not after half of the list."""
    core = await grown()
    with pytest.raises(UnknownName, match="'reboot' is not known; allowed: release, reset_encoder_cache"):
        await core.governor.reclaim(["release", "reboot"], mode="now", dry_run=False)
    assert resets(core) == []


async def test_a_drop_in_does_what_vllm_does_and_no_more():
    """Query string and all; no release after it, and so the allocator keeps the bytes: that is told."""
    core = await grown()
    measured = await core.governor.drop_in("reset_encoder_cache", query="x=1", mode="now", force=False)
    assert resets(core) == ["/reset_encoder_cache"]
    assert core.fake.asked("/reset_encoder_cache")[0].query == "x=1"
    assert measured.answer is not None
    assert measured.result.freed_bytes == 0
    assert measured.result.freed_components.encoder_cache_bytes == ENCODER_BYTES
    assert measured.result.freed_components.torch_cached_bytes == -ENCODER_BYTES


async def test_reset_mm_cache_frees_nothing_on_the_device():
    """The story's finding, told in the answer."""
    core = await grown()
    result = (await core.governor.drop_in("reset_mm_cache", query="", mode="now", force=False)).result
    assert (result.outcome, result.freed_bytes) == ("done", 0)
    assert "device memory" in result.spares


async def test_a_drop_in_that_hangs_the_engine_is_refused_under_traffic():
    """0.12 with a request under way: refused and recorded; force is the operator's own word."""
    core = await grown(version="0.12.0")
    core.fake.running = 1
    with pytest.raises(Refused, match="can hang for ever"):
        await core.governor.drop_in("reset_mm_cache", query="", mode="now", force=False)
    assert resets(core) == []
    assert core.counted.remedies == [("reset_mm_cache", "drop-in", "refused")]
    await core.governor.drop_in("reset_mm_cache", query="", mode="now", force=True)
    assert resets(core) == ["/reset_mm_cache"]


async def test_refusals_look_at_the_engine_of_now():
    """A request that came since the last poll counts, and were that just before."""
    core = await grown(version="0.12.0")
    await core.poller.poll()
    core.fake.running = 1
    with pytest.raises(Refused):
        await core.governor.drop_in("reset_mm_cache", query="", mode="now", force=False)


async def test_an_engine_that_is_down_is_not_available():
    """503 at the door, and a failed reset in the events."""
    core = await grown()
    core.fake.down = True
    with pytest.raises(NotAvailable, match="the engine is down"):
        await core.governor.drop_in("reset_mm_cache", query="", mode="now", force=False)
    assert core.counted.remedies == [("reset_mm_cache", "drop-in", "failed")]
    assert core.summaries("reset")[0].startswith("reset_mm_cache failed: the engine is down")


async def test_an_engine_that_goes_in_the_middle_leaves_no_numbers():
    """What was freed is not known then: None, never 0."""
    core = await grown()
    core.fake.late = {"/reset_mm_cache"}
    measured = await core.governor.drop_in("reset_mm_cache", query="", mode="now", force=False)
    assert (measured.result.outcome, measured.answer) == ("failed", None)
    assert "no answer in time" in (measured.result.reason or "")


async def test_operator_and_policy_never_act_at_once():
    """While an operator's remedy runs the policy decides nothing; its effect comes first."""
    core = await grown()
    await core.poller.poll()
    core.engine._rpc_deadline = 60.0
    core.fake.hang = asyncio.Event()
    operator = asyncio.create_task(core.governor.reclaim(["release"], mode="safe", dry_run=False))
    for _ in range(100):
        await asyncio.sleep(0)
    assert core.fake.ops()[-1] == "release"
    await core.governor.consider()
    assert core.governor.status().state == "below"
    core.fake.hang.set()
    await operator
    assert core.counted.remedies == [("release", "reclaim", "done")]


async def test_a_reading_from_just_before_serves_as_the_one_before():
    """On the policy's behalf the engine's step is not held up for what is known already."""
    core = await grown()
    await core.tick()
    assert core.fake.ops() == ["memory", "memory", "release", "memory"]


async def test_two_operators_take_turns():
    """One remedy at a time: every measurement is one remedy's own."""
    core = await grown()
    results = await asyncio.gather(*(core.governor.reclaim(["release"], mode="safe", dry_run=False) for _ in range(3)))
    assert sorted(measured.result.freed_bytes for (measured,) in results) == [0, 0, 2 * CACHED]


async def test_use_that_grew_meanwhile_is_not_called_freed(monkeypatch):
    """Traffic took more than the remedy gave back: negative, and said in words."""
    core = await grown()
    release = core.governor.remedies["release"]

    class Busy:
        def __getattr__(self, name):
            return getattr(release, name)

        async def run(self, engine, query=""):
            core.fake.serve_images(1)
            return await release.run(engine, query)

    for worker in core.fake.workers:
        worker.cached = 0
    monkeypatch.setattr(core.governor, "remedies", {"release": Busy()})
    (measured,) = await core.governor.reclaim(["release"], mode="safe", dry_run=False)
    assert measured.result.freed_bytes == -2 * IMAGE_BYTES
    assert "while use grew by 244.0 MiB" in core.summaries("reset")[0]


def test_every_remedy_that_a_rule_may_name_can_be_carried_out():
    """Rules are validated against the table; the governor knows all of it."""
    names = {remedy.name for remedy in REMEDIES}
    assert {name for allowed in SIGNAL_REMEDIES.values() for name in allowed} <= names


class Stand(Release):
    """`release`, with another run."""

    def __init__(self, run) -> None:
        self.run = run


async def test_a_reset_that_nobody_could_measure_says_so():
    """Done, as the engine said; but what it freed is not known, and never 0."""
    core = core_on(rules=[DEVICE])
    await core.tick()

    async def run_and_fall_silent(engine, query=""):
        core.fake.down = True
        return Run(ok=True)

    core.governor.remedies = {"release": Stand(run_and_fall_silent)}
    (measured,) = await core.governor.reclaim(["release"], mode="now", dry_run=False)
    assert (measured.result.outcome, measured.result.freed_bytes, measured.result.ranks) == ("done", None, ())
    assert "not measured" in measured.result.reason
