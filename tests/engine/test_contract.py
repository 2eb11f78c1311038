"""The fake engine of the fast tests, held to the real one: the same questions, answers of the same shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from highwater.engine.capabilities import detect
from highwater.engine.client import Engine as EngineClient
from highwater.terminal.demo.engine import DemoEngine
from tests.fakes.engine import FakeEngine

OPS = ("memory", "encoder_cache", "release", "trim", "restore", "snapshot", "no_such_op")


def shape(value: Any) -> Any:
    """A value with its scalars replaced by their kind; null fits any kind, and lists are told by their first item."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if value is None:
        return None
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def differences(fake: Any, real: Any, where: str = "") -> list[str]:
    """Where the fake's shape is not the real one's."""
    if fake is None or real is None:
        return []
    if isinstance(fake, dict) and isinstance(real, dict):
        found = [f"{where}.{key}: only one side has it" for key in sorted(fake.keys() ^ real.keys())]
        return found + [
            d for key in fake.keys() & real.keys() for d in differences(fake[key], real[key], f"{where}.{key}")
        ]
    if isinstance(fake, list) and isinstance(real, list):
        return differences(fake[0], real[0], f"{where}[]") if fake and real else []
    return [] if fake == real else [f"{where}: {fake} is not {real}"]


def patient(url: str) -> EngineClient:
    """A client that a busy machine does not make give up."""
    return EngineClient(url, rpc_deadline_seconds=60, request_seconds=60)


@pytest.fixture
async def clients(engine: DemoEngine) -> Any:
    transport = httpx.ASGITransport(app=FakeEngine(version="0.32.0"))
    async with EngineClient("http://fake", transport=transport) as fake, patient(engine.url) as real:
        fake.allow_rpc()
        real.allow_rpc()
        yield fake, real


@pytest.mark.parametrize("op", OPS)
async def test_a_worker_answers_in_the_same_shape(clients: Any, op: str) -> None:
    fake, real = [shape((await client.rpc(op))[0]) for client in clients]
    assert differences(fake, real) == []


async def test_recorders_are_started_and_stopped_alike(clients: Any, tmp_path: Path) -> None:
    told: list[list[Any]] = []
    for number, client in enumerate(clients):
        payload = {"directory": str(tmp_path / str(number)), "instance": "00112233445566bb"}
        started = [(await client.rpc("recorder_start", payload))[0] for _ in range(2)]
        stop = {"instance": payload["instance"]}
        stopped = [(await client.rpc("recorder_stop", stop))[0] for _ in range(2)]
        assert [answer["already"] for answer in started] == [False, True]
        assert [answer["stopped"] for answer in stopped] == [True, False]
        assert {Path(answer["path"]).name for answer in started} == {
            f"highwater-00112233445566bb-{answer['pid']}.ring" for answer in started
        }
        told.append([shape(answer) for answer in (*started, *stopped)])
    fake, real = told
    assert [differences(*pair) for pair in zip(fake, real, strict=True)] == [[]] * 4


@pytest.mark.parametrize("path", ["/version", "/is_paused", "/is_sleeping"])
async def test_a_question_is_answered_in_the_same_shape(clients: Any, path: str) -> None:
    fake, real = [shape(await client.get_json(path)) for client in clients]
    assert fake == real


@pytest.mark.parametrize("path", ["/reset_mm_cache", "/reset_encoder_cache", "/reset_prefix_cache"])
async def test_a_reset_is_answered_alike(clients: Any, path: str) -> None:
    fake, real = [await client.post(path) for client in clients]
    assert (fake.status, shape(fake.json_object())) == (real.status, shape(real.json_object()))


async def test_detection_finds_the_same(clients: Any) -> None:
    fake, real = [(await detect(client)).public() for client in clients]
    del fake["tensor_parallel"], real["tensor_parallel"]  # as it was configured
    assert fake == real


async def test_routes_are_probed_alike(clients: Any) -> None:
    for path in ("/collective_rpc", "/reset_mm_cache", "/nothing_here"):
        fake, real = [await client.has_post(path) for client in clients]
        assert fake == real, path


async def test_a_result_is_one_ascii_json_text(clients: Any) -> None:
    for client in clients:
        response = await client._client.post("/collective_rpc", json={"method": "highwater_rpc", "args": ["memory"]})
        (result,) = response.json()["results"][:1]
        assert result.isascii()
        assert json.loads(result)["op"] == "memory"
