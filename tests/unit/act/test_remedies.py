"""When each remedy is refused, what it says to the engine, and what it believes."""

from __future__ import annotations

import json

import pytest

from highwater.act.remedies import NO_OPTIONS, REMEDIES, RunOptions, RunResult, TrimEncoderCache
from highwater.engine.capabilities import RESETS_SINCE, Capabilities
from highwater.model.engine import EngineStatus
from highwater.model.remedies import Target
from highwater.process.errors import EngineRefused

BY_NAME = {remedy.name: remedy for remedy in REMEDIES}
ALL = {
    "collective_rpc": True,
    "reset_prefix_cache": True,
    "reset_mm_cache": True,
    "reset_encoder_cache": True,
}


def refusal(
    name, mode="safe", *, version="0.32.0", state="ready", running=0, waiting=0, kv_usage=None, **capabilities
) -> str | None:
    status = EngineStatus(
        url="http://engine",
        state=state,
        requests_running=running,
        requests_waiting=waiting,
        kv_cache_usage_ratio=kv_usage,
        version=version,
    )
    return BY_NAME[name].refusal(Capabilities(**{"version": version, **ALL, **capabilities}), status, mode)


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.name)
def test_a_remedy_says_what_it_frees_and_what_it_spares(remedy):
    assert remedy.traits.frees
    assert remedy.traits.does_not_free
    assert remedy.path in {None, f"/{remedy.name}"}
    assert len(BY_NAME) == len(REMEDIES)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_modern_engine_at_work_refuses_none(name):
    """0.28 and newer heal themselves: all four are safe under traffic."""
    assert refusal(name, version="0.28.0", running=8) is None


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("mode", ["safe", "now"])
def test_what_is_not_there_is_refused_with_what_would_bring_it(name, mode):
    told = refusal(name, mode, **dict.fromkeys(ALL, False))
    assert told is not None
    ours = name in {"release", "trim_encoder_cache"}
    assert ("--worker-extension-cls" if ours else "VLLM_SERVER_DEV_MODE=1") in told


@pytest.mark.parametrize("name", ["trim_encoder_cache", "reset_encoder_cache"])
def test_a_sleeping_engine_is_left_alone(name):
    assert "asleep" in (refusal(name, "now", state="sleeping") or "")


def test_what_a_sleep_left_behind_may_be_released():
    assert refusal("release", "safe", state="sleeping") is refusal("release", "now", state="sleeping") is None


def test_an_encoder_cache_connector_forbids_the_safe_reset_only():
    assert "connector" in (refusal("reset_encoder_cache", "safe", ec_connector=True) or "")
    assert refusal("reset_encoder_cache", "now", ec_connector=True) is None


@pytest.mark.parametrize("mode", ["safe", "now"])
@pytest.mark.parametrize("version", [None, "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.23.0", "0.24.1", "dev"])
def test_reset_mm_cache_is_refused_where_it_can_hang_the_engine(version, mode):
    told = refusal("reset_mm_cache", mode, version=version) or ""
    assert "can hang without end" in told
    assert "?force=true" in told


@pytest.mark.parametrize("version", ["0.25.0", "0.25.1", "0.27.1", "0.32.0"])
def test_elsewhere_requests_are_held_for_it_in_safe_mode(version):
    """A request on its way would fail, with an error that may be retried or one that may not."""
    assert refusal("reset_mm_cache", "safe", version=version, running=9) is None
    assert BY_NAME["reset_mm_cache"].needs_gate(Capabilities(version=version), "safe")
    assert not BY_NAME["reset_mm_cache"].needs_gate(Capabilities(version=version), "now")


@pytest.mark.parametrize(
    ("name", "mode", "known", "needs_gate"),
    [
        ("release", "safe", {}, False),
        ("trim_encoder_cache", "safe", {}, False),
        ("reset_encoder_cache", "safe", {}, False),
        ("reset_encoder_cache", "safe", {"encoder_decoder": True}, True),
        ("reset_encoder_cache", "now", {"encoder_decoder": True}, False),
        ("reset_prefix_cache", "safe", {}, True),
        ("reset_prefix_cache", "now", {}, False),
    ],
)
def test_nobody_is_held_for_a_remedy_that_does_not_need_it(name, mode, known, needs_gate):
    assert BY_NAME[name].needs_gate(Capabilities(version="0.32.0", **known), mode) is needs_gate


def test_requests_are_paced_after_the_reset_that_makes_every_image_new():
    assert [remedy.name for remedy in REMEDIES if remedy.paces_after] == ["reset_mm_cache"]


def test_nobody_is_held_for_blocks_that_no_request_has():
    """The engine would refuse all the same; an operator may have it asked."""
    known = {"kv_usage": 0.952, "kv_connector": "Nixl (kv_producer)"}
    assert refusal("reset_prefix_cache", **known) == (
        "the engine would not do it: KV blocks are in use (95.2%) though no request runs: the KV connector Nixl "
        "(kv_producer) may hold those of requests that have ended, or that it loads"
    )
    assert "no KV connector is configured" in (refusal("reset_prefix_cache", kv_usage=0.1, kv_connector="") or "")
    assert refusal("reset_prefix_cache", waiting=3, **known) is not None
    assert refusal("reset_prefix_cache", running=1, **known) is refusal("reset_prefix_cache", kv_usage=0.0) is None
    assert refusal("reset_prefix_cache", "now", **known) is refusal("reset_mm_cache", **known) is None


def test_a_connector_forbids_a_trim():
    """Whatever the mode: what it keeps hold of would be moved away under it."""
    for mode in ("safe", "now"):
        assert "connector" in (refusal("trim_encoder_cache", mode, ec_connector=True) or "")


def test_a_release_candidate_counts_as_its_release():
    """0.25.0rc1 fails single requests too, and does not hang."""
    assert refusal("reset_mm_cache", "now", version="0.25.0rc1+ascend", running=1) is None


# --- what they say ---


@pytest.mark.parametrize("name", ["reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache"])
async def test_a_reset_is_one_post_with_the_clients_query(engine, fake, name):
    run = await BY_NAME[name].run(engine, RunOptions(query="device=0&x=%20"))
    (call,) = [call for call in fake.calls if call.path != "/metrics"]
    assert (call.method, call.path, call.query) == ("POST", f"/{name}", "device=0&x=%20")
    assert run.ok
    assert run.answer.status == 200


async def test_release_is_one_worker_call(engine, fake):
    assert (await BY_NAME["release"].run(engine, NO_OPTIONS)).ok
    assert (len(fake.calls), fake.ops()) == (1, ["release"])
    assert all(worker.cached == 0 for worker in fake.workers)


async def test_a_rank_that_failed_to_release_is_told(engine, fake):
    error = {"ok": False, "error": {"code": "failed", "message": "not on the main thread"}}
    fake.garble = lambda answers: {"results": [json.dumps(answers[0]), json.dumps(answers[1] | error)]}
    run = await BY_NAME["release"].run(engine, NO_OPTIONS)
    assert not run.ok
    assert "1 of 2 ranks: " in (run.reason or "")
    assert "not on the main thread" in (run.reason or "")


@pytest.mark.parametrize("name", ["reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache"])
async def test_an_engine_that_answers_with_an_error_has_not_done_it(engine, fake, name):
    fake.failing[f"/{name}"] = 500
    run = await BY_NAME[name].run(engine, NO_OPTIONS)
    assert (run.ok, run.reason) == (False, "the engine answered 500")
    assert run.answer is not None


async def test_release_that_is_refused_raises(engine, fake):
    fake.failing["/collective_rpc"] = 500
    with pytest.raises(EngineRefused):
        await BY_NAME["release"].run(engine, NO_OPTIONS)


@pytest.mark.parametrize("refusing", [1, 2])
async def test_workers_that_refuse_all_refuse(engine, fake, refusing):
    no = {"ok": False, "error": {"code": "refused", "message": "an EC connector is configured"}}

    def some(answers):
        return {"results": [json.dumps(one | no if n < refusing else one) for n, one in enumerate(answers)]}

    fake.garble = some
    run = await BY_NAME["trim_encoder_cache"].run(engine, NO_OPTIONS)
    assert (run.ok, run.refused) == (False, refusing == 2)
    assert run.reason == f"{refusing} of 2 ranks: an EC connector is configured"


async def test_a_trim_carries_its_target_and_its_budget(engine, fake):
    remedy = TrimEncoderCache(host_budget_bytes=7)
    await remedy.run(engine, RunOptions(target=Target(keep_bytes=5)))
    await BY_NAME["trim_encoder_cache"].run(engine, NO_OPTIONS)
    payloads = [json.loads(json.loads(call.body)["args"][1]) for call in fake.calls]
    assert payloads == [{"keep_bytes": 5, "host_budget_bytes": 7}, {}]


# --- the prefix cache: verified ---


async def prefix(engine, **ask) -> RunResult:
    return await BY_NAME["reset_prefix_cache"].run(engine, RunOptions(**ask))


async def test_the_prefix_cache_is_believed_where_the_engine_tells(engine, fake):
    """From 0.26 on: success, or blocks in use."""
    assert (await prefix(engine)).reason is None
    fake.prefix_blocks_in_use = True
    run = await prefix(engine)
    assert run.ok is False
    assert run.reason.startswith("not done by the engine: KV blocks are in use though no request runs: whether a KV ")
    fake.running = 1
    assert (await prefix(engine)).reason == "not done by the engine: KV blocks are in use"


@pytest.mark.parametrize(
    ("usage", "running", "reason"),
    [
        (0.0, 0, None),
        (0.3, 0, "not done by the engine: KV blocks are in use (30.0%) though no request runs: the KV connector Nixl"),
        (0.3, 1, "not done by the engine: KV blocks are in use"),
        (0.0, 1, "not done by the engine: KV blocks are in use"),
    ],
)
async def test_before_that_the_engines_counts_settle_it(engine, fake, usage, running, reason):
    fake.version, fake.kv_usage, fake.running, fake.waiting = "0.25.0", usage, running, 3
    run = await prefix(engine, kv_connector="Nixl")
    assert run.ok == (reason is None)
    assert (run.reason or "").startswith(reason or "")


@pytest.mark.parametrize("meanwhile", ["work", "idle"])
async def test_where_requests_came_or_went_nobody_knows(engine, fake, meanwhile):
    fake.version, fake.running = "0.25.0", int(meanwhile == "idle")

    def go_on():
        fake.tokens, fake.running = fake.tokens + (meanwhile == "work"), 0

    fake.on_reset = go_on
    run = await prefix(engine)
    assert run.ok
    assert "does not tell" in (run.reason or "")


async def test_it_is_tried_again_while_blocks_are_in_use(engine, fake, monkeypatch):
    monkeypatch.setattr("highwater.act.remedies.RETRY_SECONDS", 0.0)
    fake.prefix_blocks_in_use = True
    tried = iter(range(3))

    def free_in_time():
        fake.prefix_blocks_in_use = next(tried) < 2

    fake.on_reset = free_in_time
    run = await prefix(engine, patience_seconds=60.0)
    assert (run.ok, len(fake.asked("/reset_prefix_cache"))) == (True, 3)
    fake.on_reset, fake.prefix_blocks_in_use = lambda: None, True
    assert not (await prefix(engine, patience_seconds=0.01)).ok


@pytest.mark.parametrize(
    ("name", "version", "dev_mode", "words"),
    [
        ("reset_mm_cache", "0.32.0", False, "it needs VLLM_SERVER_DEV_MODE=1 in its environment"),
        ("reset_mm_cache", "0.32.0", True, f"vLLM {RESETS_SINCE['reset_mm_cache']} and newer with VLLM_SERVER_DEV"),
        ("reset_encoder_cache", "0.1.0", False, f"vLLM {RESETS_SINCE['reset_encoder_cache']} and newer with VLLM_SER"),
    ],
)
def test_a_reset_that_is_missing_is_explained_by_its_cause(name, version, dev_mode, words):
    told = refusal(name, version=version, dev_mode=dev_mode, **dict.fromkeys(ALL, False)) or ""
    assert words in told
    assert told.count("VLLM_SERVER_DEV_MODE=1") == 1
