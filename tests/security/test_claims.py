"""docs/security.md claims nothing that no test tries."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = tomllib.loads((Path(__file__).parent / "claims.toml").read_text(encoding="utf-8"))["claim"]
NAMED = {node for claim in CLAIMS for node in claim["tests"]}


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """What pytest itself finds in the files that are named."""
    files = sorted({node.partition("::")[0] for node in NAMED})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    command += ["-m", "soak or compiled or not engine or engine"]  # what is run by name is there too
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stdout[-2000:]
    return {line.partition("[")[0] for line in told.stdout.splitlines() if "::" in line}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["says"][:50])
def test_a_claim_names_a_test_that_runs(claim, collected):
    assert claim["tests"]
    # A test of a class is collected beneath its name.
    there = {f"{node.partition('::')[0]}::{node.rpartition('::')[2]}" for node in collected}
    assert set(claim["tests"]) <= there


def test_the_page_makes_these_claims_and_no_others():
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    section = page.partition("\n## Claims\n")[2].partition("\n## ")[0]
    made = re.findall(r"^- (.+(?:\n  .+)*)", section, re.MULTILINE)
    assert len(made) > 30
    assert [" ".join(claim.split()) for claim in made] == [claim["says"] for claim in CLAIMS]


def test_every_test_of_this_folder_is_of_a_claim():
    own = {
        name
        for path in Path(__file__).parent.glob("test_*.py")
        if path.name != Path(__file__).name
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    said = {node.partition("::")[2] for node in NAMED}
    assert own - said == NOT_CLAIMS


# The other side of a claim: what is not an attack goes on.
NOT_CLAIMS = {"test_a_slow_body_that_comes_is_served", "test_a_live_stream_may_be_silent"}
