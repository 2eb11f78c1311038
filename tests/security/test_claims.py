"""docs/security.md says nothing that no test tries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
_NODE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_TABLES = re.compile(r"\| claim \| tried by \|\n\|[-|]+\|\n((?:\|.*\|\n)+)")
CLAIMS = [row for table in _TABLES.findall(PAGE) for row in table.splitlines()]


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """What pytest itself finds in the files that the page names."""
    files = sorted({file for file, _ in _NODE.findall(PAGE)})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    command += ["-m", "soak or compiled or not engine or engine"]  # what is run by name is there too
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stdout[-2000:]
    return {line.partition("[")[0] for line in told.stdout.splitlines() if "::" in line}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda row: row.split("|")[1].strip()[:50])
def test_a_claim_names_a_test_that_runs(claim, collected):
    named = [f"{file}::{name}" for file, name in _NODE.findall(claim)]
    assert named
    # A test of a class is collected beneath its name.
    there = {f"{node.partition('::')[0]}::{node.rpartition('::')[2]}" for node in collected}
    assert set(named) <= there


def test_the_page_makes_claims():
    assert len(CLAIMS) > 30
    assert PAGE.count("| tried by |") == len(_TABLES.findall(PAGE))
    assert {node for row in CLAIMS for node in _NODE.findall(row)} == set(_NODE.findall(PAGE))


def test_every_test_of_this_folder_is_of_a_claim():
    own = {
        name
        for path in Path(__file__).parent.glob("test_*.py")
        if path.name != Path(__file__).name
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    said = {name for _, name in _NODE.findall(PAGE)}
    assert own - said == NOT_CLAIMS


# The other side of a claim: what is not an attack goes on.
NOT_CLAIMS = {"test_a_slow_body_that_comes_is_served", "test_a_live_stream_may_be_silent"}
