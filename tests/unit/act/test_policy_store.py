"""Which policy is in force: the configured one, or what was put in its place; the newest word counts."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from pathlib import Path

import pytest

from highwater.act.governor import PolicyStore
from highwater.act.rules import DEFAULT_RULES, PolicyChange, PolicySettings, Rule
from highwater.process.errors import NotKept
from highwater.process.state_file import StateFile
from tests.fakes.raising import raising

CACHE = Rule(name="cache", signal="encoder_cache_bytes", high_water=2e9, low_water=1e9)
CONFIGURED = PolicySettings(mode="observe")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state.json"


def started(path: Path | None, configured: PolicySettings = CONFIGURED) -> PolicyStore:
    """A sidecar starts with that configuration."""
    return PolicyStore(StateFile(path), configured)


def test_without_a_change_the_configured_policy_is_in_force(path):
    store = started(path)
    assert (store.in_force, store.source, store.kept_in, store.startup_notice) == (CONFIGURED, "settings", None, None)
    assert not path.exists()


async def test_a_change_is_in_force_and_kept(path):
    store = started(path)
    await store.change(PolicyChange(rules=(CACHE,)))
    again = started(path)
    for one in (store, again):
        assert one.in_force == PolicySettings(mode="observe", rules=(CACHE,))
        assert (one.source, one.kept_in) == ("put", str(path))
    assert again.startup_notice == f"the policy of the last PUT /policy is in force, kept in {path}"


async def test_changes_add_up(path):
    store = started(path)
    for change in ({"mode": "act"}, {"rules": []}):
        await store.change(PolicyChange(**change))
    assert started(path).in_force == PolicySettings(mode="act", rules=())


@pytest.mark.parametrize("kept", [True, False], ids=["state file", "no state file"])
async def test_the_configured_policy_put_back_is_no_change(path, kept):
    store = started(path if kept else None)
    await store.change(PolicyChange(mode="act", rules=(CACHE,)))
    shown = tuple(rule.model_copy(update={"remedies": rule.ordered_remedies}) for rule in CONFIGURED.rules)
    await store.change(PolicyChange(mode="observe", rules=shown))
    assert (store.source, store.kept_in) == ("settings", None)
    again = started(path)
    assert (again.in_force, again.source, again.startup_notice) == (CONFIGURED, "settings", None)


async def test_without_a_state_file_a_change_lasts_until_the_next_start():
    store = started(None)
    await store.change(PolicyChange(mode="act"))
    assert (store.in_force.mode, store.source, store.kept_in) == ("act", "put", None)


async def test_what_could_not_be_kept_is_not_in_force(path, monkeypatch):
    store = started(path)
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(NotKept):
        await store.change(PolicyChange(mode="act"))
    assert (store.in_force, store.source) == (CONFIGURED, "settings")


async def test_a_configuration_that_was_changed_since_wins(path):
    await started(path).change(PolicyChange(mode="act"))
    newer = PolicySettings(mode="observe", rules=())
    store = started(path, newer)
    assert (store.in_force, store.source) == (newer, "settings")
    assert store.startup_notice == (
        "the configured policy was changed after the last PUT /policy: it is in force, and that change was dropped"
    )
    assert started(path).in_force == CONFIGURED
    assert started(path).startup_notice is None


async def test_a_dropped_change_that_stays_in_the_file_is_told(path, monkeypatch):
    await started(path).change(PolicyChange(mode="act"))
    file = StateFile(path)
    monkeypatch.setattr(file, "write", raising(NotKept(path, "read-only file system")))
    store = PolicyStore(file, PolicySettings())
    assert store.source == "settings"
    assert "but is still in the file: state_file" in (store.startup_notice or "")


async def test_defaults_written_out_are_no_other_configuration(path):
    await started(path, PolicySettings()).change(PolicyChange(mode="observe"))
    assert started(path, PolicySettings(mode="act", rules=DEFAULT_RULES)).source == "put"
    rules = (Rule(**DEFAULT_RULES[0].model_dump()),)
    assert started(path, PolicySettings(rules=rules)).source == "put"
    kept = StateFile(path).read("policy") or {}
    assert kept["configured"] == hashlib.sha256(b"{}").hexdigest()


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"policy": {}}, "configured: is missing"),
        ({"configured": "x", "policy": {"mode": "off"}}, "policy.mode: 'off' must be 'act' or 'observe'"),
        ({"configured": "x", "policy": {"modus": "act"}}, "policy.modus: there is no such key"),
        ({"configured": "x", "policy": {"rules": [{"name": "a"}]}}, "policy.rules.0.signal"),
    ],
)
def test_a_kept_policy_that_is_wrong_is_named_and_not_used(path, section, word):
    """Validated whole, as a PUT is; what else the file keeps stays."""
    file = StateFile(path)
    file.write("other", {"at": 1})
    file.write("policy", section)
    store = started(path)
    assert (store.in_force, store.source) == (CONFIGURED, "settings")
    assert (store.startup_notice or "").startswith(
        f"the policy kept in {path} cannot be used, the configured one is in force: "
    )
    assert word in (store.startup_notice or "")
    assert StateFile(path).read("other") == {"at": 1}


async def test_two_changes_at_once_both_count(path):
    store = started(path)
    changes = (PolicyChange(mode="act"), PolicyChange(rules=()))
    await asyncio.gather(*map(store.change, changes))
    expected = PolicySettings(mode="act", rules=())
    assert (store.in_force, started(path).in_force) == (expected, expected)
