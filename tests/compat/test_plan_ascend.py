"""Each rule of vllm-ascend stands where `docs/ascend_rules.toml` says it was read, in the published package."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.engine.published import source_of

RULES = tomllib.loads((Path(__file__).parents[2] / "docs" / "ascend_rules.toml").read_text(encoding="utf-8"))["rule"]
SOURCES = tuple(dict.fromkeys(tuple(source) for rule in RULES for source in rule["sources"]))


@pytest.mark.parametrize(("version", "path", "line", "words"), SOURCES)
def test_a_rule_stands_where_it_was_read(version: str, path: str, line: int, words: str) -> None:
    package = source_of("vllm_ascend", version)
    assert package is not None
    text = package.text(f"vllm_ascend/{path}")

    assert text.splitlines()[line - 1].strip().startswith(words)
    statements = {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.expr)}
    assert words.startswith("#") or line in statements


def test_memory_bytes_are_not_looked_at_up_to_0_18() -> None:
    for version, path in (("0.13.0", "worker/worker.py"), ("0.18.0", "worker/worker.py")):
        package = source_of("vllm_ascend", version)
        assert package is not None

        assert "kv_cache_memory_bytes :=" not in package.text(f"vllm_ascend/{path}")
