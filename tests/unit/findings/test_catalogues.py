"""The catalogues: each finding's sentences, each piece of advice, and the rules and messages that name them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from highwater.findings import advice, finding
from highwater.findings.advice import ADVICE
from highwater.incidents import messages

AREA = Path(finding.__file__).parents[1]
SOURCES = [path for name in ("findings", "incidents", "measure") for path in (AREA / name).glob("*.py")]
WORDING = tomllib.loads(Path(finding.__file__).with_name("findings.toml").read_text())
MESSAGES = tomllib.loads(Path(messages.__file__).with_name("messages.toml").read_text())


def test_every_finding_has_its_sentences_and_every_sentence_its_rule():
    """Under the name that the rule gives."""
    named = {name for path in SOURCES for name in re.findall(r"\bfinding\(\s*\"(\w+)\"", path.read_text())}
    assert named == set(WORDING)
    assert all(row["title"] and row["text"] for row in WORDING.values())


def test_every_piece_of_advice_says_what_it_costs():
    """And names a setting; none is there that nobody gives."""
    assert all(each.setting and each.change and each.cost.endswith(".") for each in ADVICE.values())
    given = {name for row in (*WORDING.values(), *MESSAGES.values()) for name in row.get("advice", ())}
    quoted = {name for path in SOURCES for name in re.findall(r"\"(\w+)\"", path.read_text())}
    assert set(ADVICE) <= given | quoted
    assert given <= set(ADVICE)
    assert Path(advice.__file__).with_name("advice.toml") in AREA.glob("findings/*.toml")
