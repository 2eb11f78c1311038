"""Every lint exception carries its reason on its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("app", "bench", "docs", "helm", "release", "tests", "worker_ext")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
EXCEPTION = re.compile(r"#\s*(?:ruff:\s*)?noqa\b", re.IGNORECASE)
WITH_REASON = re.compile(r"# (?:ruff: )?noqa: [A-Z]+\d+(?:, [A-Z]+\d+)* - \S")


def without_reason(text: str) -> list[str]:
    """The exceptions of a source that do not name their rules, or say no reason."""
    found = [(line, match.start()) for line in text.splitlines() for match in EXCEPTION.finditer(line)]
    return [line[at:] for line, at in found if not WITH_REASON.match(line, at)]


def test_every_exception_names_its_rules_and_says_why():
    missing = {path.relative_to(ROOT).as_posix(): without_reason(path.read_text("utf-8")) for path in SOURCES}
    assert {name: lines for name, lines in missing.items() if lines} == {}


@pytest.mark.parametrize("line", ["noqa", "noqa: E501", "NOQA: E501 see above", "ruff: noqa: E501", "noqa: E501 -"])
def test_an_exception_without_a_reason_is_found(line: str):
    assert without_reason(f"x = 1  # {line}\n") == [f"# {line}"]
