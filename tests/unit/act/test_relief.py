"""Act, measure, record: what relief says to the engine, and what it tells of it, on operators' behalf."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from highwater.act.quiescer import States
from highwater.act.relief import RemedyRequest
from highwater.act.remedies import REMEDIES, Release, RunResult
from highwater.model.remedies import TRAITS, RemedyResult, Target
from highwater.model.units import MIB
from highwater.process.errors import NotAvailable, Refused, UnknownName
from tests.fakes.engine import CACHED, IMAGE_BYTES, IMAGES, USED_AFTER, USED_READY, Core, core_on

ENCODER_BYTES = 2 * IMAGES * IMAGE_BYTES


async def grown(version: str = "0.32.0", **knobs) -> Core:
    """A core that has seen the engine ready; then the benchmark came, and nobody has polled since."""
    core = core_on(version, **knobs)
    await core.tick()
    core.fake.serve_images()
    core.clock.advance(0.5)
    return core


def requests(*names: str) -> list[RemedyRequest]:
    return [RemedyRequest(name) for name in names]


async def test_reclaim_runs_in_order_and_tells_before_and_after():
    core = await grown()
    first, second = await core.relief.reclaim(requests("reset_encoder_cache", "release"), mode="safe", dry_run=False)
    assert core.fake.resets() == ["/reset_encoder_cache", "release", "release"]
    assert (first.before[0].used_bytes, first.after[0].used_bytes) == (USED_AFTER, USED_READY - CACHED)
    assert first.result.freed_bytes == ENCODER_BYTES + 2 * CACHED
    assert (second.before[0].used_bytes, second.result.freed_bytes) == (USED_READY - CACHED, 0)
    assert core.counted.remedies == [("reset_encoder_cache", "reclaim", "done"), ("release", "reclaim", "done")]


async def test_the_result_of_a_remedy_that_ran_is_kept_when_the_engine_is_lost_before_the_next_one():
    core = await grown()
    core.fake.on_reset = lambda: setattr(core.fake, "breaks", True)
    names = "reset_prefix_cache", "release"
    outcomes = await core.relief.reclaim(requests(*names), mode="now", dry_run=False)
    assert [each.result.outcome for each in outcomes] == ["done", "failed"]
    assert "worker call memory: ReadError" in (outcomes[1].result.reason or "")
    assert core.counted.remedies == [(names[0], "reclaim", "done"), (names[1], "reclaim", "failed")]
    with pytest.raises(NotAvailable):
        await core.relief.reclaim(requests("release", "reset_prefix_cache"), mode="now", dry_run=False)


async def test_a_release_while_asleep_is_an_operators_alone_and_its_effect_is_measured():
    core = await grown()
    core.fake.asleep = True
    await core.tick()
    (found,) = await core.relief.reclaim(requests("release"), mode="safe", dry_run=False)
    assert (found.result.outcome, found.result.freed_bytes) == ("done", 2 * CACHED)
    by_rule = await core.relief.for_rule("device", "release", why="short by 1 GiB on rank 0")
    assert by_rule.result.outcome == "refused"
    assert "rules leave it alone" in (by_rule.result.reason or "")
    assert "rules leave it alone" in (core.relief.unavailable("release", core.poller.current().engine) or "")
    assert core.fake.resets() == ["release"]


async def test_a_dry_run_does_nothing():
    core = await grown(version="0.12.0")
    events = core.summaries()
    would, would_not = await core.relief.reclaim(requests("release", "reset_encoder_cache"), mode="safe", dry_run=True)
    words = "could give back 5.22 GiB; no request has to wait for it"
    assert (would.result.outcome, would.result.would, would.result.reason) == ("observed", words, f"dry run; {words}")
    assert would_not.result.would is None
    assert would_not.result.outcome == "refused"
    assert (core.fake.resets(), core.summaries(), core.counted.remedies) == ([], events, [])


async def test_a_dry_run_promises_nothing_that_the_gate_would_refuse():
    core = await grown()
    await core.gate.enter()
    core.fake.running = 1
    await core.tick(42)
    names = requests("reset_mm_cache", "release")
    waits, at_once = await core.relief.reclaim(names, mode="safe", dry_run=True)
    assert (waits.result.outcome, at_once.result.outcome, waits.result.would) == ("refused", "observed", None)
    assert (waits.result.reason or "").startswith("a request has been under way for 42 s")
    (done, _) = await core.relief.reclaim(names, mode="safe", dry_run=False)
    assert (done.result.outcome, done.result.reason) == ("refused", waits.result.reason)


@pytest.mark.parametrize("starts", [False, True], ids=["gone", "starting"])
async def test_a_dry_run_of_an_engine_that_is_not_up_leaves_no_trace(starts):
    core = core_on() if starts else await grown()
    core.fake.down = True
    for _ in range(2):
        await core.poller.poll()
    before = core.summaries("reset"), core.summaries("refusal")
    with pytest.raises(NotAvailable, match="the engine is"):
        await core.relief.reclaim(requests("release"), mode="safe", dry_run=True)
    assert (core.summaries("reset"), core.summaries("refusal")) == before
    assert core.counted.remedies == []


async def test_an_unknown_remedy_is_named_before_anything_is_done():
    core = await grown()
    with pytest.raises(UnknownName, match="'reboot' is not known; allowed: release, trim_encoder_cache"):
        await core.relief.reclaim(requests("release", "reboot"), mode="now", dry_run=False)
    assert core.fake.resets() == []


async def test_a_drop_in_does_what_vllm_does_and_no_more():
    core = await grown()
    measured = await core.relief.drop_in("reset_encoder_cache", query="x=1", mode="now", force=False)
    assert core.fake.resets() == ["/reset_encoder_cache"]
    assert core.fake.asked("/reset_encoder_cache")[0].query == "x=1"
    assert measured.answer is not None
    assert measured.result.freed_bytes == 0
    assert measured.result.freed_components.encoder_cache_bytes == ENCODER_BYTES
    assert measured.result.freed_components.torch_cached_bytes == -ENCODER_BYTES


async def test_reset_mm_cache_frees_nothing_on_the_device():
    core = await grown()
    result = (await core.relief.drop_in("reset_mm_cache", query="", mode="now", force=False)).result
    assert (result.outcome, result.freed_bytes) == ("done", 0)
    assert "device memory" in result.does_not_free


async def test_a_drop_in_that_hangs_the_engine_is_refused():
    """0.12, in any mode: refused and recorded; force is the operator's own word."""
    core = await grown(version="0.12.0")
    for mode in ("now", "safe"):
        with pytest.raises(Refused, match="can hang without end"):
            await core.relief.drop_in("reset_mm_cache", query="", mode=mode, force=False)
    assert core.fake.resets() == []
    assert core.counted.remedies == [("reset_mm_cache", "drop-in", "refused")] * 2
    await core.relief.drop_in("reset_mm_cache", query="", mode="now", force=True)
    assert core.fake.resets() == ["/reset_mm_cache"]


async def test_an_engine_that_is_down_is_not_available():
    core = await grown()
    core.fake.down = True
    for _ in range(2):  # one refused connection is not its end
        await core.poller.poll()
    with pytest.raises(NotAvailable, match="the engine is gone"):
        await core.relief.drop_in("reset_mm_cache", query="", mode="now", force=False)
    assert core.counted.remedies == [("reset_mm_cache", "drop-in", "failed")]
    assert core.summaries("reset")[0].startswith("reset_mm_cache failed: the engine is gone")


async def test_an_engine_that_starts_refuses_and_leaves_no_failed_reset():
    """503 as well; `highwater status` then names no reset that failed."""
    core = core_on()
    core.fake.down = True
    with pytest.raises(NotAvailable, match="the engine is starting"):
        await core.relief.reclaim([RemedyRequest("release")], mode="safe", dry_run=False)
    assert core.counted.remedies == [("release", "reclaim", "refused")]
    assert (core.summaries("reset"), len(core.summaries("refusal"))) == ([], 1)


async def test_an_engine_that_goes_in_the_middle_leaves_no_numbers():
    core = await grown()
    core.fake.late = {"/reset_mm_cache"}
    measured = await core.relief.drop_in("reset_mm_cache", query="", mode="now", force=False)
    assert (measured.result.outcome, measured.answer) == ("failed", None)
    assert "no answer in time" in (measured.result.reason or "")


async def test_operator_and_policy_never_act_at_once():
    core = await grown()
    await core.poller.poll()
    core.engine.rpc_deadline_seconds = 60.0
    core.fake.hang = asyncio.Event()
    operator = asyncio.create_task(core.relief.reclaim(requests("release"), mode="safe", dry_run=False))
    for _ in range(100):
        await asyncio.sleep(0)
    assert core.fake.ops()[-1] == "release"
    await core.governor.consider()
    assert core.governor.status().actions_last_hour == 0
    core.fake.hang.set()
    await operator
    assert core.counted.remedies == [("release", "reclaim", "done")]


async def test_two_operators_take_turns():
    core = await grown()
    asked = [core.relief.reclaim(requests("release"), mode="safe", dry_run=False) for _ in range(3)]
    results = await asyncio.gather(*asked)
    assert sorted(measured.result.freed_bytes for (measured,) in results) == [0, 0, 2 * CACHED]


async def test_use_that_grew_meanwhile_is_not_called_freed(monkeypatch):
    core = await grown()
    release = core.relief.remedies["release"]

    class Busy:
        def __getattr__(self, name):
            return getattr(release, name)

        async def run(self, engine, ask):
            core.fake.serve_images(1)
            return await release.run(engine, ask)

    for worker in core.fake.workers:
        worker.cached = 0
    monkeypatch.setattr(core.relief, "remedies", {"release": Busy()})
    (measured,) = await core.relief.reclaim(requests("release"), mode="safe", dry_run=False)
    assert measured.result.freed_bytes == -2 * IMAGE_BYTES
    assert "gave back 0 GiB, 2 ranks together, in 0.00 s; 0.238 GiB more in use now" in core.summaries("reset")[0]


def test_every_remedy_that_a_rule_may_name_can_be_carried_out():
    assert [remedy.name for remedy in REMEDIES] == list(TRAITS)


class Stand(Release):
    """`release`, with another run."""

    def __init__(self, run) -> None:
        self.run = run


async def test_a_reset_that_nobody_could_measure_says_so():
    core = core_on()
    await core.tick()

    async def run_and_fall_silent(engine, ask):
        core.fake.down = True
        return RunResult(ok=True)

    core.relief.remedies = {"release": Stand(run_and_fall_silent)}
    (measured,) = await core.relief.reclaim(requests("release"), mode="now", dry_run=False)
    assert (measured.result.outcome, measured.result.freed_bytes, measured.result.ranks) == ("done", None, ())
    assert "not measured" in measured.result.reason


async def test_an_engine_that_was_late_once_is_not_measured_by_the_readings_from_before(monkeypatch):
    core = await grown()
    await core.poller.poll()
    same = core.poller.current()
    monkeypatch.setattr(core.poller, "poll", lambda: asyncio.sleep(0, replace(same, stale=False)))
    (measured,) = await core.relief.reclaim(requests("release"), mode="safe", dry_run=False)
    assert (measured.result.outcome, measured.result.freed_bytes, measured.after) == ("done", None, ())
    assert "not measured, as no reading came after it" in measured.result.reason


@pytest.mark.parametrize(("mode", "used"), [("now", USED_AFTER), ("safe", USED_READY)])
async def test_now_means_from_now_on_where_else_the_last_reading_would_do(mode, used):
    core = core_on()
    await core.tick()
    core.fake.serve_images()
    (measured,) = await core.relief.reclaim(requests("release"), mode=mode, dry_run=False)
    assert measured.before[0].used_bytes == used


# --- trim ---


async def test_a_trim_moves_what_is_asked_and_releases_it():
    """The same target for every rank; without the release after it the device would see nothing of it."""
    core = await grown()
    (measured,) = await core.relief.reclaim(
        [RemedyRequest("trim_encoder_cache", Target(free_bytes=10 * IMAGE_BYTES))], mode="safe", dry_run=False
    )
    assert core.fake.resets() == ["trim", "release"]
    assert core.fake.asked("/collective_rpc")[-3].body.count(b"free_bytes") == 1
    assert measured.result.freed_components.encoder_cache_bytes == 2 * 10 * IMAGE_BYTES
    assert measured.result.freed_bytes == 2 * (10 * IMAGE_BYTES + CACHED)
    assert [answer["spilled_bytes"] for answer in measured.result.detail] == [10 * IMAGE_BYTES] * 2
    assert core.poller.current().encoder_cache.host_bytes == 2 * 10 * IMAGE_BYTES


async def test_what_the_workers_refuse_is_a_refusal():
    core = await grown()
    core.fake.workers_refuse = "an EC connector keeps references into the cache"
    (measured,) = await core.relief.reclaim(requests("trim_encoder_cache"), mode="safe", dry_run=False)
    assert (measured.result.outcome, core.fake.resets()) == ("refused", ["trim"])
    assert "an EC connector keeps references" in measured.result.reason
    assert core.counted.remedies == [("trim_encoder_cache", "reclaim", "refused")]


async def test_restore_brings_back_what_a_trim_moved():
    core = await grown()
    await core.relief.reclaim(requests("trim_encoder_cache"), mode="safe", dry_run=False)
    answers = await core.relief.restore()
    assert [answer["restored_entries"] for answer in answers] == [IMAGES] * 2
    assert core.poller.current().encoder_cache.host_bytes == 0
    core.fake.workers_refuse = "op 'restore' is unknown"
    with pytest.raises(Refused, match="op 'restore' is unknown"):
        await core.relief.restore()


async def test_a_restore_goes_on_until_all_is_back():
    core = await grown()
    await core.relief.reclaim(requests("trim_encoder_cache"), mode="safe", dry_run=False)
    for worker in core.fake.workers:
        worker.entries_a_call = IMAGES // 2
    answers = await core.relief.restore()
    assert [(answer["restored_entries"], answer["left_entries"]) for answer in answers] == [(IMAGES, 0)] * 2
    assert core.fake.ops().count("restore") == 3


async def test_restore_needs_the_workers():
    core = core_on(extension=None)
    await core.tick()
    with pytest.raises(Refused, match="--worker-extension-cls"):
        await core.relief.restore()


# --- holding requests ---


async def test_safe_reset_mm_cache_holds_new_requests_and_tells_for_how_long():
    core = await grown()
    seen: list[bool] = []
    core.fake.on_reset = lambda: seen.append(core.gate.is_open)
    (measured,) = await core.relief.reclaim(requests("reset_mm_cache"), mode="safe", dry_run=False)
    assert (measured.result.outcome, measured.result.quiesced_by, seen) == ("done", "gate", [False])
    assert measured.result.held_seconds is not None
    assert core.gate.is_open


@pytest.mark.parametrize("name", ["reset_mm_cache", "reset_prefix_cache"])
async def test_vllms_own_meaning_waits_for_nobody(name):
    core = await grown()
    await core.gate.enter()
    measured = await core.relief.drop_in(name, query="", mode="now", force=False)
    assert (measured.result.outcome, measured.result.quiesced_by) == ("done", "nothing")


async def test_a_dry_run_tells_the_moment():
    core = await grown()
    (measured,) = await core.relief.reclaim(requests("reset_mm_cache"), mode="safe", dry_run=True)
    assert measured.result.reason == (
        "dry run; gives back no device memory; "
        "would hold new requests for at most 0.05 s until running requests are done"
    )


# --- workers that hang or lie ---


async def test_a_trim_that_never_returns_fails_and_is_never_repeated():
    core = await grown()
    await core.poller.poll()
    core.fake.hang = asyncio.Event()
    (measured,) = await core.relief.reclaim(requests("trim_encoder_cache"), mode="safe", dry_run=False)
    assert measured.result.outcome == "failed"
    assert "worker call trim sent" in measured.result.reason
    assert core.fake.ops().count("trim") == 1
    assert core.gate.is_open
    assert not core.relief.busy
    with pytest.raises(NotAvailable, match="the engine is busy: worker call trim sent"):
        await core.relief.reclaim(requests("trim_encoder_cache"), mode="safe", dry_run=False)
    assert core.fake.ops().count("trim") == 1
    assert core.summaries("reset")[0].startswith("trim_encoder_cache failed")
    core.fake.hang.set()
    await core.engine.aclose()


async def test_a_reset_that_never_returns_lets_the_held_go():
    core = await grown()
    core.fake.late = {"/reset_mm_cache"}
    (measured,) = await core.relief.reclaim(requests("reset_mm_cache"), mode="safe", dry_run=False)
    assert (measured.result.outcome, measured.result.quiesced_by) == ("failed", "gate")
    assert "no answer in time" in measured.result.reason
    assert core.gate.is_open


@pytest.mark.parametrize(
    ("garbage", "told"),
    [
        (lambda _: {"results": "no list"}, "not a list of JSON texts"),
        (lambda _: {"results": []}, "0 answers"),
        (lambda answers: {"results": [json.dumps(answers[0] | {"op": "memory"})]}, "queues are out of step"),
    ],
)
async def test_a_trim_that_is_answered_with_garbage_has_failed(garbage, told):
    core = await grown()
    await core.poller.poll()
    core.fake.garble = garbage
    (measured,) = await core.relief.reclaim(requests("trim_encoder_cache"), mode="safe", dry_run=False)
    assert measured.result.outcome == "failed"
    assert told in measured.result.reason
    assert not core.relief.busy


# --- every wait has an end ---


def stage(core: Core, monkeypatch, state: str) -> asyncio.Event:
    """Have a safe reset of the multimodal cache wait in one state, and return what tells that it does."""
    there = asyncio.Event()

    async def for_ever(*_, **__):
        there.set()
        await asyncio.Event().wait()

    if state == "closing":
        monkeypatch.setattr(core.gate, "drained", for_ever)
    elif state == "drained":
        monkeypatch.setattr("highwater.act.quiescer.read_load", for_ever)
    elif state == "calling":
        monkeypatch.setattr(core.engine, "post", for_ever)
    elif state == "releasing":
        monkeypatch.setattr(core.engine, "rpc", for_ever)
    elif state == "reading":
        monkeypatch.setattr(core.poller, "poll", for_ever)
    else:
        core.fake.on_reset = lambda: monkeypatch.setattr(core.poller, "poll", for_ever)
    return there


def remedy_through(state: str) -> str:
    """One that comes to the state."""
    return "reset_encoder_cache" if state == "releasing" else "reset_mm_cache"


@pytest.fixture
def short(monkeypatch):
    """Deadlines that a test can wait for."""
    for name in ("relief.POLL_SECONDS", "relief.MARGIN_SECONDS", "relief.MAX_SECONDS", "relief.CALL_SECONDS"):
        monkeypatch.setattr(f"highwater.act.{name}", 0.01)
    monkeypatch.setattr("highwater.act.quiescer.DRAINED_SECONDS", 0.01)


STATES = ("reading", "closing", "drained", "calling", "releasing", "measuring")


@pytest.mark.parametrize(
    ("state", "outcome", "told"),
    [
        ("closing", "refused", "requests had not ended after 0.05 s"),
        ("drained", "refused", "did not report within 0.01 s whether requests run"),
        ("calling", "failed", "it has not ended within 0.01 s; not measured"),
        ("releasing", "failed", "done, but the release after it has not ended within 0.05 s; not measured"),
        ("measuring", "done", "not measured, as no reading came within 0.03 s"),
    ],
)
@pytest.mark.usefixtures("short")
async def test_a_relief_waits_nowhere_for_longer_than_it_may(monkeypatch, state, outcome, told):
    core = await grown()
    await core.poller.poll()
    there = stage(core, monkeypatch, state)
    (measured,) = await core.relief.reclaim(requests(remedy_through(state)), mode="safe", dry_run=False)
    assert there.is_set()
    assert (measured.result.outcome, measured.result.freed_bytes) == (outcome, None)
    assert told in measured.result.reason
    assert (core.relief.state, core.relief.busy, core.gate.is_open) == ("idle", False, True)
    assert told in core.summaries()[-1]


@pytest.mark.usefixtures("short")
async def test_a_reading_that_does_not_come_ends_the_relief_before_it_began(monkeypatch):
    core = await grown()
    there = stage(core, monkeypatch, "reading")
    with pytest.raises(NotAvailable, match=r"no reading came within 0\.03 s"):
        await core.relief.reclaim(requests("release"), mode="safe", dry_run=False)
    assert (there.is_set(), core.relief.state, core.relief.busy) == (True, "idle", False)
    assert core.counted.remedies == [("release", "reclaim", "failed")]


@pytest.mark.usefixtures("short")
async def test_a_restore_waits_no_longer_than_it_may(monkeypatch):
    core = await grown()
    await core.poller.poll()
    there = stage(core, monkeypatch, "releasing")
    with pytest.raises(NotAvailable, match=r"restore: it has not ended within 0\.06 s"):
        await core.relief.restore()
    assert (there.is_set(), core.relief.state, core.relief.busy) == (True, "idle", False)
    assert core.summaries("reset")[0].startswith("restore: it has not ended")
    monkeypatch.undo()
    monkeypatch.setattr("highwater.act.relief.POLL_SECONDS", 0.01)
    stage(core, monkeypatch, "reading")
    await core.relief.restore()
    assert "what is left on the host is not known" in core.summaries("reset")[-1]


@pytest.mark.parametrize("state", STATES)
async def test_a_caller_that_is_cancelled_in_any_state_leaves_nothing_behind(monkeypatch, state):
    core = await grown()
    if state != "reading":
        await core.poller.poll()
    with monkeypatch.context() as staged:
        there = stage(core, staged, state)
        reset = core.relief.reclaim(requests(remedy_through(state)), mode="safe", dry_run=False)
        task = asyncio.create_task(reset)
        await there.wait()
        assert (core.relief.state, core.relief.busy) == (state, True)
        assert core.gate.is_open is (state not in {"closing", "drained", "calling"})
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()
    core.fake.on_reset = lambda: None
    assert (core.relief.state, core.relief.busy, core.gate.is_open) == ("idle", False, True)
    assert core.summaries("reset")[0] == f"{remedy_through(state)} failed: cancelled while {state}"
    (measured,) = await core.relief.reclaim(requests(remedy_through(state)), mode="safe", dry_run=False)
    assert measured.result.outcome == "done"


async def test_a_remedy_that_breaks_is_recorded_and_raised():
    core = await grown()

    async def broken(engine, ask):
        raise KeyError("complete")

    core.relief.remedies = {"release": Stand(broken)}
    with pytest.raises(KeyError):
        await core.relief.reclaim(requests("release"), mode="safe", dry_run=False)
    assert core.summaries("reset")[0] == "release failed: KeyError('complete') while calling"
    assert (core.relief.state, core.relief.busy) == ("idle", False)


async def test_readings_around_a_remedy_that_failed_are_not_called_its_effect():
    core = await grown()

    async def half(engine, ask):
        core.fake.workers[0].release()
        return RunResult(ok=False, reason="1 of 2 ranks: out of order")

    core.relief.remedies = {"release": Stand(half)}
    (measured,) = await core.relief.reclaim(requests("release"), mode="safe", dry_run=False)
    assert (measured.result.outcome, measured.result.freed_bytes, measured.result.ranks) == ("failed", None, ())
    assert measured.result.reason == "1 of 2 ranks: out of order; not measured"
    assert measured.after == ()


async def test_requests_wait_for_the_reset_and_not_for_the_release_after_it(monkeypatch):
    core = await grown()
    await core.poller.poll()
    core.poller._rounds.detection.capabilities = replace(core.poller.capabilities, encoder_decoder=True)
    seen = []
    core.fake.on_reset = lambda: seen.append(core.gate.is_open)
    rpc = core.engine.rpc

    async def noted(op, payload=None):
        if op == "release":
            seen.append(core.gate.is_open)
        return await rpc(op, payload)

    monkeypatch.setattr(core.engine, "rpc", noted)
    (measured,) = await core.relief.reclaim(requests("reset_encoder_cache"), mode="safe", dry_run=False)
    assert (measured.result.outcome, measured.result.quiesced_by, seen) == ("done", "gate", [False, True])


def test_a_state_that_cannot_follow_is_an_error():
    async def wrong() -> None:
        states = States()
        async with states.one_relief(), states.enter("reading", 1.0), states.enter("measuring", 1.0):
            pytest.fail("nothing was called")

    with pytest.raises(RuntimeError, match="does not go from reading to measuring"):
        asyncio.run(wrong())


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        (0, ""),
        (MIB - 1, ""),
        (1 - MIB, ""),
        (MIB, "; 0.009 GiB less in use now"),
        (-MIB, "; 0.007 GiB less in use now"),
    ],
)
def test_what_traffic_changed_is_said_from_one_mebibyte_on(beside, words):
    result = RemedyResult(
        remedy="release", outcome="done", seconds=0.5, credited_bytes=8 * MIB, freed_bytes=8 * MIB + beside
    )
    assert result.summary == f"release done, gave back 0.008 GiB in 0.50 s{words}"
