"""The words said to vLLM: what the client refuses to do, and how it maps what goes wrong."""

from __future__ import annotations

import asyncio
import gc
import json
from threading import get_ident

import httpx
import pytest

from highwater.engine import client as module
from highwater.engine.client import MAX_RESPONSE_BYTES, Engine, EngineResponse, WorkerAnswer
from highwater.process.errors import EngineError, EngineGarbled, EngineRefused, EngineUnreachable, EngineUnresponsive
from tests.fakes.engine import FakeEngine


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def engine(fake):
    # The deadline is wall time inside asyncio.wait: nothing sleeps, and a hanging call ends at once.
    async with Engine("http://engine:8000", rpc_deadline_seconds=0.02, transport=fake.transport()) as client:
        client.allow_rpc()
        yield client


async def until(true) -> None:
    """Give the loop turns until it is so."""
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError


# --- worker calls ---


async def test_a_worker_call_answers_for_each_rank(engine):
    answers = await engine.rpc("memory")
    assert [(answer["op"], answer["rank"]) for answer in answers] == [("memory", 0), ("memory", 1)]


@pytest.mark.parametrize(("large", "is_beside"), [(0, True), (10**6, False)])
async def test_a_large_answer_is_read_beside_the_loop(engine, monkeypatch, large, is_beside):
    """It would hold up every stream of the proxy."""
    read, threads = module._worker_results, []
    monkeypatch.setattr(module, "_LARGE_BYTES", large)
    monkeypatch.setattr(module, "_worker_results", lambda *given: threads.append(get_ident()) or read(*given))
    assert len(await engine.rpc("memory")) == 2
    assert [thread != get_ident() for thread in threads] == [is_beside]


async def test_how_long_a_worker_call_has_waited_is_told(engine, fake):
    assert (engine.rpc_outstanding_seconds, engine.rpc_answer_age_seconds) == (None, None)
    fake.hang = asyncio.Event()
    with pytest.raises(EngineUnresponsive):
        await engine.rpc("memory")
    engine._outstanding_since -= 60.0
    assert engine.rpc_outstanding_seconds == pytest.approx(60.0, abs=5.0)
    fake.hang.set()
    await asyncio.wait({engine._outstanding})
    assert (engine.rpc_outstanding_seconds, engine.rpc_answer_age_seconds) == (None, None)
    await engine.rpc("memory")
    engine._answered_at -= 60.0
    assert engine.rpc_answer_age_seconds == pytest.approx(60.0, abs=5.0)
    assert engine.rpc_outstanding_seconds is None


async def test_no_worker_call_before_the_extension_is_known(engine, fake):
    """A missing method would desynchronise vLLM's queues for ever."""
    engine.forbid_rpc()
    with pytest.raises(EngineRefused, match="not known to be loaded"):
        await engine.rpc("memory")
    assert fake.calls == []


async def test_a_worker_call_carries_no_timeout(engine, fake):
    await engine.rpc("encoder_cache", {"limit": 5})
    body = json.loads(fake.calls[0].body)
    assert body == {"method": "highwater_rpc", "args": ["encoder_cache", '{"limit": 5}']}
    assert b"timeout" not in fake.calls[0].body


async def test_one_worker_call_in_flight_at_most(engine, fake):
    answers = await asyncio.gather(*(engine.rpc("memory") for _ in range(10)))
    assert len(answers) == len(fake.ops()) == 10
    assert fake.most_rpcs_in_flight == 1


async def test_a_late_call_is_unresponsive_and_never_repeated(engine, fake):
    fake.hang = asyncio.Event()
    for _ in range(3):
        with pytest.raises(EngineUnresponsive, match="worker call memory sent 0 s ago has not come back"):
            await engine.rpc("memory")
    assert len(fake.calls) == 1
    assert fake.rpcs_in_flight == 1
    fake.hang.set()


async def test_it_recovers_when_the_late_call_comes_back(engine, fake):
    fake.hang = asyncio.Event()
    with pytest.raises(EngineUnresponsive):
        await engine.rpc("memory")
    late = engine._outstanding
    fake.hang.set()
    await asyncio.wait({late})
    fake.hang = None
    assert {answer["op"] for answer in await engine.rpc("release")} == {"release"}
    assert fake.ops() == ["memory", "release"]


async def test_those_who_wait_behind_a_late_call_are_told_too(engine, fake):
    fake.hang = asyncio.Event()
    ends = await asyncio.gather(*(engine.rpc("memory") for _ in range(4)), return_exceptions=True)
    assert [type(end) for end in ends] == [EngineUnresponsive] * 4
    assert len(fake.calls) == 1
    fake.hang.set()


async def test_a_caller_that_is_cancelled_leaves_the_call_running(engine, fake):
    """A client that went away must not make room for a second call."""
    fake.hang = asyncio.Event()
    caller = asyncio.create_task(engine.rpc("memory"))
    await until(lambda: fake.calls)
    caller.cancel()
    await asyncio.wait({caller})
    with pytest.raises(EngineUnresponsive):
        await engine.rpc("memory")
    assert len(fake.calls) == 1
    fake.hang.set()


async def test_an_abandoned_call_that_fails_is_looked_at(engine, fake, caplog):
    """asyncio has nothing to complain about when nobody waits any more."""
    fake.hang, fake.breaks = asyncio.Event(), True
    caller = asyncio.create_task(engine.rpc("memory"))
    await until(lambda: fake.calls)
    caller.cancel()
    await asyncio.wait({caller})
    fake.hang.set()
    await asyncio.wait({engine._outstanding})
    del caller
    engine._outstanding = None  # the last reference to the call goes
    gc.collect()
    assert caplog.text == ""


async def test_closing_lets_go_of_a_late_call(fake):
    fake.hang = asyncio.Event()
    async with Engine("http://engine", rpc_deadline_seconds=0.01, transport=fake.transport()) as engine:
        engine.allow_rpc()
        with pytest.raises(EngineUnresponsive):
            await engine.rpc("memory")
    assert engine._outstanding.cancelled()
    assert fake.rpcs_in_flight == 0


GARBLED = {
    "no object": lambda _: [],
    "no results": lambda _: {"answer": []},
    "results are null": lambda _: {"results": None},
    "results are a text": lambda _: {"results": "[]"},
    "results are a number": lambda _: {"results": 5},
    "nobody answered": lambda _: {"results": []},
    "an object, not its text": lambda answers: {"results": answers},
    "no JSON": lambda _: {"results": ["hello"]},
    "nested without end": lambda _: {"results": ["[" * 200_000]},
    "a list in JSON": lambda _: {"results": ["[]"]},
    "null of one rank": lambda answers: {"results": [json.dumps(answers[0]), None]},
    "a number of one rank": lambda answers: {"results": [json.dumps(answers[0]), "5"]},
    "another op": lambda answers: {"results": [json.dumps(answer | {"op": "release"}) for answer in answers]},
    "another op of one rank": lambda answers: {
        "results": [json.dumps(answers[0]), json.dumps(answers[1] | {"op": "budget"})]
    },
    "no op": lambda answers: {"results": [json.dumps(answer | {"op": None}) for answer in answers]},
}


@pytest.mark.parametrize("garble", GARBLED.values(), ids=GARBLED)
async def test_an_answer_outside_the_contract_is_garbled(engine, fake, garble):
    fake.garble = garble
    with pytest.raises(EngineGarbled):
        await engine.rpc("memory")


@pytest.mark.parametrize("error", [None, "a text", ["a list"], {"code": 5}])
def test_an_answers_error_of_another_form_says_nothing(error):
    answer = WorkerAnswer(ok=False, rank=1, dp_rank=2, error=error)
    assert (answer.is_ok, answer.code, answer.message) == (False, None, "no reason given")
    assert answer.rank_name == "rank 2.1"


async def test_queues_out_of_step_are_called_that(engine, fake):
    fake.garble = GARBLED["another op of one rank"]
    with pytest.raises(EngineGarbled, match=r"answered with \['budget'\]: its worker queues are out of step"):
        await engine.rpc("memory")


async def test_no_connection_is_unreachable(engine, fake):
    fake.down = True
    for ask in (engine.rpc("memory"), engine.get_text("/metrics"), engine.post("/reset_mm_cache")):
        with pytest.raises(EngineUnreachable, match="All connection attempts failed"):
            await ask
    fake.down = False
    assert await engine.rpc("memory")


async def test_a_worker_call_that_the_engine_fails_at_is_remembered(engine, fake):
    """As where no such method is there: not one call more, then."""
    assert not engine.has_rpc_failed
    fake.failing["/collective_rpc"] = 500
    with pytest.raises(EngineRefused, match="answered 500") as caught:
        await engine.rpc("memory")
    assert (caught.value.status, engine.has_rpc_failed) == (500, True)


# --- plain questions ---


async def test_an_engine_that_cannot_be_connected_to_is_unreachable_before_it_is_late():
    """A machine that is gone swallows the handshake: its engine is not there, and is no engine that hangs."""

    waited = []

    async def connect(request: httpx.Request) -> httpx.Response:
        waited.append(request.extensions["timeout"]["connect"])
        raise httpx.ConnectTimeout("no handshake")

    engine = Engine("http://engine:8000", transport=httpx.MockTransport(connect), request_seconds=60.0)
    with pytest.raises(EngineUnreachable, match="no connection in time"):
        await engine.get_text("/metrics")
    await engine.aclose()
    assert all(0.0 < seconds < 60.0 for seconds in waited)
    assert waited


class _Body(httpx.AsyncByteStream):
    """A response that comes in pieces, and does not have to end."""

    def __init__(self, *pieces: bytes, ends: bool = True) -> None:
        self.pieces, self.ends = pieces, ends

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece
        while not self.ends:
            await asyncio.sleep(0)
            yield b"x"


@pytest.mark.parametrize(
    ("body", "headers", "error", "match"),
    [
        (
            _Body(b"x" * (MAX_RESPONSE_BYTES // 2), b"x" * MAX_RESPONSE_BYTES),
            {},
            EngineGarbled,
            "more than 16777216 bytes",
        ),
        (_Body(b"x"), {"content-encoding": "gzip"}, EngineGarbled, "compressed, though"),
        (_Body(b"x", ends=False), {}, EngineUnresponsive, "no answer in time"),
    ],
    ids=["large", "compressed", "endless"],
)
async def test_no_answer_is_read_without_end(body, headers, error, match):
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, stream=body))
    engine = Engine("http://engine:8000", transport=transport, request_seconds=0.2)
    with pytest.raises(error, match=match):
        await engine.get_text("/metrics")
    await engine.aclose()


async def test_no_answer_in_time_is_unresponsive(engine, fake):
    fake.late = {"/metrics", "/reset_mm_cache"}
    for ask in (engine.get_text("/metrics"), engine.post("/reset_mm_cache")):
        with pytest.raises(EngineUnresponsive, match="no answer in time"):
            await ask


@pytest.mark.parametrize(
    ("raised", "mapped"),
    [
        (httpx.ConnectTimeout("slow"), EngineUnreachable),
        (httpx.PoolTimeout("full"), EngineUnresponsive),
        (httpx.RemoteProtocolError("cut"), EngineUnreachable),
        (httpx.ReadError(""), EngineUnreachable),
    ],
)
async def test_foreign_errors_are_mapped_at_the_door(raised, mapped):
    def handler(_):
        raise raised

    async with Engine("http://engine", transport=httpx.MockTransport(handler)) as engine:
        engine.allow_rpc()
        with pytest.raises(mapped):
            await engine.get_json("/version")
        with pytest.raises(EngineError):
            await engine.rpc("memory")


async def test_json_that_is_none_is_none(engine, fake):
    assert await engine.get_json("/version") == {"version": "0.32.0"}
    assert await engine.get_json("/nothing") is None
    assert await engine.get_json("/metrics") is None


async def test_text_with_an_error_status_is_refused(engine):
    with pytest.raises(EngineRefused) as caught:
        await engine.get_text("/nothing")
    assert caught.value.status == 404


async def test_a_post_only_route_is_found_without_acting(engine, fake):
    """405 where it is, 404 where not, 200 where a GET is served."""
    assert await engine.has_post("/reset_mm_cache")
    assert not await engine.has_post("/reset_nothing")
    assert not await engine.has_post("/version")
    assert await engine.exists("/is_paused")
    assert not await engine.exists("/is_nothing")
    assert {call.method for call in fake.calls} == {"GET"}


async def test_a_post_keeps_its_query_string_and_has_no_body(engine, fake):
    answer = await engine.post("/reset_prefix_cache", "device=%5B0%5D&x=a+b")
    assert (answer.status, answer.json_object()) == (200, {"success": True})
    assert (fake.calls[0].query, fake.calls[0].body) == ("device=%5B0%5D&x=a+b", b"")


@pytest.mark.parametrize("body", [b"", b"null", b"[1]", b"ok", b"\xff"])
def test_an_answer_that_is_no_object_is_an_empty_one(body):
    """vLLM answers most resets with an empty 200."""
    assert EngineResponse(200, "text/plain", body).json_object() == {}


async def test_a_proxy_variable_does_not_catch_calls_to_the_neighbour(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    async with Engine("http://127.0.0.1:8000") as engine:
        assert engine._client._mounts == {}


async def test_a_unix_socket_is_an_engine_too():
    async with Engine("unix:/nowhere/vllm.sock") as engine:
        assert engine._client.base_url == "http://localhost"
        with pytest.raises(EngineUnreachable):
            await engine.get_json("/version")
