"""docs/http.md lists what the OpenAPI page has: methods, parameters, and which calls need the token."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from highwater.server.main import create_app
from highwater.server.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z, ]+) (`/.+?`) \|(?: (yes))? \| (.+) \|$", PAGE, re.MULTILINE)
# Of the sidecar, and not on its OpenAPI page.
NOT_LISTED = {("get", "/dashboard")}


def row_of(method: str, path: str) -> tuple[str, str]:
    """Return what the page says of one operation: whether it needs the token, and the text."""
    (found,) = [
        (token, text)
        for methods, paths, token, text in ROWS
        if method.upper() in methods and f"`{path}`" in [p.strip() for p in paths.split(",")]
    ]
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def operations() -> dict[tuple[str, str], dict]:
    transport = httpx.ASGITransport(create_app(Settings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
        paths = (await client.get("/memory/openapi.json")).json()["paths"]
    return {(method, path): operation for path, methods in paths.items() for method, operation in methods.items()}


@pytest.mark.asyncio(loop_scope="module")
async def test_every_operation_has_a_row_that_says_whether_it_needs_the_token(operations):
    wrong = {
        key for key, operation in operations.items() if (row_of(*key)[0] == "yes") != bool(operation.get("security"))
    }
    assert wrong == set()


@pytest.mark.asyncio(loop_scope="module")
async def test_no_row_is_about_a_path_that_is_gone(operations):
    listed = {
        (method.strip().lower(), path.strip().strip("`"))
        for methods, paths, _, _ in ROWS
        for method in methods.split(",")
        for path in paths.split(",")
    }
    assert listed - NOT_LISTED == set(operations)
