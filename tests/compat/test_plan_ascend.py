"""Each rule of vllm-ascend stands where `highwater.plan.ascend` says it was read, in the published package."""

from __future__ import annotations

import ast

import pytest

from highwater.plan.ascend import RULES, Source
from tests.engine.published import source_of

SOURCES = tuple(dict.fromkeys(source for rule in RULES for source in rule.sources))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.version}-{source.path}-{source.line}")
def test_a_rule_stands_where_it_was_read(source: Source) -> None:
    """The line says so, and a statement begins there where it is no comment."""
    package = source_of("vllm_ascend", source.version)
    assert package is not None
    text = package.text(f"vllm_ascend/{source.path}")

    assert text.splitlines()[source.line - 1].strip().startswith(source.text)
    statements = {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.expr)}
    assert source.text.startswith("#") or source.line in statements


def test_memory_bytes_are_not_looked_at_up_to_0_18() -> None:
    """The rule that there is nothing: no line of the worker's profile names the flag."""
    for version, path in (("0.13.0", "worker/worker.py"), ("0.18.0", "worker/worker.py")):
        package = source_of("vllm_ascend", version)
        assert package is not None

        assert "kv_cache_memory_bytes :=" not in package.text(f"vllm_ascend/{path}")
