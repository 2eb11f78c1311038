"""GET and PUT /policy: shown whole, changed whole or not at all, and kept where it can be."""

from __future__ import annotations

import errno
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from highwater.act.governor import PolicyStore
from highwater.act.rules import PolicySettings
from highwater.http.access import Access
from highwater.http.control import router
from highwater.http.metrics import Counters
from highwater.http.problems import answer_problems
from highwater.process.admin_token import AdminToken
from highwater.process.state_file import StateFile
from tests.fakes.engine import core_on
from tests.fakes.raising import raising

RULE = {"name": "cache", "signal": "encoder_cache_bytes", "high_water": 2e9, "low_water": 1e9}
WATERS = {"high_water": 0.9, "low_water": 0.8}
CONFIGURED = PolicySettings(rules=())
WORDS = ("mode", "source", "kept", "kept_in")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state.json"


@asynccontextmanager
async def sidecar(path: Path | None, configured: PolicySettings = CONFIGURED, token: str | None = None):
    """A client of a sidecar that starts with that file and configuration, and its core."""
    store = PolicyStore(StateFile(path), configured)
    core = core_on(rules=store.in_force.rules, mode=store.in_force.mode)
    app = FastAPI()
    control = Access(AdminToken(token or "none-is-asked-for", None), port=8001, trust_loopback=token is None)
    exporter = SimpleNamespace(counters=Counters())  # tests/http/test_scrapers.py has its part
    parts = {"governor": core.governor, "history": core.history, "policy": store, "control": control}
    app.state.services = SimpleNamespace(**parts, exporter=exporter)
    app.include_router(router)
    answer_problems(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client, core
    await core.engine.aclose()


def told(answer: httpx.Response) -> tuple:
    body = answer.json()
    return (answer.status_code, *(body[word] for word in WORDS), [rule["name"] for rule in body["rules"]])


async def test_the_configured_policy_is_shown_as_such(path):
    async with sidecar(path) as (client, _):
        answer = await client.get("/policy")
    assert told(answer) == (200, "act", "settings", False, None, [])
    assert answer.json()["status"] == {
        "mode": "act",
        "level": "calm",
        "summary": "there are no rules: nothing is given back by itself",
        "rules": [],
        "actions_last_hour": 0,
        "acts": [],
    }
    assert answer.json()["last_decisions"] == []


async def test_a_change_is_kept_and_survives_a_restart(path):
    async with sidecar(path) as (client, core):
        put = await client.put("/policy", json={"mode": "observe", "rules": [RULE]})
        assert told(put) == told(await client.get("/policy"))
        assert core.summaries("policy") == [f"policy changed: mode observe, rules cache; kept in {path}"]
        assert (core.governor.mode, [rule.name for rule in core.governor.rules]) == ("observe", ["cache"])
    assert told(put) == (200, "observe", "put", True, str(path), ["cache"])
    async with sidecar(path) as (client, _):
        assert told(await client.get("/policy")) == told(put)
    async with sidecar(path, PolicySettings(mode="observe", rules=())) as (client, _):
        assert told(await client.get("/policy")) == (200, "observe", "settings", False, None, [])


async def test_without_a_state_file_the_answer_says_that_it_is_not_kept():
    async with sidecar(None) as (client, core):
        put = await client.put("/policy", json={"mode": "observe"})
        assert told(put) == (200, "observe", "put", False, None, [])
        assert core.summaries("policy") == ["policy changed: mode observe, rules none; until the next restart"]
        put = await client.put("/policy", json={"mode": "act"})
        assert told(put) == (200, "act", "settings", False, None, [])
        assert core.summaries("policy")[-1] == "policy changed: mode act, rules none; as configured"


async def test_what_cannot_be_kept_is_not_done(path, monkeypatch):
    async with sidecar(path) as (client, core):
        await client.put("/policy", json={"rules": [RULE]})
        before, content = told(await client.get("/policy")), path.read_bytes()
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
            answer = await client.put("/policy", json={"mode": "observe"})
        assert told(await client.get("/policy")) == before
        assert (path.read_bytes(), len(core.summaries("policy"))) == (content, 1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "not_kept")
    assert answer.json()["error"]["message"] == (
        f"state_file: {path} could not be written: no space left on device; what was kept before still is"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_actions_per_hour": 60}, ("max_actions_per_hour", "no such key")),
        ({"rules": [{"name": "a", "signal": "host_used_ratio"} | WATERS]}, ("remedies must be named",)),
        ({"rules": [{"name": "a", "signal": "device_used_ratio"}]}, ("are required for device_used_ratio",)),
        ({"rules": [RULE | {"low_water": None}]}, ("given both, or neither",)),
        ({"rules": [RULE | {"signal": "kv_cache_usage_ratio"}]}, ("is not a signal; allowed: device_free_bytes",)),
        ({"rules": [RULE | {"remedies": ["pray"]}]}, ("'pray' is not a remedy", "reset_mm_cache")),
        ({"mode": "off"}, ("mode", "'off'")),
        ({"mode": "observe", "rules": [RULE, RULE]}, ("rules", "unique")),
        ({"mode": "observe", "rules": [RULE | {"low_water": -1}]}, ("bytes and never negative",)),
        ({"rules": [RULE | {"signal": "device_growth_bytes", "low_water": -5}]}, ("never negative",)),
        ({"rules": [RULE | {"remedies": ["reset_encoder_cache"] * 2}]}, ("more than once",)),
        ({"hourly": 3}, ("hourly", "no such key")),
    ],
)
async def test_a_wrong_change_changes_nothing(path, change, words):
    async with sidecar(path) as (client, core):
        answer = await client.put("/policy", json=change)
        assert told(await client.get("/policy")) == (200, "act", "settings", False, None, [])
        assert core.summaries("policy") == []
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid")
    assert all(word in answer.json()["error"]["message"] for word in words)
    assert not path.exists()


@pytest.mark.parametrize(("waters", "key"), [((0.86, 0.80), "low_water: 0.8 "), ((0.5, 0.4), "low_water: 0.4 ")])
async def test_a_rule_that_the_engine_cannot_reach_at_rest_is_refused(path, waters, key):
    rule = {"name": "mine", "signal": "device_used_ratio", "high_water": waters[0], "low_water": waters[1]}
    async with sidecar(path) as (client, core):
        await core.tick()
        answer = await client.put("/policy", json={"rules": [rule]})
        assert told(await client.get("/policy")) == (200, "act", "settings", False, None, [])
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unreachable_water")
    message = answer.json()["error"]["message"]
    assert message.startswith(f"mine.{key}of device_used_ratio cannot be reached: rank 0 uses 0.8286 at rest")
    assert "Set low_water to 0.83 or more" in message
    assert not path.exists()


@pytest.mark.parametrize("remedy", ["reset_mm_cache", "reset_prefix_cache", "reset_encoder_cache"])
async def test_the_three_resets_may_stand_in_an_operator_s_rule(path, remedy):
    rule = {"name": "mine", "signal": "device_used_ratio", "high_water": 0.93, "low_water": 0.9, "remedies": [remedy]}
    async with sidecar(path) as (client, _):
        assert (await client.put("/policy", json={"rules": [rule]})).json()["rules"][0]["remedies"] == [remedy]


async def test_changing_needs_the_token_and_looking_does_not(path):
    async with sidecar(path, token="a-long-token") as (client, _):
        assert (await client.put("/policy", json={"mode": "observe"})).status_code == 401
        assert not path.exists()
        assert (await client.get("/policy")).status_code == 200
        head = {"Authorization": "Bearer a-long-token"}
        assert (await client.put("/policy", json={"mode": "observe"}, headers=head)).status_code == 200


async def test_what_is_kept_holds_no_expanded_defaults_of_remedies(path):
    """A rule that names none owns all that can help, also those that a later release has."""
    async with sidecar(path) as (client, _):
        put = await client.put("/policy", json={"rules": [RULE]})
    assert put.json()["rules"][0]["remedies"] == ["trim_encoder_cache", "reset_encoder_cache"]
    assert json.loads(path.read_bytes())["policy"]["policy"]["rules"][0]["remedies"] == []
