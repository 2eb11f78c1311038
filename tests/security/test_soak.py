"""A minute of `python -m tests.security.soak`: ordinary clients are served beside hostile ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.soak.attackers import ATTACKS

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 1800
GROWTH_MB = 8.0
# On a machine that others keep busy, its scheduler decides a p99 of few requests: the half hour judges the times.
FIRST_BYTE_FLOOR_SECONDS = 20.0


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory):
    """What a run of one minute found; its exit status would also count the goals that need a quiet machine."""
    found = tmp_path_factory.mktemp("soak") / "soak.json"
    words = ("--minutes", "1", "--clients", "40", "--no-docs", "--json", str(found))
    command = [sys.executable, "-m", "tests.security.soak", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert found.exists(), ended.stdout + ended.stderr
    return json.loads(found.read_text())


def test_every_kind_of_attack_takes_place(soak):
    assert soak["gave_up"] is None
    assert {name for name, counts in soak["attacks"].items() if counts["connections"]} == {a.name for a in ATTACKS}


def test_no_ordinary_request_fails(soak):
    assert soak["failures"] == []
    assert soak["values"]["operator_failed"] == 0


def test_every_safe_reset_is_answered(soak):
    """It is done, or refused at once: what has been under way for long will not end while others are held for it."""
    assert soak["resets"]
    assert {reset["status"] for reset in soak["resets"]} <= {200, 409}
    refused = [reset["says"] for reset in soak["resets"] if reset["status"] == 409]
    assert [says for says in refused if "no request was held" not in says] == []


def test_the_first_byte_comes_in_time(soak):
    p99 = soak["p99_first_byte_seconds"]
    assert p99["with_attackers"] <= max(2 * p99["without"], FIRST_BYTE_FLOOR_SECONDS)


def test_memory_does_not_grow(soak):
    assert soak["values"]["rss_growth_mb"] <= GROWTH_MB


def test_no_descriptor_task_or_connection_is_left(soak):
    assert soak["values"]["left"] == 0, soak["shown"]["left"]
