"""The catalogues: each finding's sentences, each piece of advice, and the rules and messages that name them."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from string import Formatter

from highwater.diagnose import finding
from highwater.diagnose.finding import ADVICE
from highwater.diagnose.log import messages

AREA = Path(finding.__file__).parents[1]
SOURCES = [*(AREA / "diagnose").rglob("*.py"), AREA / "terminal" / "check.py"]
WORDING = tomllib.loads(Path(finding.__file__).with_name("findings.toml").read_text())
MESSAGES = tomllib.loads(Path(messages.__file__).with_name("messages.toml").read_text())


def given_figures() -> dict[str, set[str]]:
    """The names that each rule gives its finding's sentences, by the finding."""
    calls = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    given: dict[str, set[str]] = {}
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == "finding":
            figures = [node for part in call.args[1:] for node in ast.walk(part) if isinstance(node, ast.Dict)]
            keys = {key.value for figure in figures for key in figure.keys if isinstance(key, ast.Constant)}
            given[call.args[0].value] = keys | {keyword.arg for keyword in call.keywords}
    return given


def named_figures(templates: str | list[str]) -> set[str]:
    """The names in curly braces."""
    listed = [templates] if isinstance(templates, str) else templates
    return {name for template in listed for _, name, _, _ in Formatter().parse(template) if name is not None}


def test_every_finding_has_its_sentences_and_every_sentence_its_figures():
    given = given_figures()
    assert set(given) == set(WORDING)
    for name, row in WORDING.items():
        assert row["title"], name
        said = [row["title"], row.get("text", ()), row.get("change", ())]
        figures = row.get("figures", {})
        assert {path.partition(".")[0] for path in figures.values()} <= given[name], name
        assert set().union(*map(named_figures, said)) <= given[name] | set(figures), name


def test_every_piece_of_advice_says_what_it_costs():
    assert all(each.setting and each.change and each.cost.endswith(".") for each in ADVICE.values())
    given = {name for row in (*WORDING.values(), *MESSAGES.values()) for name in row.get("advice", ())}
    quoted = {name for path in SOURCES for name in re.findall(r"\"(\w+)\"", path.read_text())}
    assert set(ADVICE) <= given | quoted
    assert given <= set(ADVICE)
    assert Path(finding.__file__).with_name("advice.toml") in AREA.glob("diagnose/*.toml")


def test_every_message_of_memory_says_which():
    rows = [row for name, row in MESSAGES.items() if name != "prefixes"]
    assert {row.get("of_memory") for row in rows} == {None, "device", "host", "shm", "unclear"}
    assert {row.get("part", "cause") for row in rows} == {"cause", "end", "wait", "event"}
