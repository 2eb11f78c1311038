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

from app.admin_token import AdminToken
from app.policy_settings import PolicySettings
from app.policy_store import PolicyStore
from app.routes.access import Access
from app.routes.policy import policy_router
from app.routes.problems import answer_problems
from app.state_file import StateFile
from tests.fakes.engine import core_on

RULE = {"name": "cache", "signal": "encoder_cache_bytes", "high_water": 2e9, "low_water": 1e9}
CONFIGURED = PolicySettings(rules=(), max_actions_per_hour=10)
WORDS = ("mode", "max_actions_per_hour", "source", "kept", "kept_in")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state.json"


@asynccontextmanager
async def sidecar(path: Path | None, configured: PolicySettings = CONFIGURED, token: str | None = None):
    """A client of a sidecar that starts with that file and configuration, and its core."""
    store = PolicyStore(StateFile(path), configured)
    core = core_on(rules=[rule.rule() for rule in store.in_force.rules], mode=store.in_force.mode)
    core.governor.max_actions_per_hour = store.in_force.max_actions_per_hour
    app = FastAPI()
    control = Access(AdminToken(token or "none-is-asked-for", None), port=8001, trust_loopback=token is None)
    services = SimpleNamespace(governor=core.governor, history=core.history, policy=store, control=control)
    app.include_router(policy_router(services))
    answer_problems(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client, core
    await core.engine.aclose()


def told(answer: httpx.Response) -> tuple:
    body = answer.json()
    return (answer.status_code, *(body[word] for word in WORDS), [rule["name"] for rule in body["rules"]])


async def test_the_configured_policy_is_shown_as_such(path):
    """With where it comes from, and the budget as it stands."""
    async with sidecar(path) as (client, _):
        answer = await client.get("/policy")
    assert told(answer) == (200, "act", 10, "settings", False, None, [])
    budget = {"max_actions_per_hour": 10, "started_last_hour": 0, "used_up": False, "until": None}
    assert answer.json()["status"]["budget"] == budget
    assert answer.json()["last_decisions"] == []


async def test_a_change_is_kept_and_survives_a_restart(path):
    """What it left out stays; GET tells the same as PUT; the next sidecar starts with it."""
    async with sidecar(path) as (client, core):
        put = await client.put("/policy", json={"mode": "observe", "rules": [RULE]})
        assert told(put) == told(await client.get("/policy"))
        assert core.summaries("policy") == [
            f"policy changed: mode observe, rules cache, 10 actions an hour; kept in {path}"
        ]
        assert (core.governor.mode, [rule.name for rule in core.governor.rules]) == ("observe", ["cache"])
    assert told(put) == (200, "observe", 10, "put", True, str(path), ["cache"])
    async with sidecar(path) as (client, _):
        assert told(await client.get("/policy")) == told(put)
    async with sidecar(path, PolicySettings(rules=())) as (client, _):
        assert told(await client.get("/policy")) == (200, "act", 60, "settings", False, None, [])


async def test_without_a_state_file_the_answer_says_that_it_is_not_kept():
    """In force all the same."""
    async with sidecar(None) as (client, core):
        put = await client.put("/policy", json={"max_actions_per_hour": 0})
        assert told(put) == (200, "act", 0, "put", False, None, [])
        assert core.summaries("policy") == [
            "policy changed: mode act, rules none, 0 actions an hour; until the next restart"
        ]
        assert (await client.get("/policy")).json()["status"]["budget"]["used_up"] is True


async def test_what_cannot_be_kept_is_not_done(path, monkeypatch):
    """507, naming file and reason; policy, file and events are as before."""
    async with sidecar(path) as (client, core):
        await client.put("/policy", json={"rules": [RULE]})
        before, content = told(await client.get("/policy")), path.read_bytes()
        with monkeypatch.context() as disk:

            def full(*args):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            disk.setattr(os, "fsync", full)
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
        ({"max_actions_per_hour": -1}, ("max_actions_per_hour", "-1", "greater than or equal to 0")),
        ({"max_actions_per_hour": 3601}, ("max_actions_per_hour", "3601", "less than or equal to 3600")),
        ({"mode": "off"}, ("mode", "'off'")),
        ({"mode": "observe", "rules": [RULE, RULE]}, ("rules", "unique")),
        ({"mode": "observe", "rules": [RULE | {"low_water": -1}]}, ("sizes and never negative",)),
        ({"rules": [RULE | {"signal": "device_growth_bytes", "high_water": 0, "low_water": -5}]}, ("must be over 0",)),
        ({"rules": [RULE | {"remedies": ["reset_encoder_cache"] * 2}]}, ("twice or more",)),
        ({"hourly": 3}, ("hourly", "no such key")),
    ],
)
async def test_a_wrong_change_changes_nothing(path, change, words):
    """Validated whole, before anything is written or taken."""
    async with sidecar(path) as (client, core):
        answer = await client.put("/policy", json=change)
        assert told(await client.get("/policy")) == (200, "act", 10, "settings", False, None, [])
        assert core.summaries("policy") == []
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid")
    assert all(word in answer.json()["error"]["message"] for word in words)
    assert not path.exists()


async def test_changing_needs_the_token_and_looking_does_not(path):
    """Nothing is written for who may not."""
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
