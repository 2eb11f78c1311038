"""When each remedy is refused, what it says to the engine, and what it believes."""

from __future__ import annotations

import json

import pytest

from app.capabilities import Capabilities
from app.engine import Engine
from app.errors import EngineRefused
from app.readings import EngineStatus
from app.remedies import REMEDIES
from tests.fakes.engine import FakeEngine

BY_NAME = {remedy.name: remedy for remedy in REMEDIES}
ALL = {
    "collective_rpc": True,
    "reset_prefix_cache": True,
    "reset_mm_cache": True,
    "reset_encoder_cache": True,
}


def refusal(name, mode="safe", *, version="0.32.0", state="ready", running=0, waiting=0, **capabilities) -> str | None:
    status = EngineStatus(
        url="http://engine", state=state, requests_running=running, requests_waiting=waiting, version=version
    )
    return BY_NAME[name].refusal(Capabilities(**{"version": version, **ALL, **capabilities}), status, mode)


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.name)
def test_a_remedy_says_what_it_frees_and_what_it_spares(remedy):
    """In words, for events and answers; a name once; a drop-in path that is its name."""
    assert remedy.frees
    assert remedy.spares
    assert remedy.path in {None, f"/{remedy.name}"}
    assert len(BY_NAME) == len(REMEDIES)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_modern_engine_at_work_refuses_none(name):
    """0.28 and newer heal themselves: all four are safe under traffic."""
    assert refusal(name, version="0.28.0", running=8) is None


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("mode", ["safe", "now"])
def test_what_is_not_there_is_refused_with_what_would_bring_it(name, mode):
    """The route's version, or the flag to start vLLM with."""
    told = refusal(name, mode, **dict.fromkeys(ALL, False))
    assert told is not None
    assert ("--worker-extension-cls" if name == "release" else "VLLM_SERVER_DEV_MODE=1") in told


@pytest.mark.parametrize("name", ["release", "reset_encoder_cache"])
def test_a_sleeping_engine_is_left_alone(name):
    """Its pools are unmapped."""
    assert "asleep" in (refusal(name, "now", state="sleeping") or "")


def test_an_encoder_cache_connector_forbids_the_safe_reset_only():
    """It keeps references; an operator may know better."""
    assert "connector" in (refusal("reset_encoder_cache", "safe", ec_connector=True) or "")
    assert refusal("reset_encoder_cache", "now", ec_connector=True) is None


@pytest.mark.parametrize("version", [None, "0.11.2", "0.12.0", "0.14.0", "0.27.1", "dev"])
def test_reset_mm_cache_is_not_safe_before_0_28(version):
    """Idle or not: a request that comes in between would fail or hang."""
    assert refusal("reset_mm_cache", "safe", version=version) is not None


@pytest.mark.parametrize(
    ("version", "running", "waiting", "refused"),
    [
        ("0.12.0", 1, 0, True),
        ("0.12.0", 0, 1, True),
        ("0.12.0", None, None, True),
        ("0.13.0", 0, None, True),
        (None, 1, 0, True),
        ("0.12.0", 0, 0, False),
        ("0.14.0", 9, 9, False),
        ("0.28.0", 9, 9, False),
    ],
)
def test_reset_mm_cache_now_is_refused_where_it_hangs_the_engine(version, running, waiting, refused):
    """Before 0.14 with requests under way, or where that is not known."""
    told = refusal("reset_mm_cache", "now", version=version, running=running, waiting=waiting)
    assert (told is not None) is refused
    assert told is None or "force=true" in told


def test_a_release_candidate_counts_as_its_release():
    """0.28.0rc1 heals itself too."""
    assert refusal("reset_mm_cache", version="0.28.0rc1+ascend") is None


# --- what they say ---


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def engine(fake):
    async with Engine("http://engine", transport=fake.transport()) as client:
        client.rpc_allowed = True
        yield client


@pytest.mark.parametrize("name", ["reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache"])
async def test_a_reset_is_one_post_with_the_clients_query(engine, fake, name):
    """And the engine's own answer is kept for it."""
    run = await BY_NAME[name].run(engine, "device=0&x=%20")
    (call,) = fake.calls
    assert (call.method, call.path, call.query) == ("POST", f"/{name}", "device=0&x=%20")
    assert run.ok
    assert run.answer is not None
    assert run.answer.status == 200


async def test_release_is_one_worker_call(engine, fake):
    """And it never posts anything else."""
    assert (await BY_NAME["release"].run(engine)).ok
    assert (len(fake.calls), fake.ops()) == (1, ["release"])
    assert all(worker.cached == 0 for worker in fake.workers)


async def test_a_rank_that_failed_to_release_is_told(engine, fake):
    """Freed on one rank is not done."""
    error = {"ok": False, "error": {"code": "failed", "message": "not on the main thread"}}
    fake.garble = lambda answers: {"results": [json.dumps(answers[0]), json.dumps(answers[1] | error)]}
    run = await BY_NAME["release"].run(engine)
    assert not run.ok
    assert "1 of 2 ranks failed" in (run.reason or "")
    assert "not on the main thread" in (run.reason or "")


@pytest.mark.parametrize("name", ["reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache"])
async def test_an_engine_that_answers_with_an_error_has_not_done_it(engine, fake, name):
    """The status is told and the answer kept."""
    fake.failing[f"/{name}"] = 500
    run = await BY_NAME[name].run(engine)
    assert (run.ok, run.reason) == (False, "the engine answered 500")
    assert run.answer is not None


async def test_release_that_is_refused_raises(engine, fake):
    """The governor makes a failed reset of it."""
    fake.failing["/collective_rpc"] = 500
    with pytest.raises(EngineRefused):
        await BY_NAME["release"].run(engine)


async def test_the_prefix_cache_is_believed_where_the_engine_tells(engine, fake):
    """From 0.26 on: success, or blocks in use. Before, nobody knows, and that is said."""
    assert (await BY_NAME["reset_prefix_cache"].run(engine)).reason is None
    fake.prefix_blocks_in_use = True
    run = await BY_NAME["reset_prefix_cache"].run(engine)
    assert (run.ok, run.reason) == (False, "refused by the engine: blocks are in use")
    fake.version = "0.25.0"
    run = await BY_NAME["reset_prefix_cache"].run(engine)
    assert run.ok
    assert "does not tell" in (run.reason or "")
