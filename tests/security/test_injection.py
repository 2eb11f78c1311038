"""Line ends where none belong: in what the sidecar says to the engine, to clients, and to its log."""

from __future__ import annotations

import logging

import pytest

from tests.fakes.engine import FakeEngine
from tests.http.test_control_plane import TOKEN, both_on_ports, sidecar_before

BREAK = "%0d%0aX-Injected:%20yes%0d%0a%0d%0aPOST%20/collective_rpc"


@pytest.mark.parametrize(
    "query", [f"a={BREAK}", f"{BREAK}=1", "mode=now&a=%0aX-Injected:yes", f"reset_external={BREAK}"]
)
async def test_a_query_brings_no_header_to_the_engine(query):
    async with both_on_ports(admin_token=TOKEN) as sidecar:
        known = ("authorization", f"Bearer {TOKEN}")
        status = await sidecar.raw("POST", f"/reset_prefix_cache?{query}", known)
        calls = sidecar.fake.calls
    assert status in {200, 400, 409, 422}
    assert not [call for call in calls if "x-injected" in {name.lower() for name in call.headers}]
    assert not [call for call in calls if call.path == "/collective_rpc" and b"highwater_rpc" not in call.body]


@pytest.mark.parametrize(
    "target",
    [f"/dashboard/{BREAK}", f"/memory/incidents/{BREAK}", f"/memory/snapshots/{BREAK}", f"/memory?since={BREAK}"],
)
async def test_no_answer_gets_a_header_from_its_path(target):
    async with sidecar_before(FakeEngine()) as sidecar:
        answer = await sidecar.client.get(target)
    assert answer.status_code in {404, 422}
    assert "x-injected" not in answer.headers
    assert answer.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("name", ["x-request-id", "authorization", "user-agent", "content-type"])
async def test_no_header_value_makes_a_line_of_the_log(caplog, name):
    caplog.set_level(logging.DEBUG)
    async with sidecar_before(FakeEngine(), engine_port=1) as sidecar:
        for target in (f"/v1/models?x={BREAK}", f"/v1/{BREAK}", "/memory/marks"):
            await sidecar.raw("POST", target, (name, "a\x1b[31mFAKE"), body=b"{}")
    lines = caplog.text.splitlines()
    assert not [line for line in lines if line.startswith(("X-Injected", "FAKE", "POST /collective_rpc"))]
    assert "\x1b" not in caplog.text
