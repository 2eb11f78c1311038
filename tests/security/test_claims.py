"""docs/security.md claims nothing that no test tries."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = tomllib.loads((Path(__file__).parent / "claims.toml").read_text(encoding="utf-8"))["claim"]
NAMED = {node for claim in CLAIMS for node in claim["tests"]}


def names_in(file: str) -> set[str]:
    """Return the tests that stand in a file, those of its classes too."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {f"{file}::{node.name}" for node in functions if node.name.startswith("test_")}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["says"][:50])
def test_a_claim_names_a_test_that_there_is(claim):
    assert claim["tests"]
    assert set(claim["tests"]) <= set().union(*(names_in(node.partition("::")[0]) for node in claim["tests"]))


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
