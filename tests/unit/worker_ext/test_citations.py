"""A comment that names a file of somebody else's says which version's, and which line of it.

tests/vendor_claims.toml says what stands there, and tests/own_engine/test_vendor_claims.py reads it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import highwater
import highwater_worker
from tests.vendor_claims import CITATION, CLAIMS, cited_in

ROOT = Path(highwater_worker.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
APP = sorted(Path(highwater.__file__).parent.rglob("*.py"))
SOURCE_FILE = re.compile(r"[\w./-]*\b\w+\.(?:py|cpp|h)\b")
OTHERS = {"jemalloc/jemalloc_macros.h"}  # a C library's header
by_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def prose(path: Path) -> str:
    """Return all comments and docstrings of a file, each in one line."""
    code = path.read_text("utf-8")
    strings = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Expr)]
    texts = [node.value for node in strings if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    texts.append("\n".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT))
    return "\n".join(" ".join(text.split()) for text in texts)


@by_file
def test_a_file_of_somebody_elses_is_cited_in_full(path):
    named = set(SOURCE_FILE.findall(CITATION.sub("", prose(path))))
    assert named - OTHERS == set()


@by_file
def test_a_citation_is_in_the_table(path):
    places = {place for claim in CLAIMS for place in claim.places}
    assert set(cited_in(prose(path))) - places == set()


def test_every_claim_is_cited():
    cited = {place for path in (*FILES, *APP) for place in cited_in(prose(path))}
    assert [claim.says for claim in CLAIMS if not cited & set(claim.places)] == []


def test_only_source_in_no_package_goes_unread():
    unread = {place for claim in CLAIMS if claim.unpublished is not None for place in claim.places}
    in_python = {(place.package, place.version) for place in unread if Path(place.file).suffix != ".cpp"}
    assert in_python == set()
