"""`highwater check`: what only the caller of a sidecar sees of the set-up, and how all of it is shown."""

from __future__ import annotations

from dataclasses import replace

import click
import pytest

from highwater import __version__
from highwater.diagnose.rules.setup import Caller, SetupCheck, caller_checks, checked, exit_code, without_sidecar
from highwater.terminal.status import check_json, check_text
from tests.unit.diagnose.test_setup import GONE, facts
from tests.unit.terminal.reports import policy

CALLER = Caller(url="http://127.0.0.1:8001", without_token="loopback", sidecar_version=__version__)


@pytest.mark.parametrize(
    ("topic", "changed", "level", "name"),
    [
        ("sidecar", {}, "ok", None),
        ("sidecar", {"sidecar_version": None}, "warn", "sidecar_version"),
        ("sidecar", {"sidecar_version": "0.0.1"}, "warn", "sidecar_version"),
        ("control", {}, "ok", None),
        ("control", {"without_token": "no_token"}, "warn", "token_missing"),
        ("control", {"without_token": "no_token", "with_token": "token"}, "ok", None),
        ("control", {"without_token": "no_token", "with_token": "wrong_token"}, "fail", "token_wrong"),
        ("control", {"without_token": "closed"}, "fail", "control_closed"),
        ("control", {"without_token": "unknown"}, "skip", None),
        ("transport", {}, "ok", None),
        ("transport", {"url": "http://gpu-7:8001", "with_token": "token"}, "warn", "token_in_plain_http"),
        ("transport", {"url": "http://gpu-7:8001"}, "ok", None),
        ("transport", {"url": "https://gpu-7:8001", "with_token": "token"}, "ok", None),
    ],
)
def test_what_only_the_caller_sees(topic, changed, level, name):
    (found,) = [one for one in caller_checks(replace(CALLER, **changed)) if one.name == topic]
    assert (found.level, found.finding) == (level, name)


@pytest.mark.parametrize(("changed", "status"), [({}, 0), ({"state": "paused"}, 1), (GONE, 1), ({"state": "gone"}, 2)])
def test_the_exit_status_is_of_the_worst(changed, status):
    assert exit_code(checked(facts(**changed)), 0) == status


@pytest.mark.parametrize("verdict", [0, 1, 2])
@pytest.mark.parametrize(("changed", "status"), [({}, 0), ({"state": "paused"}, 1), ({"state": "gone"}, 2)])
def test_it_is_never_better_than_the_verdict_s(changed, status, verdict):
    assert exit_code(checked(facts(**changed)), verdict) == max(status, verdict)


def test_an_engine_that_starts_is_nothing_that_is_wrong():
    """Neither the first one nor the next, whose readings are of the one before."""
    assert {one.level for one in checked(facts(state="starting", stale=True))} <= {"ok", "note", "warn", "skip"}


def test_the_lines_tell_what_to_change():
    shown = check_text(checked(facts(rules=policy(mode="observe"))), "FINE: it is calm.", 80)
    first, counts, *lines = click.unstyle(shown).splitlines()
    assert (first, counts) == ("FINE: it is calm.", "0 failed, 0 warnings, 15 ok, 1 could be better")
    at = next(index for index, line in enumerate(lines) if "only observes" in line)
    assert "HIGHWATER_POLICY__MODE=act" in " ".join(lines[at : at + 6])
    assert max(map(len, lines)) <= 80


def test_an_engine_without_a_sidecar_has_its_own_checks_and_says_which_need_one():
    found = {one.name: one for one in without_sidecar(checked(facts()))}
    needing = {name for name, one in found.items() if one.text == "needs a sidecar"}
    assert needing == {"sidecar", "control", "transport", "thresholds", "policy", "state file", "incidents"}
    assert {found[name].level for name in needing} == {"skip"}
    assert found["vLLM"].level == "ok"


def test_for_programs():
    body = check_json(checked(facts(rules=policy(mode="observe"))), 0)
    assert body["exit_code"] == 0
    assert {one["level"]: one["finding"] for one in body["findings"]} == {"ok": None, "note": "policy_observes"}


@pytest.mark.parametrize(("count", "words"), [(0, "0 warnings"), (1, "1 warning,"), (2, "2 warnings")])
def test_warnings_are_counted_in_words(count, words):
    assert words in check_text([SetupCheck("a", "warn", "text")] * count, "", 80)
