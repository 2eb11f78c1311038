"""The policy's side: what is done without being asked, and what of it is told."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from app.errors import NotAvailable
from app.policy import HOUR_SECONDS, SIGNAL_REMEDIES, Rule
from app.readings import RankFreed
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
TRIM = replace(DEVICE, remedies=SIGNAL_REMEDIES["device_used_ratio"])
FLAT = replace(DEVICE, signal="encoder_cache_bytes", high_water=MIB, low_water=0, remedies=("release",))


async def grown(rule: Rule = DEVICE, version: str = "0.32.0", **knobs) -> Core:
    """A core that has seen the engine ready; then the benchmark came, and nobody has polled since."""
    core = core_on(version, rules=[rule], **knobs)
    await core.tick()
    core.fake.serve_images()
    core.clock.advance(0.5)
    return core


def phases(core: Core) -> list[str]:
    return [summary.partition(" at ")[0].partition(": ")[2] for summary in core.summaries("policy")]


async def test_below_high_water_nothing_is_done():
    """57,766 MiB are the engine's own."""
    core = core_on(rules=[DEVICE])
    await core.tick()
    assert (core.fake.resets(), core.summaries("reset"), core.governor.status().state) == ([], [], "below")


async def test_the_ladder_climbs_until_low_water():
    """Release first, as it costs nothing; not enough, so the encoder cache, and release after it for the device."""
    core = await grown()
    await core.tick()
    assert core.fake.resets() == ["release"]
    await core.tick()
    assert core.fake.resets() == ["release", "/reset_encoder_cache", "release"]
    assert phases(core) == ["below -> acting", "acting -> above", "above -> acting", "acting -> cooling"]
    assert core.poller.current().ranks[0].used_bytes == USED_READY - CACHED


async def test_only_what_is_needed_is_spilled():
    """A trim comes before the reset, with what is missing to low water; then there is no need of a reset."""
    core = await grown(TRIM)
    await core.tick()
    missing = core.poller.current().ranks[0].used_bytes - int(TRIM.low_water * TOTAL)
    await core.tick()
    assert core.fake.resets() == ["release", "trim", "release"]
    (trim,) = [call for call in core.fake.calls if call.op == "trim"]
    assert json.loads(json.loads(trim.body)["args"][1]) == {"free_bytes": missing}
    spilled = -(-missing // IMAGE_BYTES)
    assert [(len(w.spilled), len(w.entries)) for w in core.fake.workers] == [(spilled, IMAGES - spilled)] * 2
    assert core.governor.status().state == "cooling"


async def test_a_cache_rule_trims_to_low_water():
    """On every rank the same."""
    low = 10 * IMAGE_BYTES + 5
    rule = replace(TRIM, signal="encoder_cache_bytes", high_water=20 * IMAGE_BYTES, low_water=low)
    core = await grown(replace(rule, remedies=SIGNAL_REMEDIES["encoder_cache_bytes"]))
    await core.tick()
    assert [len(worker.entries) for worker in core.fake.workers] == [10, 10]
    assert (core.fake.resets(), core.governor.status().state) == (["trim", "release"], "cooling")


async def test_a_remedy_that_helps_the_wrong_rank_is_worn_out():
    """Rank 0 gives back what rank 1, the fullest, needs."""
    core = await grown(replace(DEVICE, remedies=("release",)))
    core.fake.workers[1].cached = 0
    core.fake.workers[1].entries["more"] = 2 * CACHED
    await core.tick()
    (release,) = core.governor.status().rules[0].remedies
    assert (release.futile, release.last_outcome, release.last_freed_bytes) == (True, "done", CACHED)
    assert release.last_freed_ranks == (
        RankFreed(rank=0, dp_rank=0, freed_bytes=CACHED),
        RankFreed(rank=1, dp_rank=0, freed_bytes=0),
    )


async def test_the_status_tells_how_each_remedy_went():
    """When it ran, what came of it and why, and when it may run again, in Unix time."""
    core = await grown(replace(DEVICE, remedies=("release", "reset_encoder_cache")), "0.12.0")
    await core.tick()
    ran_at = core.clock.now
    await core.tick()
    release, reset = core.governor.status().rules[0].remedies
    assert (release.futile, release.last_run_at, release.retry_at) == (False, ran_at, ran_at + 60)
    assert (reset.futile, reset.last_outcome, reset.retry_at) == (True, "refused", core.clock.now + 60)
    assert "this engine has no /reset_encoder_cache" in (reset.last_reason or "")
    assert (reset.last_freed_bytes, reset.last_freed_ranks) == (None, ())
    core.clock.advance(60)
    await core.poller.poll()
    assert [remedy.retry_at for remedy in core.governor.status().rules[0].remedies] == [None, None]


async def test_while_a_rule_cools_none_of_its_remedies_may_run(monkeypatch):
    """Not the one that ran, and not the others either."""
    core = await grown(replace(DEVICE, low_water=0.92, remedies=("reset_encoder_cache", "release")))
    await core.tick()
    (rule,) = core.governor.status().rules
    assert (rule.phase, [remedy.retry_at for remedy in rule.remedies]) == ("cooling", [core.clock.now + 60] * 2)


# --- the budget ---


async def with_budget(most: int, **knobs) -> Core:
    """A core whose one remedy helps, never enough, and rests for a second only; with so many actions an hour."""
    rule = replace(FLAT, remedies=("reset_encoder_cache",), cooldown_seconds=1.0)
    core = await grown(rule, **knobs)
    core.governor.max_actions_per_hour = most
    return core


async def more(core: Core, seconds: float = 2.0) -> None:
    core.fake.serve_images(1)
    await core.tick(seconds)


async def test_a_used_up_budget_stops_the_policy_and_is_told_once():
    """Until the oldest of the hour has left it; an event is no alarm clock that rings with every poll."""
    core = await with_budget(2)
    core.wall.set_by = 5000.0
    first_at = core.clock.now + 2 + 5000
    for _ in range(6):
        await more(core)
    assert core.fake.resets().count("/reset_encoder_cache") == 2
    budget = core.governor.status().budget
    assert budget is not None
    assert (budget.max_actions_per_hour, budget.started_last_hour, budget.used_up) == (2, 2, True)
    assert budget.until == pytest.approx(first_at + HOUR_SECONDS)
    (told,) = [summary for summary in core.summaries("policy") if "budget" in summary]
    assert told.startswith(
        "the budget of 2 actions an hour is used up: reset_encoder_cache must wait; the next may start"
    )
    await more(core, HOUR_SECONDS)
    assert core.fake.resets().count("/reset_encoder_cache") == 3


async def test_without_any_budget_nothing_is_ever_done():
    """And no time is told at which it would be."""
    core = await with_budget(0)
    await more(core)
    budget = core.governor.status().budget
    assert budget is not None
    assert (core.fake.resets(), budget.used_up, budget.until) == ([], True, None)
    assert "none is allowed" in next(summary for summary in core.summaries("policy") if "budget" in summary)


async def test_what_was_only_observed_is_counted_apart():
    """Observe shows what act would do, budget and all; acting then has its own."""
    core = await with_budget(1, mode="observe")
    await more(core)
    await more(core)
    assert core.counted.remedies == [("reset_encoder_cache", "policy", "observed")]
    core.governor.replace_policy(core.governor.rules, "act", "now in earnest")
    await more(core)
    assert core.counted.remedies[1:] == [("reset_encoder_cache", "policy", "done")]


@pytest.mark.parametrize("why", ["refused", "the engine is gone"])
async def test_what_was_not_started_is_not_counted(why, monkeypatch):
    """Nothing was done to the engine, and no request waited."""
    core = await with_budget(1, version="0.12.0")
    if why != "refused":

        async def gone(*args, **kwargs):
            raise NotAvailable(why)

        monkeypatch.setattr(core.relief, "for_rule", gone)
    await more(core)
    (reset,) = core.governor.status().rules[0].remedies
    assert (reset.last_outcome, reset.futile) == ("refused" if why == "refused" else "failed", True)
    budget = core.governor.status().budget
    assert budget is not None
    assert budget.started_last_hour == 0


async def test_the_budget_outlives_a_change_of_policy():
    """Or a change would be a way around it; a larger one counts at once."""
    core = await with_budget(1)
    await more(core)
    core.governor.replace_policy(core.governor.rules, "act", "the same")
    await more(core)
    assert core.fake.resets().count("/reset_encoder_cache") == 1
    core.governor.replace_policy(core.governor.rules, "act", "one more", max_actions_per_hour=2)
    await more(core)
    assert core.fake.resets().count("/reset_encoder_cache") == 2


# --- measuring, cooling, observing ---


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
    done = core.fake.resets()
    core.fake.serve_images(120)
    await core.tick(59.0)
    assert (core.fake.resets(), core.governor.status().state) == (done, "cooling")
    await core.tick(2.0)
    assert core.fake.resets() == [*done, "release"]


async def test_observe_decides_and_does_nothing():
    """Recorded and counted as observed; the engine is told nothing."""
    core = await grown(mode="observe")
    await core.tick()
    await core.tick()
    assert core.fake.resets() == []
    assert core.counted.remedies == [("release", "policy", "observed"), ("reset_encoder_cache", "policy", "observed")]
    assert core.summaries("reset")[0] == "release observed: the policy is in observe mode"


@pytest.mark.parametrize("state", ["stale", "busy", "gone", "sleeping"])
async def test_no_fresh_report_no_action(state):
    """The policy fails closed."""
    core = await grown()
    await core.poller.poll()
    if state == "stale":
        core.clock.advance(11.0)
    elif state == "busy":
        core.fake.hang = asyncio.Event()
        await core.poller.poll()
    else:
        core.fake.down, core.fake.asleep = state == "gone", state == "sleeping"
        await core.poller.poll()
    await core.governor.consider()
    assert core.fake.resets() == []
    assert core.governor.status().rules[0].value is None
    await core.engine.aclose()


async def test_a_paused_engine_may_be_relieved():
    """Its requests wait; its memory is as full."""
    core = await grown()
    core.fake.paused = True
    await core.tick()
    assert core.fake.resets() == ["release"]


async def test_what_frees_too_little_is_futile():
    """Release cannot lower the encoder cache: tried once, then left, and said so."""
    core = await grown(FLAT)
    for _ in range(5):
        await core.tick(5.0)
    assert core.fake.resets() == ["release"]
    (rule,) = core.governor.status().rules
    assert (rule.phase, core.governor.status().state) == ("futile", "futile")
    assert (rule.remedies[0].futile, rule.remedies[0].last_freed_bytes) == (True, 0)


async def test_a_futile_remedy_comes_back_after_its_backoff():
    """A minute, then two."""
    core = await grown(FLAT)
    await core.tick()
    await core.tick(61.0)
    assert core.fake.resets() == ["release"] * 2
    await core.tick(61.0)
    assert core.fake.resets() == ["release"] * 2
    await core.tick(60.0)
    assert core.fake.resets() == ["release"] * 3


async def test_a_refused_remedy_is_recorded_and_the_next_is_tried():
    """On 0.12 there is no /reset_encoder_cache."""
    rule = replace(DEVICE, remedies=("reset_encoder_cache", "release"))
    core = await grown(rule, "0.12.0")
    await core.tick()
    await core.tick()
    assert core.fake.resets() == ["release"]
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
    assert core.fake.resets() == (["/reset_mm_cache"] if acts else [])
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


async def test_a_baseline_problem_goes_with_its_engine():
    """The next engine at this address takes less for itself."""
    core = core_on(rules=[replace(DEVICE, high_water=0.9, low_water=0.8)])
    await core.tick()
    assert core.governor.status().rules[0].problem is not None
    core.fake.start_again()
    for worker in core.fake.workers:
        worker.kv_cache //= 2
    await core.tick()
    assert core.governor.status().rules[0].problem is None


async def test_a_sidecar_that_comes_late_calls_no_full_cache_a_baseline():
    """What it meets is over high water, and a reset brings it down: that is the rule's own work."""
    core = core_on(rules=[DEVICE])
    core.fake.serve_images()
    await core.tick()
    assert core.governor.status().rules[0].problem is None
    assert core.summaries("baseline") == []


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


async def test_a_rule_that_was_replaced_meanwhile_is_not_judged():
    """A change while its remedy runs: the new rule of that name knows nothing, and what is gone is not tried."""
    gone = replace(DEVICE, name="gone", high_water=0.7, low_water=0.6, remedies=("reset_encoder_cache",))
    core = await grown()
    core.governor.replace_policy([DEVICE, gone], "act", "two rules")
    await core.poller.poll()
    core.engine._rpc_deadline = 60.0
    core.fake.hang = asyncio.Event()
    task = asyncio.create_task(core.governor.consider())
    for _ in range(100):
        await asyncio.sleep(0)
    assert core.governor.status().state == "acting"
    changed = replace(DEVICE, high_water=0.94)
    core.governor.replace_policy([changed], "act", "in the middle of it")
    core.fake.hang.set()
    await task
    (rule,) = core.governor.status().rules
    assert (rule.phase, [remedy.last_outcome for remedy in rule.remedies]) == ("below", [None, None])
    assert core.fake.resets() == ["release"]
