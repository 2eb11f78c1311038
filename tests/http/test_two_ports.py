"""Two ports, one for the engine's API and one for the control plane; and a sidecar without a data plane."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from highwater.act.rules import PolicySettings
from highwater.server.main import create_app
from highwater.server.settings import Settings
from highwater.server.sidecar import start_line
from highwater.terminal.cli import main
from highwater.terminal.demo.process import answers, free_port
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.fakes.engine import FakeEngine
from tests.http.conftest import Wire, serving, status_of
from tests.http.test_control_plane import OWN_PATHS, TOKEN, alive
from tests.http.test_restart import SlowEngine, ended
from tests.patience import LIMIT_SECONDS, patiently, until

GATE_REMEDIES = ("reset_mm_cache", "reset_prefix_cache")
UPGRADE = (("connection", "upgrade"), ("upgrade", "websocket"), ("sec-websocket-key", "x"))
PATIENCE = 60.0
shares = pytest.mark.asyncio(loop_scope="module")


@dataclass
class TwoPorts:
    """A sidecar before a fake engine, and a client of each of the three."""

    fake: FakeEngine
    app: Any
    engine: httpx.AsyncClient
    data: httpx.AsyncClient
    control: httpx.AsyncClient

    async def raw(self, client: httpx.AsyncClient, target: str, *headers: tuple[str, str]) -> int:
        return await status_of(client.base_url.port, "GET", target, *headers)


@contextlib.asynccontextmanager
async def two_ports(fake: FakeEngine | None = None, **options: Any) -> AsyncIterator[TwoPorts]:
    fake = fake or FakeEngine()
    quiet = {"poll_seconds": 60.0, "policy": PolicySettings(rules=()), "admin_token": TOKEN, **options}
    async with contextlib.AsyncExitStack() as stack:

        async def client(port: int) -> httpx.AsyncClient:
            url = f"http://127.0.0.1:{port}"
            made = httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=PATIENCE)  # noqa: S501 - no TLS
            return await stack.enter_async_context(made)

        engine = await stack.enter_async_context(serving(fake))
        app = create_app(Settings(engine_url=f"http://127.0.0.1:{engine}", port=8001, **quiet))
        await stack.enter_async_context(alive(app))
        ports = [await stack.enter_async_context(serving(app, protocol=port.protocol)) for port in app.ports]
        await app.services.poller.poll()
        yield TwoPorts(fake, app, await client(engine), await client(ports[0]), await client(ports[-1]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both():
    async with two_ports(control_port=8002) as running:
        yield running


# --- the data port ---


def concrete(path: str) -> str:
    """A path of the table, with something in place of what varies."""
    return re.sub(r"\{\w+\}", "x", path)


@shares
@pytest.mark.parametrize(
    ("method", "path"),
    [(method.upper(), concrete(path)) for path, methods in OWN_PATHS.items() for method in sorted(methods)]
    + [("GET", path) for path in ("/dashboard", "/dashboard/app.js", "/memory/openapi.json", "/docs/runbooks/x.html")],
)
async def test_none_of_our_paths_is_on_the_data_port(both, method, path):
    if path == "/metrics":
        return
    unknown = await both.data.request(method, "/nope")
    asked = len(both.fake.calls)
    got = await both.data.request(method, path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert (got.status_code, got.json()["error"]["type"]) == (404, unknown.json()["error"]["type"])
    assert "own paths are on its control port (control_port)" in got.text
    assert "own paths are on its control port (control_port)" in unknown.text
    assert len(both.fake.calls) == asked


@shares
@pytest.mark.parametrize("path", ["/metrics", "/health", "/version", "/load", "/v1/models"])
async def test_the_data_port_answers_as_the_engine_does(both, path):
    """Routers that balance by the engine's metrics see what they would see without a sidecar."""
    direct, through = await both.engine.get(path), await both.data.get(path)
    assert (through.status_code, through.content) == (direct.status_code, direct.content)
    assert "highwater_" not in through.text
    assert both.fake.calls[-1].path == path


@shares
async def test_the_engines_metrics_can_only_be_read(both):
    assert (await both.data.post("/metrics")).status_code == 403
    assert [await both.raw(both.data, path) for path in ("/metrics/", "/%6detrics")] == [403, 403]


async def test_no_setting_opens_a_reset_on_the_data_port():
    """The engine's own would run there without a token."""
    names = ("/reset_mm_cache", "/reset_prefix_cache", "/reset_encoder_cache", "/server_info")
    async with two_ports(control_port=8002, proxy={"extra_paths": names}) as both:
        for name in names:
            assert (await both.data.post(name)).status_code == 404
        asked = len(both.fake.calls)
        assert (await both.data.get("/server_info")).status_code == 404
        assert await both.raw(both.data, "/server_info", *UPGRADE) == 404
        assert both.fake.resets() == []
        assert len(both.fake.calls) == asked


# --- the control port ---


@shares
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/health", "/version", "/tokenize", "/nope"])
async def test_nothing_is_proxied_on_the_control_port(both, path):
    asked = len(both.fake.calls)
    for answer in (await both.control.get(path), await both.control.post(path, json={})):
        assert answer.status_code == 404
        assert "port 8001 (port)" in answer.json()["error"]["message"]
    assert len(both.fake.calls) == asked


@shares
async def test_no_websocket_is_opened_on_the_control_port(both):
    assert [await both.raw(both.control, path, *UPGRADE) for path in ("/v1/realtime", "/memory")] == [404, 404]


@shares
async def test_a_malformed_path_is_400_on_the_control_port_too(both):
    assert [await both.raw(both.control, path) for path in ("/memory/../livez", "//memory")] == [400, 400]


@shares
@pytest.mark.parametrize("path", ["/memory", "/metrics", "/livez", "/readyz", "/health/deep", "/policy", "/dashboard"])
async def test_the_control_plane_is_on_the_control_port(both, path):
    answer = await both.control.get(path)
    assert answer.status_code == 200
    assert "highwater_" in answer.text or path != "/metrics"


@shares
async def test_control_calls_need_the_token_there(both):
    answer = await both.control.post("/memory/marks", json={"name": "a"})
    assert (answer.status_code, "http://127.0.0.1:8002/memory/marks" in answer.text) == (401, True)
    token = {"Authorization": f"Bearer {TOKEN}"}
    assert (await both.control.post("/memory/marks", json={"name": "a"}, headers=token)).status_code == 201


@shares
async def test_who_takes_every_connection_of_the_data_port_takes_none_of_the_control_port(both):
    proxy = both.app.protocol.args[0]
    limit, proxy.clients.limit = proxy.clients.limit, 1
    wires = [Wire(*await asyncio.open_connection("127.0.0.1", both.data.base_url.port)) for _ in range(40)]
    try:
        await wires[-1].request("GET", "/v1/models")
        with contextlib.suppress(ConnectionError):
            assert (await patiently(wires[-1].answer())).status == 503
        assert (await both.control.get("/livez")).status_code == 200
    finally:
        proxy.clients.limit = limit
        for wire in wires:
            await wire.leave()


async def test_the_tokens_file_has_the_control_ports_number(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with two_ports(control_port=8002, admin_token=None) as both:
        (file,) = (tmp_path / "highwater").iterdir()
        assert file.name == "8002.token"
        assert "highwater token --port 8002" in (await both.control.post("/memory/marks")).text


# --- no data plane ---


@pytest.fixture
async def watching():
    """Proxies nothing; the engine has its development mode, so remedies can be asked for."""
    rule = {"name": "cache", "signal": "encoder_cache_bytes", "high_water": 2**30, "low_water": 0}
    rules = [{**rule, "remedies": ["reset_prefix_cache", "release"]}]
    policy = PolicySettings.model_validate({"rules": rules, "mode": "act"})
    async with two_ports(proxy={"enabled": False}, policy=policy) as running:
        yield running


async def test_without_a_data_plane_one_port_serves_the_control_plane_alone(watching):
    assert [(port.setting, port.number) for port in watching.app.ports] == [("port", 8001)]
    assert (await watching.data.get("/memory")).status_code == 200
    asked = len(watching.fake.calls)
    answer = await watching.data.post("/v1/chat/completions", json={})
    assert (answer.status_code, "proxy.enabled is false" in answer.text) == (404, True)
    assert len(watching.fake.calls) == asked


async def test_without_a_data_plane_what_needs_the_gate_is_refused_with_the_reason(watching):
    """It cannot hold requests that pass elsewhere. What needs no gate is done, and what an operator wants now."""
    token = {"Authorization": f"Bearer {TOKEN}"}

    async def reclaim(*remedies: str, **options: object) -> list[dict[str, Any]]:
        body = {"remedies": list(remedies), **options}
        return (await watching.data.post("/memory/reclaim", json=body, headers=token)).json()["results"]

    for name in GATE_REMEDIES:
        (refused,) = await reclaim(name)
        assert refused["outcome"] == "refused"
        assert "requests cannot be held here" in refused["reason"]
        (planned,) = await reclaim(name, dry_run=True)
        assert (planned["outcome"], planned["reason"]) == ("refused", refused["reason"])
    assert watching.fake.resets() == []
    assert [done["outcome"] for done in await reclaim("release", "reset_encoder_cache")] == ["done", "done"]
    assert [done["outcome"] for done in await reclaim("reset_prefix_cache", mode="now")] == ["done"]


async def test_without_a_data_plane_the_policy_passes_over_what_needs_the_gate(watching):
    (rule,) = (await watching.data.get("/policy")).json()["status"]["rules"]
    unavailable = {remedy["name"]: remedy["unavailable"] for remedy in rule["remedies"]}
    assert "requests cannot be held here" in unavailable["reset_prefix_cache"]
    assert unavailable["release"] is None


async def test_who_only_names_a_recorder_folder_is_told_why_nothing_is_passed_on(tmp_path):
    settings = Settings(recorder_dir=tmp_path, admin_token=TOKEN)
    assert "proxy.enabled=true" in start_line(settings)
    app = create_app(settings)
    async with alive(app), serving(app) as port, httpx.AsyncClient(trust_env=False, timeout=LIMIT_SECONDS) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/v1/models")
    assert answer.status_code == 404
    assert "proxy.enabled=true" in answer.json()["error"]["message"]


async def test_without_a_data_plane_the_control_port_is_the_only_one_where_it_is_set():
    async with two_ports(proxy={"enabled": False}, control_port=8002) as running:
        assert [(port.setting, port.number) for port in running.app.ports] == [("control_port", 8002)]


# --- as a process ---


@contextlib.asynccontextmanager
async def process(folder: Path, engine: int, **settings: str) -> AsyncIterator[DemoSidecar]:
    given = {"HIGHWATER_CONTROL_PORT": str(free_port()), "XDG_STATE_HOME": str(folder), **settings}
    sidecar = DemoSidecar(f"http://127.0.0.1:{engine}", folder=folder, settings=given)
    try:
        await asyncio.to_thread(sidecar.start)
        yield sidecar
    finally:
        await asyncio.to_thread(sidecar.stop)


def ran(*arguments: str, **environ: str) -> Result:
    clean: dict[str, str | None] = {name: None for name in os.environ if name.startswith("HIGHWATER_")}
    return CliRunner().invoke(main, arguments, env=clean | environ, catch_exceptions=False)


@pytest.mark.slow("`highwater serve` as a process")
async def test_every_command_finds_the_control_port(tmp_path):
    async with serving(FakeEngine()) as engine, process(tmp_path, engine) as sidecar:
        environ = {
            "HIGHWATER_PORT": str(sidecar.port),
            "HIGHWATER_CONTROL_PORT": str(sidecar.control_port),
            "XDG_STATE_HOME": str(tmp_path),
        }
        for command in (["status"], ["top", "--once"], ["check"], ["mark", "x"], ["token"], ["healthcheck"]):
            result = await asyncio.to_thread(ran, *command, **environ)
            assert result.exit_code in ((0, 1, 2) if command[0] in ("check", "status") else (0,)), result.output
        token = await asyncio.to_thread(ran, "token", **environ)
        assert token.output.strip() == (tmp_path / "highwater" / f"{sidecar.control_port}.token").read_text().strip()
        for command in (["status"], ["top", "--once"], ["check"], ["mark", "x"]):
            wrong = await asyncio.to_thread(ran, *command, "--url", sidecar.url, XDG_STATE_HOME=str(tmp_path))
            assert wrong.exit_code == 3, wrong.output
            assert "its control port (control_port): name that with --url or HIGHWATER_URL" in wrong.output


@pytest.mark.slow("`highwater serve` as a process")
async def test_while_requests_finish_probes_are_answered(tmp_path):
    """SIGTERM within a stream: the data port takes nobody new, and the control port says that the sidecar stops."""
    engine = SlowEngine()
    async with (
        serving(engine) as port,
        process(tmp_path, port) as sidecar,
        httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client,
    ):
        async with client.stream("POST", f"{sidecar.url}/v1/completions", json={}) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == b"first "
            for pid in sidecar.pids():
                os.kill(pid, signal.SIGTERM)

            async def is_stopping() -> bool:
                reason = (await client.get(f"{sidecar.control_url}/readyz")).json()["reason"]
                return reason == "the sidecar is stopping" and not await asyncio.to_thread(
                    answers, sidecar.port, "/v1/models"
                )

            await until(is_stopping, pause_seconds=0.02)
            assert (await client.get(f"{sidecar.control_url}/livez")).status_code == 200
            assert "highwater_proxy_requests_in_flight 1.0" in (await client.get(f"{sidecar.control_url}/metrics")).text
            engine.goes_on.set()
            assert [piece async for piece in pieces] == [b"last"]
        await ended(sidecar)
    assert engine.ended == ["whole"]


@pytest.mark.slow("`highwater serve` as a process")
@pytest.mark.parametrize("taken", ["port", "control_port"])
async def test_a_port_that_is_in_use_is_named_by_its_setting(taken):
    ports = {"port": free_port(), "control_port": free_port()}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports[taken] = listener.getsockname()[1]
        words = [word for name, number in ports.items() for word in (f"--{name.replace('_', '-')}", str(number))]
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "highwater", "serve", "--engine-url", "http://127.0.0.1:9", *words),
            env={name: value for name, value in os.environ.items() if not name.startswith("HIGHWATER_")},
            stderr=asyncio.subprocess.PIPE,
        )
        _, told = await patiently(started.communicate())
    assert started.returncode == 2, told.decode()
    (line,) = told.decode().splitlines()
    assert f"{taken}: cannot listen on 127.0.0.1 port {ports[taken]}" in line
    assert "address already in use" in line
    assert f"set {taken} to a port that is free" in line
