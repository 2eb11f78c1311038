"""What we believe of others' source stands in it: each place in vendor_claims.toml, read from the published package."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.engine.published import source_of
from tests.vendor_claims import CLAIMS, Claim, Place

LINES = 3
"""How far from the line that is named the text may stand: a statement has several lines."""
READABLE = [(claim, place) for claim in CLAIMS if claim.unpublished is None for place in claim.places]


def names_around(tree: ast.AST, line: int, outer: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the qualified names of the functions and classes around a line, outermost first."""
    for node in ast.iter_child_nodes(tree):
        if not node_has(node, line):
            continue
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = (*outer, node.name)
            yield ".".join(name)
            yield from names_around(node, line, name)
        else:
            yield from names_around(node, line, outer)


def node_has(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", None) or 0)


@pytest.mark.parametrize(("claim", "place"), READABLE, ids=lambda value: str(value) if isinstance(value, Place) else "")
def test_a_claim_stands_where_it_is_said_to(claim: Claim, place: Place):
    source = source_of(place.package, place.version)
    if source is None:
        pytest.skip(f"{place.package} {place.version} is in no engine's environment on this machine")
    text = source.text(f"{place.package}/{place.file}")
    lines = text.splitlines()
    near = range(max(1, place.line - LINES), min(len(lines), place.line + LINES) + 1)
    found = [number for number in near if claim.text in lines[number - 1]]
    assert found, f"{place} has no {claim.text!r} near it: {lines[place.line - 1]!r}"
    if claim.within is not None:
        assert claim.within in names_around(ast.parse(text), found[0])
