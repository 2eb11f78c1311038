"""``GET /memory/findings``: what is wrong, by one name on every face; open to all, and never a call of a worker."""

from __future__ import annotations

import asyncio
import json

from click.testing import CliRunner

from highwater.terminal.cli import main
from tests.fakes.engine import FakeEngine
from tests.http.test_control_plane import sidecar_before


async def test_a_finding_has_the_same_name_on_every_face(tmp_path):
    fake = FakeEngine()
    fake.serve_images()
    fake.budget = {"vllm_version": "0.32.0", "environment": {}, "limits": {"sleep_mode": False}}
    async with sidecar_before(fake, incidents={"folder": tmp_path}) as running:
        before = len(running.fake.ops())
        answer = (await running.client.get("/memory/findings")).json()
        assert len(running.fake.ops()) == before
        budget = (await running.client.get("/memory/budget")).json()
        host = (await running.client.get("/memory/host")).json()
        url = f"http://127.0.0.1:{running.port}"
        checked = await asyncio.to_thread(CliRunner().invoke, main, ["check", "--url", url, "--json"])
    found = {(one["where"], one["name"]): one for one in answer["findings"]}
    assert set(found["start", "without_expandable_segments"]) == {
        *("name", "weight", "where", "title", "text", "figures", "advice"),
    }
    assert {name for where, name in found if where == "start"} == {one["name"] for one in budget["findings"]}
    assert {name for where, name in found if where == "host"} == {one["name"] for one in host["findings"]}
    checks = {one["name"]: one["finding"] for one in json.loads(checked.output)["findings"]}
    assert checks["start"] == "without_expandable_segments"
    assert {one["name"]: one["finding"] for one in answer["checks"]}.items() <= checks.items()
    assert ("set-up", checks["incidents"]) in found
    assert ("set-up", "without_expandable_segments") not in found
    weights = [one["weight"] for one in answer["findings"]]
    assert weights == sorted(weights, key=["likely", "clue", "note"].index)


async def test_a_path_that_cannot_be_read_is_warned_of(tmp_path):
    missing = tmp_path / "none"
    async with sidecar_before(FakeEngine(extension=None), recorder_dir=missing, engine_log=missing) as running:
        checks = {one["name"]: one for one in (await running.client.get("/memory/findings")).json()["checks"]}
        assert checks["recorder"]["text"].startswith(f"recorder_dir: {missing} cannot be listed: no such file")
        assert checks["incidents"]["text"].startswith(f"engine_log: {missing} cannot be read: no such file")
        assert {checks[name]["level"] for name in ("recorder", "incidents")} == {"warn"}
