"""README.md of the chart: what it is, and a table of every value with what follows from it, from values.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import yaml

HELM = Path(__file__).resolve().parents[1]
LONGEST_DEFAULT = 40


def text() -> str:
    """The head that people write (README.head.md), and the table."""
    head = (HELM / "generator" / "README.head.md").read_text(encoding="utf-8")
    return f"{head}\n{tables()}"


def tables() -> str:
    """One table for each section, in the order of the file."""
    source = (HELM / "values.yaml").read_text(encoding="utf-8")
    lines = source.splitlines()
    root = yaml.compose(source, Loader=yaml.SafeLoader)
    parts, loose = [], []
    for key, value in root.value:
        if isinstance(value, yaml.MappingNode) and value.value:
            above = _comment(lines, key)
            rows = _merged(list(_rows(lines, f"{key.value}.", value)))
            parts.append(
                f"### `{key.value}`\n\n{above}\n\n{_table(rows)}" if above else f"### `{key.value}`\n\n{_table(rows)}"
            )
        else:
            loose.append(_row(lines, "", key, value))
    return "\n\n".join([f"### Of the release\n\n{_table(_merged(loose))}", *parts]) + "\n"


def _rows(lines: list[str], prefix: str, node: yaml.MappingNode) -> Iterator[list[str]]:
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode) and value.value and _is_ours(lines, value):
            above = _comment(lines, key)
            if above:
                yield [f"`{prefix}{key.value}`", "", above]
            yield from _rows(lines, f"{prefix}{key.value}.", value)
        else:
            yield _row(lines, prefix, key, value)


def _is_ours(lines: list[str], value: yaml.MappingNode) -> bool:
    """Whether its values are explained one by one; a table of Kubernetes' is shown as a whole."""
    return any(
        _comment(lines, key) or (isinstance(inner, yaml.MappingNode) and _is_ours(lines, inner))
        for key, inner in value.value
    )


def _row(lines: list[str], prefix: str, key: yaml.ScalarNode, value: yaml.Node) -> list[str]:
    default = json.dumps(yaml.safe_load(yaml.serialize(value)))
    shown = f"`{default}`" if len(default) <= LONGEST_DEFAULT else "see values.yaml"
    return [f"`{prefix}{key.value}`", shown.replace("|", "\\|"), _comment(lines, key).replace("|", "\\|")]


def _merged(rows: list[list[str]]) -> list[list[str]]:
    """Put neighbours that mean the same into one row: each with its default, or all with the one that they share."""
    merged = []
    for meaning, group in groupby(rows, key=itemgetter(2)):
        keys, defaults, _ = zip(*group, strict=True)
        shown = defaults if len(set(defaults)) > 1 else defaults[:1]
        merged.append([", ".join(keys), ", ".join(shown), meaning])
    return merged


def _comment(lines: list[str], key: yaml.Node) -> str:
    """The comment right above the key, in its column, as one paragraph."""
    margin = " " * key.start_mark.column
    found: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        match = re.fullmatch(rf"{margin}# ?(.*)", line)
        if match is None:
            break
        found.insert(0, match[1])
    return " ".join(found)


def _table(rows: list[list[str]]) -> str:
    """Not padded: the longest meaning would make every line as long."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [["value", "default", "meaning"], ["---"] * 3, *rows])
