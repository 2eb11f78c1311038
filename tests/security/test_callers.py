"""Who may make the sidecar act: by token, by address where that is trusted, and never by a GET."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from highwater.watch.history import MAX_WATCHERS_PER_PEER
from tests.fakes.engine import FakeEngine
from tests.http.conftest import Wire
from tests.http.test_control_plane import TOKEN, both_on_ports, error, sidecar_before
from tests.patience import patience
from tests.unit.http.test_access import access, asked, status

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What callers from several addresses got, in a network of its own."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    command = [unshare, "--net", sys.executable, "-m", "tests.security.elsewhere", str(tmp_path_factory.mktemp("net"))]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def test_trust_in_loopback_lets_in_nobody_from_elsewhere(answered):
    told = answered["trusting elsewhere"]
    assert {path: code for path, code in told.items() if code != 401} == {"GET /memory": 200}
    assert 401 not in answered["trusting loopback"].values()


def test_trust_in_loopback_lets_in_no_service_mesh(answered):
    assert {path: code for path, code in answered["trusting mesh"].items() if code != 401} == {"GET /memory": 200}


@pytest.mark.parametrize("caller", ["elsewhere", "loopback", "mesh"])
def test_nobody_without_the_token_may(answered, caller):
    told = answered[f"guarded {caller}"]
    assert {path: code for path, code in told.items() if code != 401} == {"GET /memory": 200}
    assert {401, 403}.isdisjoint(answered["guarded elsewhere with token"].values())


# What nginx sends by `proxy_pass http://127.0.0.1:8001;` for a client of any address: nothing in it says that it is a
# proxy.
RELAYED = ("connection", "close")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/memory/marks"), ("PUT", "/policy"), ("GET", "/memory/snapshots")]
)
async def test_a_reverse_proxy_on_this_machine_lets_in_nobody(method, path):
    async with both_on_ports(trust_loopback=False) as sidecar:
        body = b'{"name": "x"}' if "marks" in path else b'{"mode": "observe"}'
        host = ("Host", f"127.0.0.1:{sidecar.port}")
        answer = await sidecar.client.request(method, path, content=body, headers=dict([host, RELAYED]))
        assert error(answer)[0] == 401
        assert sidecar.app.services.history.marks == {}


def operations(page: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Every method and path of the page, and whether it says that the token is needed."""
    return [
        (method.upper(), path.replace("{name}", "x").replace("{incident_id}", "x"), "security" in operation)
        for path, methods in page["paths"].items()
        for method, operation in methods.items()
    ]


# A question with a body: it computes, and neither calls the engine nor changes anything.
COMPUTES_ONLY = {("POST", "/memory/plan")}


async def test_every_path_that_acts_is_guarded():
    """By the schema, so that a new path is in this test: all but GET, and what may hold stack traces or tokens."""
    async with sidecar_before(FakeEngine(), admin_token=TOKEN) as sidecar:
        found = operations((await sidecar.client.get("/memory/openapi.json")).json())
        guarded = {(method, path) for method, path, needs_token in found if needs_token}
        assert {(method, path) for method, path, _ in found if method != "GET"} - guarded == COMPUTES_ONLY
        assert {path for method, path in guarded if method == "GET"} == {
            *("/memory/snapshots", "/memory/snapshots/x", "/server_info")
        }
        answers = [(method, path, 401) for method, path in guarded]
        # What no route serves is no matter of tokens.
        answers += [(method, path, 405) for method in ("PUT", "DELETE", "PATCH") for path in ("/memory", "/livez")]
        for method, path, status in answers:  # each before its body is read, which does not come
            async with patience():
                assert await sidecar.raw(method, path, ("content-length", "1000000")) == status, f"{method} {path}"


@pytest.mark.parametrize("body", [b"{not json", b'{"mode": 1}', b"[" + b"{}," * 400_000 + b"{}]"], ids=len)
async def test_a_body_is_not_judged_before_the_caller(body):
    """401 and not 400, 422 or 413: nobody who may not act learns anything, or makes work, by a body."""
    async with sidecar_before(FakeEngine(), admin_token=TOKEN) as sidecar:
        answer = await sidecar.client.put("/policy", content=body, headers={"Content-Type": "application/json"})
        assert error(answer)[0] == 401


async def test_no_get_makes_the_engine_do_anything():
    """An engine that fetches a client's image URL can be sent here: it then comes from loopback, with a GET."""
    async with both_on_ports(trust_loopback=False) as sidecar:
        schema = (await sidecar.client.get("/memory/openapi.json")).json()["paths"]
        before = len(sidecar.fake.calls)
        for path in [*schema, "/is_paused", "/is_sleeping", "/dashboard"]:
            target = path.replace("{name}", "x").replace("{incident_id}", "x")
            if path != "/memory/events":
                await sidecar.client.get(target)
            await sidecar.client.head(target)
        calls = sidecar.fake.calls[before:]
        assert [call.path for call in calls if call.method == "POST"] == []
        assert "/server_info" not in {call.path for call in calls}


@pytest.mark.parametrize("target", ["/v1/models", "/health"])
async def test_the_admin_token_never_reaches_the_engine(target):
    async with both_on_ports(admin_token=TOKEN) as sidecar:
        before = len(sidecar.fake.asked(target))
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Mine": "kept"}
        await sidecar.client.get(target, headers=headers)
        call = sidecar.fake.asked(target)[before]
        assert (call.headers["x-mine"], "authorization" in call.headers) == ("kept", False)
        assert TOKEN not in str(sidecar.fake.calls)


async def test_a_call_that_is_denied_leaves_a_trace(caplog):
    async with sidecar_before(FakeEngine(), admin_token=TOKEN) as sidecar:
        for number in range(20):
            await sidecar.client.post("/memory/reclaim", headers={"Authorization": f"Bearer guess-{number}"})
        # Paths that are open all the same, and would tell whether a guess was right.
        for path in ("/memory/encoder-cache", "/memory/events"):
            headers = {"Authorization": "Bearer guess-too", "Accept": "text/event-stream"}
            async with sidecar.client.stream("GET", path, headers=headers) as answer:
                assert answer.status_code == 200
        await sidecar.client.put("/policy")
        page = (await sidecar.client.get("/metrics")).text
    assert 'highwater_control_denied_total{reason="wrong_token"} 22.0' in page
    assert 'highwater_control_denied_total{reason="no_token"} 1.0' in page
    assert 'highwater_control_denied_total{reason="closed"} 0.0' in page
    lines = [record.getMessage() for record in caplog.records if "denied" in record.getMessage()]
    assert 2 <= len(lines) < 10
    assert all("from 127.0.0.1" in line for line in lines)
    assert "guess" not in caplog.text


@pytest.mark.parametrize("by", ["token", "loopback"])
@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("POST", "/memory/marks", {"name": "m"}, "mark"),
        ("POST", "/memory/reclaim", {"remedies": ["release"]}, "reset"),
        ("POST", "/memory/encoder-cache/restore", None, "reset"),
        ("POST", "/reset_encoder_cache", None, "reset"),
        ("PUT", "/policy", {"mode": "observe"}, "policy"),
    ],
)
async def test_an_event_says_who_asked_for_it(method, path, body, kind, by):
    async with sidecar_before(FakeEngine(), admin_token=TOKEN, trust_loopback=True) as sidecar:
        sidecar.app.services.history.record("state", "by itself")
        headers = {"Authorization": f"Bearer {TOKEN}"} if by == "token" else {}
        assert (await sidecar.client.request(method, path, json=body, headers=headers)).is_success
        listed = await sidecar.client.get("/memory/events")
    events = listed.json()["events"]
    assert [event["caller"] for event in events if event["kind"] == kind] == [{"address": "127.0.0.1", "by": by}]
    assert [event["caller"] for event in events if event["summary"] == "by itself"] == [None]
    assert TOKEN not in listed.text


async def test_an_operator_can_follow_the_events_whatever_strangers_do():
    live = ("accept", "text/event-stream")
    async with sidecar_before(FakeEngine(), admin_token=TOKEN) as sidecar, contextlib.AsyncExitStack() as stack:

        async def follow(*headers: tuple[str, str]) -> int:
            wire = Wire(*await asyncio.open_connection("127.0.0.1", sidecar.port))
            stack.push_async_callback(wire.leave)
            await wire.request("GET", "/memory/events", live, *headers)
            return (await wire.head()).status

        async with patience():
            told = await asyncio.gather(*(follow() for _ in range(MAX_WATCHERS_PER_PEER + 4)))
            assert sorted(told) == [200] * MAX_WATCHERS_PER_PEER + [503] * 4
            assert await follow(("authorization", f"Bearer {TOKEN}")) == 200


@pytest.mark.parametrize(
    "given", ["", "Bearer", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}", f"Basic {TOKEN}", "Bearer é"]
)
def test_every_token_is_compared_in_constant_time(monkeypatch, given):
    compared: list[bytes] = []
    constant = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return constant(left, right)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    code = status(access(), asked(authorization=given))
    assert (compared, code) == ([TOKEN.encode()], 200 if given == f"Bearer {TOKEN}" else 401)
