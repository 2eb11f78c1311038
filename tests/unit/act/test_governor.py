"""The policy's side: what is done without being asked, and what of it is reported."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import pytest

from highwater.act.rules import DEFAULT_RULES, SIGNAL_REMEDIES, Rule
from highwater.model.policy import RankFreed
from highwater.model.units import gib_text
from highwater.process.errors import NotAvailable, UnreachableWater
from tests.fakes.engine import CACHED, IMAGE_BYTES, IMAGES, MIB, TOTAL, USED_AFTER, USED_READY, Core, core_on

ENCODER_BYTES = 2 * IMAGES * IMAGE_BYTES
DEFAULT = DEFAULT_RULES[0]
HIGH, LOW = (TOTAL - TOTAL * 9 // 10) // 4, 2 * ((TOTAL - TOTAL * 9 // 10) // 4)
DEVICE = Rule(
    name="device",
    signal="device_used_ratio",
    high_water=0.93,
    low_water=0.85,
    remedies=("release", "reset_encoder_cache"),
)
TRIM = DEVICE.model_copy(update={"remedies": SIGNAL_REMEDIES["device_used_ratio"]})
HOST = Rule(name="host", signal="host_used_ratio", high_water=0.2, low_water=0.1, remedies=("reset_mm_cache",))


async def grown(rule: Rule = DEVICE, version: str = "0.32.0", **knobs) -> Core:
    """A core that has seen the engine ready; then the benchmark came, and nobody has polled since."""
    core = core_on(version, rules=[rule], **knobs)
    await core.tick()
    core.fake.serve_images()
    core.clock.advance(0.5)
    return core


def leave_free(core: Core, free: int, *, cached: int = 0, rank: int | None = None) -> None:
    """Fill every worker's device, or one's, with live tensors and so much reserve."""
    for worker in core.fake.workers:
        if rank in {None, worker.rank}:
            worker.cached = cached
            worker.other_tensors += worker.total - worker.used - free


# --- the default ---


@pytest.mark.parametrize("utilization", [0.90, 0.95])
async def test_the_default_waits_for_its_own_water_and_then_acts_at_once(utilization):
    core = core_on(rules=[DEFAULT])
    requested = int(TOTAL * utilization)
    for worker in core.fake.workers:
        worker.requested = requested
    slack = TOTAL - requested
    high = min(max(slack // 4, 512 * MIB), slack // 2, 2048 * MIB)
    await core.tick()
    leave_free(core, high + MIB, cached=2048 * MIB)
    await core.tick()
    assert core.fake.resets() == []
    leave_free(core, high - MIB, cached=2048 * MIB)
    await core.tick()
    assert core.fake.resets() == ["release"]
    assert core.governor.status().level == "calm"


async def test_a_new_life_is_protected_at_once():
    core = core_on(rules=[DEFAULT])
    await core.tick()
    leave_free(core, HIGH // 2 - MIB)
    for _ in range(60):
        await core.tick(60.0)
    assert (core.fake.resets(), core.governor.status().level) == ([], "urgent")
    core.fake.down = True
    await core.tick()
    core.fake.down = False
    core.fake.start_again()
    await core.tick()
    leave_free(core, HIGH - MIB, cached=4096 * MIB)
    await core.tick()
    assert core.fake.resets() == ["release"]


async def test_a_shortage_that_nothing_here_can_help_is_told_once():
    core = core_on(rules=[DEFAULT])
    await core.tick()
    leave_free(core, 256 * MIB)
    for _ in range(60):
        await core.tick(10.0)
    told = [summary for summary in core.summaries("policy") if "nothing here to give back" in summary]
    assert [summary for summary in told if summary.startswith("rule device")] == told[:1]
    assert core.fake.resets() == []
    await core.tick(3600.0)
    assert len([one for one in core.summaries("policy") if one.startswith("rule device: short by")]) == 2
    status = core.governor.status()
    assert (status.level, status.rules[0].phase) == ("urgent", "urgent")
    assert status.summary.startswith(f"short by {gib_text(LOW - 256 * MIB)} on rank 0")


async def test_more_than_an_hours_worth_of_actions_is_not_held_back():
    core = core_on(rules=[DEFAULT])
    await core.tick()
    for _ in range(70):
        leave_free(core, HIGH // 2 - MIB, cached=4096 * MIB)
        await core.tick(6.0)
    assert (len(core.fake.resets()), core.governor.status().actions_last_hour) == (70, 70)
    await core.tick(3600.0)
    assert core.governor.status().actions_last_hour == 0


async def test_the_status_of_each_rank_is_told_in_bytes():
    core = await grown(DEFAULT)
    leave_free(core, HIGH - MIB, cached=100 * MIB, rank=1)
    await core.tick()
    first, second = core.governor.status().rules[0].ranks
    assert (first.free_bytes, first.short_bytes) == (TOTAL - USED_AFTER, 0)
    assert (second.rank, second.high_free_bytes, second.low_free_bytes) == (1, HIGH, LOW)
    assert (second.free_bytes, second.short_bytes) == (HIGH - MIB, LOW - HIGH + MIB)
    assert second.can_release_bytes == 100 * MIB


async def test_with_old_vllm_ascend_the_encoder_cache_is_trimmed_before_it_is_urgent():
    """Up to 0.12 its outputs were never part of the plan; later ones count on them."""
    for version, resets in (("0.12.0", ["trim", "release"]), ("0.32.0", [])):
        core = core_on(version, rules=[DEFAULT])
        await core.tick()
        core.fake.serve_images()
        leave_free(core, HIGH - MIB)
        await core.tick()
        assert core.fake.resets() == resets


async def test_an_engine_that_cannot_be_acted_on_is_observed_and_says_so_once():
    core = core_on(rules=[DEFAULT])
    await core.tick()
    core.poller._rounds.detection.capabilities = replace(
        core.poller.capabilities, collective_rpc=False, reset_encoder_cache=False, dev_mode=False
    )
    for _ in range(5):
        await core.governor.consider()
    told = [summary for summary in core.summaries("policy") if "only observe" in summary]
    assert len(told) == 1
    assert "VLLM_SERVER_DEV_MODE=1" in told[0]


async def test_before_the_engine_answers_nothing_is_said_of_what_it_cannot_do(monkeypatch):
    core = core_on(rules=[DEFAULT])
    await core.tick()
    core.poller._rounds.detection.capabilities = replace(core.poller.capabilities, collective_rpc=False, dev_mode=False)
    loading = core.poller.current()
    loading = replace(loading, engine=replace(loading.engine, state="starting"))
    monkeypatch.setattr(core.poller, "current", lambda: loading)
    await core.governor.consider()
    assert not [summary for summary in core.summaries("policy") if "only observe" in summary]


# --- how closely it looks ---


async def test_the_tighter_it_is_the_closer_it_looks():
    """Five looks a second while less than low water is free; else the poller's own pace."""
    core = core_on(rules=[DEFAULT])
    report = await core.tick()
    assert core.governor.poll_interval(report) == math.inf
    leave_free(core, LOW - MIB)
    assert core.governor.poll_interval(await core.tick(600.0)) == 0.2
    leave_free(core, LOW + MIB)
    assert core.governor.poll_interval(await core.tick(600.0)) == math.inf


async def test_a_device_that_fills_fast_is_looked_at_closely():
    core = core_on(rules=[DEFAULT])
    core.governor.poll_interval(await core.tick())
    leave_free(core, 4096 * MIB)
    report = await core.tick()
    assert core.governor.poll_interval(report) == 0.2
    assert core.governor.poll_interval(report) == 0.2
    assert core.governor.poll_interval(await core.tick()) == math.inf


# --- an operator's rules ---


async def test_the_ladder_climbs_until_low_water():
    core = await grown()
    await core.tick()
    assert core.fake.resets() == ["release"]
    await core.tick()
    assert core.fake.resets() == ["release", "/reset_encoder_cache", "release"]
    assert core.poller.current().ranks[0].used_bytes == USED_READY - CACHED
    assert core.counted.actions == [("device", "release", "done"), ("device", "reset_encoder_cache", "done")]


async def test_only_what_is_needed_is_spilled():
    core = await grown(TRIM)
    await core.tick()
    missing = (core.poller.current().ranks[0].used_bytes or 0) - TRIM_LOW
    await core.tick()
    assert core.fake.resets() == ["release", "trim", "release"]
    (trim,) = [call for call in core.fake.calls if call.op == "trim"]
    asked = json.loads(json.loads(trim.body)["args"][1])["free_bytes"]
    assert asked == pytest.approx(missing, abs=1)
    spilled = -(-missing // IMAGE_BYTES)
    assert [(len(w.spilled), len(w.entries)) for w in core.fake.workers] == [(spilled, IMAGES - spilled)] * 2


TRIM_LOW = int(0.85 * TOTAL)


async def test_a_remedy_that_helps_the_wrong_rank_is_ineffective():
    """Rank 0 gives back what rank 1, the fullest, needs: the worker's word was wrong, and is not believed again."""
    core = await grown(DEVICE.model_copy(update={"remedies": ("release",)}))
    core.fake.workers[0].entries.clear()
    core.fake.workers[1].entries["more"] = CACHED // 2
    core.fake.workers[1].release = dict  # type: ignore[method-assign]
    for _ in range(60):
        await core.tick(10.0)
    assert core.counted.actions == [("device", "release", "ineffective")]
    (release,) = core.governor.status().rules[0].remedies
    assert release.last_freed_ranks[1] == RankFreed(rank=1, dp_rank=0, freed_bytes=0)
    assert release.last_outcome == "ineffective"


async def test_the_status_tells_how_each_remedy_went():
    core = await grown(DEVICE, "0.12.0")
    await core.tick()
    release, reset = core.governor.status().rules[0].remedies
    assert (release.last_outcome, release.last_run_at, release.last_freed_bytes) == ("done", core.clock.now, 2 * CACHED)
    assert (reset.last_outcome, reset.last_run_at) == (None, None)
    assert "this engine has no /reset_encoder_cache" in (reset.unavailable or "")
    await core.tick()
    assert (core.governor.status().rules[0].phase, core.fake.resets()) == ("calm", ["release"])


async def test_observe_decides_and_does_nothing():
    core = await grown(mode="observe")
    for _ in range(60):
        await core.tick(10.0)
    assert core.fake.resets() == []
    assert core.counted.actions == [("device", "release", "observed"), ("device", "reset_encoder_cache", "observed")]
    assert core.summaries("reset")[0] == (
        "release observed: the policy is in observe mode; why: short by 5.25 GiB on rank 0"
    )
    assert core.governor.status().actions_last_hour == 0
    core.governor.replace_policy(core.governor.rules, "act", "now in earnest")
    await core.tick()
    assert core.fake.resets() == ["release"]


@pytest.mark.parametrize("state", ["stale", "not answering", "down", "sleeping"])
async def test_no_fresh_report_no_action(state):
    core = await grown()
    await core.poller.poll()
    if state == "stale":
        core.clock.advance(11.1)
    elif state == "not answering":
        core.fake.hang = asyncio.Event()
        await core.poller.poll()
    else:
        core.fake.down, core.fake.asleep = state == "down", state == "sleeping"
        await core.poller.poll()
    await core.governor.consider()
    assert core.fake.resets() == []
    rule = core.governor.status().rules[0]
    assert (rule.phase, rule.value) == ("held", None)
    assert core.governor.status().level == ("held" if state == "sleeping" else "unknown")
    await core.engine.aclose()


async def test_a_paused_engine_may_be_relieved():
    core = await grown()
    core.fake.paused = True
    await core.tick()
    assert core.fake.resets() == ["release"]


@pytest.mark.parametrize(
    ("version", "acts"), [("0.12.0", False), ("0.27.0", False), ("0.28.0", True), ("0.32.0", True)]
)
async def test_reset_mm_cache_is_automatic_only_where_it_heals_itself(version, acts):
    """Before 0.28 it fails requests, or hangs the engine; then the policy leaves it alone."""
    core = core_on(version, rules=[HOST.model_copy(update={"low_water": 0.0})])
    core.fake.workers[0].host_used = core.fake.workers[1].host_used = 0
    await core.tick()
    for worker in core.fake.workers:
        worker.host_used = worker.host_limit // 2
    await core.tick()
    assert core.fake.resets() == (["/reset_mm_cache"] if acts else [])


async def test_host_rules_are_judged_by_host_memory():
    core = core_on(rules=[HOST])
    for worker in core.fake.workers:
        worker.host_used = 0
    await core.tick()
    for worker in core.fake.workers:
        worker.host_used = worker.host_limit // 2
    await core.tick()
    (rule,) = core.governor.status().rules
    assert rule.remedies[0].last_freed_bytes == 1024 * MIB


def test_the_default_has_no_rule_for_the_host():
    assert [rule.signal for rule in DEFAULT_RULES] == ["device_free_bytes"]
    assert "reset_mm_cache" not in DEFAULT.remedies


# --- waters that cannot be reached ---

BETWEEN = DEVICE.model_copy(update={"high_water": 0.86, "low_water": 0.80})


@pytest.mark.parametrize(("high", "low"), [(0.86, 0.80), (0.5, 0.4)])
async def test_a_rule_under_the_engine_s_rest_is_held_and_told_once(high, low):
    """Also where only low water lies there: one crossing would make it act without end."""
    core = core_on(rules=[DEVICE.model_copy(update={"high_water": high, "low_water": low})])
    for _ in range(5):
        await core.tick()
    core.fake.serve_images()
    for _ in range(60):
        await core.tick(10.0)
    assert core.fake.resets() == []
    told = [summary for summary in core.summaries("policy") if "cannot be reached" in summary]
    assert len(told) == 1
    rule = core.governor.status().rules[0]
    assert (rule.phase, rule.reason) == ("held", told[0].removeprefix("rule device: "))
    assert rule.is_dormant
    core.fake.asleep = True
    await core.tick()
    assert not core.governor.status().rules[0].is_dormant, "asleep, and held for that reason alone"


async def test_a_rule_under_the_engine_s_rest_is_refused():
    core = core_on(rules=[DEVICE])
    await core.tick()
    core.governor.check([DEVICE])
    with pytest.raises(UnreachableWater, match=r"device\.low_water: 0\.8 of device_used_ratio cannot be reached") as no:
        core.governor.check([BETWEEN])
    assert "Set low_water to 0.83 or more" in str(no.value)


async def test_a_held_rule_goes_free_with_the_engine_that_held_it():
    core = core_on(rules=[BETWEEN])
    await core.tick()
    assert core.governor.status().rules[0].phase == "held"
    core.fake.start_again()
    for worker in core.fake.workers:
        worker.kv_cache //= 2
    await core.tick()
    assert core.governor.status().rules[0].phase == "calm"


async def test_a_sidecar_that_comes_late_takes_no_full_cache_for_rest():
    core = core_on(rules=[DEVICE])
    core.fake.serve_images()
    await core.tick()
    assert core.fake.resets() == ["release"]
    assert core.governor.status().rules[0].phase != "held"


# --- what goes wrong ---


async def test_an_engine_that_goes_during_a_reset_is_a_failed_reset():
    core = await grown()
    await core.poller.poll()
    core.fake.breaks = True
    await core.governor.consider()
    assert core.counted.actions == [("device", "release", "failed")]
    assert core.governor.status().rules[0].phase != "acting"
    assert core.summaries("reset")[0].startswith("release failed: worker call release")


async def test_an_engine_that_is_gone_before_a_remedy_is_a_failed_one(monkeypatch):
    core = await grown()

    async def gone(*args, **kwargs):
        raise NotAvailable("the engine is gone")

    monkeypatch.setattr(core.relief, "for_rule", gone)
    for _ in range(59):
        await core.tick()
    assert core.counted.actions == [("device", "release", "failed"), ("device", "reset_encoder_cache", "failed")]
    assert core.governor.status().rules[0].remedies[0].last_reason == "the engine is gone"


async def test_a_cancelled_reset_does_not_leave_the_rule_acting():
    core = await grown()
    await core.poller.poll()
    core.engine.rpc_deadline_seconds = 60.0
    core.fake.hang = asyncio.Event()
    task = asyncio.create_task(core.governor.consider())
    for _ in range(100):
        await asyncio.sleep(0)
    assert core.governor.status().rules[0].phase == "acting"
    assert "giving back: release runs, " in (core.governor.status().rules[0].reason or "")
    task.cancel()
    await asyncio.wait({task})
    assert core.governor.status().rules[0].phase != "acting"
    await core.engine.aclose()


async def test_one_odd_report_does_not_end_the_watch(monkeypatch):
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


# --- changing ---


async def test_replacing_the_policy_keeps_what_is_known_of_unchanged_rules():
    core = await grown(DEVICE.model_copy(update={"remedies": ("release",)}))
    await core.tick()
    await core.tick()
    unchanged = core.governor.rules[0]
    core.governor.replace_policy([unchanged, HOST], "act", "policy changed: by test")
    device, _ = core.governor.status().rules
    assert device.remedies[0].last_outcome == "done"
    assert "policy changed: by test" in core.summaries("policy")
    core.governor.replace_policy([unchanged.model_copy(update={"high_water": 0.94})], "act", "again")
    assert core.governor.status().rules[0].remedies[0].last_outcome is None


async def test_the_level_is_that_of_the_rule_that_is_worst_off():
    core = await grown()
    core.governor.replace_policy([DEFAULT, DEVICE], "act", "both")
    await core.poller.poll()
    status = core.governor.status()
    assert (status.level, [rule.phase for rule in status.rules]) == ("short", ["calm", "short"])
    assert [rule.value for rule in status.rules] == [TOTAL - USED_AFTER, USED_AFTER / TOTAL]


async def test_an_engine_that_is_gone_is_not_called_calm():
    core = core_on(rules=[DEFAULT], mode="observe")
    await core.tick()
    leave_free(core, HIGH - 100 * MIB)
    await core.tick()
    core.fake.down = True
    core.clock.advance(60)
    await core.tick()
    told = [event.summary for event in core.history.events() if event.summary.startswith("memory: ")]
    assert core.governor.status().level in {"held", "unknown"}
    assert [summary.split(": ")[1] for summary in told] == ["fine -> short"]


async def test_a_rule_that_was_replaced_meanwhile_is_not_judged():
    core = await grown()
    await core.poller.poll()
    core.engine.rpc_deadline_seconds = 60.0
    core.fake.hang = asyncio.Event()
    task = asyncio.create_task(core.governor.consider())
    for _ in range(100):
        await asyncio.sleep(0)
    assert core.governor.status().rules[0].phase == "acting"
    core.governor.replace_policy([DEVICE.model_copy(update={"high_water": 0.94})], "act", "in the middle of it")
    core.fake.hang.set()
    await task
    (rule,) = core.governor.status().rules
    assert [remedy.last_outcome for remedy in rule.remedies] == [None, None]
    assert core.fake.resets() == ["release"]


# --- what it says of its acts ---


async def test_a_wave_that_is_given_back_each_time_is_no_cooldown():
    """Whatever is asked while it acts or after: never that a relief did not reach low water that has."""
    core = core_on(rules=[DEFAULT])
    core.fake.running = 1
    await core.tick()
    said = []
    poll = core.poller.poll

    async def looked_at(**options):
        said.append(core.governor.status().rules[0])
        return await poll(**options)

    core.poller.poll = looked_at
    for _ in range(4):
        leave_free(core, LOW + 1024 * MIB, cached=6 * 1024 * MIB)
        await core.tick(14.0)
        leave_free(core, HIGH - MIB, cached=6 * 1024 * MIB)
        await core.tick(2.0)
        said.append(core.governor.status().rules[0])
    status = core.governor.status()
    assert not any("did not reach" in (rule.reason or "") or rule.phase == "resting" for rule in said)
    assert [(act.outcome, act.reached, round(act.at)) for act in status.acts] == [
        ("done", True, round(status.acts[0].at - 16.0 * number)) for number in range(4)
    ]
    assert all(act.why.startswith("short by ") and act.freed_bytes for act in status.acts)


async def test_the_last_act_stays_when_it_is_long_ago():
    core = await grown()
    await core.tick()
    assert core.governor.status().acts[0].why == "short by 5.25 GiB on rank 0"
    core.fake.down = True
    await core.tick(7200.0)
    (last,) = core.governor.status().acts
    assert (last.remedy, core.governor.status().actions_last_hour) == ("release", 0)


async def test_the_reason_stands_in_the_event_and_while_it_runs():
    core = await grown()
    seen: list[tuple[str, str | None, str | None]] = []
    release = core.engine.rpc

    async def slow(*arguments, **options):
        if (running := core.relief.now) is not None:
            seen.append((running.text, running.why, core.governor.status().rules[0].reason))
        return await release(*arguments, **options)

    core.engine.rpc = slow
    await core.tick()
    why = "short by 5.25 GiB on rank 0"
    event = next(one for one in core.history.events() if one.kind == "reset")
    assert (event.why, event.summary.endswith(f"; why: {why}")) == (why, True)
    assert ("giving back: release runs, 0 s", why, f"giving back: release runs, 0 s: {why}") in seen
    assert core.relief.now is None
