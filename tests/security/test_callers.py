"""Who may make the sidecar act: by address, by token, and never by a GET."""

from __future__ import annotations

import hmac
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.routes.access import Access
from tests.fakes.engine import FakeEngine
from tests.http.test_control_plane import TOKEN, both_on_ports, error, sidecar_before
from tests.unit.test_access import asked, status

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


def test_without_a_token_nobody_from_elsewhere_may(answered):
    """Whatever Host and Origin say; to read is open."""
    assert {path: code for path, code in answered["open elsewhere"].items() if code != 403} == {"GET /memory": 200}
    assert 403 not in answered["open loopback"].values()


def test_without_a_token_a_service_mesh_may_not(answered):
    """Its sidecar connects from an address of loopback for everybody in the mesh."""
    assert {path: code for path, code in answered["open mesh"].items() if code != 403} == {"GET /memory": 200}


@pytest.mark.parametrize("caller", ["elsewhere", "loopback", "mesh"])
def test_with_a_token_nobody_without_it_may(answered, caller):
    """The machine itself neither: in a pod, a port-forward comes from loopback."""
    told = answered[f"guarded {caller}"]
    assert {path: code for path, code in told.items() if code != 401} == {"GET /memory": 200}
    assert {401, 403}.isdisjoint(answered["guarded elsewhere with token"].values())


async def test_every_path_that_acts_is_guarded():
    """By the schema, so that a new path is in this test: all but GET, and what may hold stack traces."""
    async with sidecar_before(FakeEngine(), admin_token=TOKEN) as sidecar:
        schema = (await sidecar.client.get("/memory/openapi.json")).json()["paths"]
        acting = [(method, path) for path, methods in schema.items() for method in methods if method != "get"]
        acting += [("get", path) for path in schema if "snapshot" in path and "get" in schema[path]]
        assert len(acting) >= 10
        for method, path in acting:
            answer = await sidecar.client.request(method, path.replace("{name}", "x"))
            assert error(answer)[0] == 401, f"{method} {path}"


async def test_no_get_makes_the_engine_do_anything():
    """An engine that fetches a client's image URL can be sent here: it then comes from loopback, with a GET."""
    acting = ("release", "trim", "restore", "snapshot")
    async with both_on_ports() as sidecar:
        schema = (await sidecar.client.get("/memory/openapi.json")).json()["paths"]
        before = len(sidecar.fake.calls)
        for path in [*schema, "/server_info", "/is_paused", "/is_sleeping", "/dashboard"]:
            target = path.replace("{name}", "x").replace("{incident_id}", "x")
            if path != "/memory/events":
                await sidecar.client.get(target)
            await sidecar.client.head(target)
        calls = sidecar.fake.calls[before:]
        assert {call.path for call in calls if call.method == "POST"} <= {"/collective_rpc"}
        assert not any(f'"{op}"'.encode() in call.body for call in calls for op in acting)


@pytest.mark.parametrize(
    "given", ["", "Bearer", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}", f"Basic {TOKEN}", "Bearer é"]
)
def test_every_token_is_compared_in_constant_time(monkeypatch, given):
    """The right one, one that begins like it, and none at all take the same way."""
    compared: list[bytes] = []
    constant = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return constant(left, right)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    code = status(Access(TOKEN), asked(authorization=given))
    assert (compared, code) == ([TOKEN.encode()], 200 if given == f"Bearer {TOKEN}" else 401)
