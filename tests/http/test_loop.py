"""An engine_url that leads to the sidecar itself: each request would become another one, until sockets run out."""

from __future__ import annotations

import contextlib
import logging
import re
import socket

import httpx
import pytest

from highwater.process.errors import SettingsError
from highwater.server.main import create_app
from highwater.server.settings import Settings, load
from tests.fakes.engine import FakeEngine
from tests.http.conftest import serving
from tests.http.test_control_plane import alive, sidecar_before
from tests.patience import LIMIT_SECONDS


@contextlib.asynccontextmanager
async def before_itself(**settings):
    """A sidecar whose engine has its own address; which no setting tells, as its socket came from elsewhere."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = create_app(Settings(engine_url=f"http://127.0.0.1:{port}", trust_loopback=True, poll_seconds=60, **settings))
    async with (
        alive(app),
        serving(app, listener=listener),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=LIMIT_SECONDS) as client,
    ):
        yield app, client


async def test_a_request_goes_round_once(caplog):
    async with before_itself() as (app, client):
        for _ in range(3):
            answer = await client.get("/v1/models")
            assert answer.status_code == 508
            assert "leads back to this sidecar itself; set engine_url" in answer.json()["error"]["message"]
        page = (await client.get("/metrics?engine=0")).text
    (refused,) = re.findall(r'^highwater_proxy_refused_total\{reason="loop"\} (.*)$', page, re.MULTILINE)
    assert 3 <= float(refused) < 20  # the first poll asks too
    said = [record for record in caplog.records if "leads back" in record.getMessage()]
    assert {record.levelno for record in said} == {logging.WARNING}
    assert len(app.services.history.events()) < 10


async def test_the_report_says_so():
    async with before_itself() as (app, client):
        await app.services.poller.poll()
        hint = (await client.get("/memory")).json()["engine"]["hint"]
        assert "leads back to this sidecar itself; set engine_url to vLLM's own address" in hint
        assert (await client.get("/readyz")).json()["reason"] == hint


async def test_an_engine_of_its_own_is_none():
    fake = FakeEngine()
    async with serving(fake) as port, sidecar_before(fake, engine_port=port) as running:
        for _ in range(3):
            assert (await running.client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"engine_url": "http://127.0.0.1:8001"}, "port"),
        ({"engine_url": "http://localhost:8001"}, "port"),
        ({"engine_url": "http://[::1]:9001", "host": "::", "port": "9001"}, "port"),
        ({"engine_url": "http://127.0.0.1:9001", "host": "0.0.0.0", "port": "9001"}, "port"),
        ({"engine_url": "http://gpu-7", "host": "gpu-7", "port": "80"}, "port"),
        ({"control_port": "8000"}, "control_port"),
        ({"port": "8000"}, "port"),
    ],
)
def test_what_is_known_at_start_is_refused_there(flags, key):
    with pytest.raises(SettingsError) as caught:
        load(flags, environ={})
    (problem,) = caught.value.problems
    assert problem.startswith(f"{key}: ")
    assert "the sidecar would pass requests on to itself; set engine_url" in problem


@pytest.mark.parametrize(
    "flags",
    [
        {"engine_url": "http://10.0.0.7:8001"},
        {"engine_url": "http://10.0.0.7:8001", "host": "0.0.0.0"},
        {"engine_url": "http://127.0.0.2:8001", "host": "127.0.0.3"},
        {"engine_url": "unix:/run/vllm.sock"},
    ],
)
def test_another_machine_may_have_the_same_port(flags):
    assert load(flags, environ={}).engine_url == flags["engine_url"]
