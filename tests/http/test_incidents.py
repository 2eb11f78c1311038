"""The incidents on a real port: the list and each of them, as JSON, text and a page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.incidents.store import IncidentStore
from highwater.http.history import router
from highwater.http.problems import PROBLEM_RESPONSES, answer_problems
from highwater.http.text.markdown import CONTENT_SECURITY_POLICY
from highwater.model.engine import EngineStatus
from highwater.process.clocks import Clocks
from tests.fakes.incident import AT, ID, evidence, numbered, rank, reading
from tests.http.conftest import serving
from tests.patience import LIMIT_SECONDS

ATTACK = "<script>alert(1)</script>"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@dataclass
class Running:
    """The routes alone, as the sidecar serves them."""

    incidents: Incidents
    client: httpx.AsyncClient

    async def get(self, path: str = "", accept: str = "*/*", **query: str) -> httpx.Response:
        return await self.client.get(f"/memory/incidents{path}", headers={"accept": accept}, params=query)


@contextlib.asynccontextmanager
async def serving_incidents(folder: Path) -> AsyncIterator[Running]:
    log = folder / "engine.log"
    log.write_text(f"RuntimeError: NPU out of memory {ATTACK}\n")
    (folder / "incidents").mkdir()
    incidents = Incidents(IncidentStore(folder / "incidents"), engine_log=log, clocks=Clocks(wall=lambda: AT))
    app = FastAPI(responses=PROBLEM_RESPONSES)
    app.state.services = SimpleNamespace(incidents=incidents)
    app.include_router(router)
    answer_problems(app)
    async with (
        serving(app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=LIMIT_SECONDS) as client,
    ):
        yield Running(incidents, client)


async def open_one(running: Running) -> None:
    """Of an engine with an ugly name."""
    engine = EngineStatus(url="http://127.0.0.1:8000", state="gone", version="0.12.0", model=ATTACK)
    await running.incidents.open_incident(evidence("died", rank(reading(0)), engine=engine))


@pytest.fixture
async def running(tmp_path):
    async with serving_incidents(tmp_path) as empty:
        yield empty


@pytest.fixture
async def one(running):
    await open_one(running)
    return running


# For tests that only ask: one server for all of them.
shares = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory):
    async with serving_incidents(tmp_path_factory.mktemp("shared")) as running:
        await open_one(running)
        yield running


async def test_without_incidents_the_list_is_empty(running):
    answer = await running.get()
    assert answer.json() == {
        "schema": 1,
        "incidents": [],
        "folder": str(running.incidents.folder),
        "problem": None,
        "has_engine_log": True,
    }
    assert (await running.get(format="text")).text == "no incidents\n"


async def test_the_list_tells_what_and_when(one):
    await one.incidents.open_incident(evidence("died", at=AT + 5))
    await one.incidents.open_incident(evidence("hung", at=AT + 6))
    listed = (await one.get()).json()["incidents"]
    assert [(each["id"], each["kind"], each["count"], each["last_at"]) for each in listed] == [
        ("20261121T143239Z-hung", "hung", 1, AT + 6),
        (ID, "died", 2, AT + 5),
    ]
    assert listed[1]["summary"].startswith("The engine died: ")
    assert (listed[1]["at"], listed[1]["ended_at"], listed[1]["problem"]) == (AT, None, None)


@shares
@pytest.mark.parametrize(
    ("accept", "query", "content_type"),
    [
        ("*/*", {}, "application/json"),
        ("application/json", {}, "application/json"),
        ("text/plain", {}, "text/plain; charset=utf-8"),
        ("text/plain, application/json", {}, "application/json"),
        ("application/json", {"format": "text"}, "text/plain; charset=utf-8"),
        ("text/plain", {"format": "json"}, "application/json"),
        (BROWSER, {}, "application/json"),
    ],
)
async def test_the_list_has_two_forms(shared, accept, query, content_type):
    answer = await shared.get(accept=accept, **query)
    assert (answer.status_code, answer.headers["content-type"]) == (200, content_type)
    assert ID in answer.text


@shares
@pytest.mark.parametrize(
    ("accept", "query", "content_type"),
    [
        ("*/*", {}, "application/json"),
        ("text/plain", {}, "text/plain; charset=utf-8"),
        (BROWSER, {}, "text/html; charset=utf-8"),
        (BROWSER, {"format": "json"}, "application/json"),
        ("*/*", {"format": "text"}, "text/plain; charset=utf-8"),
        ("*/*", {"format": "html"}, "text/html; charset=utf-8"),
    ],
)
async def test_an_incident_has_three_forms(shared, accept, query, content_type):
    answer = await shared.get(f"/{ID}", accept, **query)
    assert (answer.status_code, answer.headers["content-type"]) == (200, content_type)
    assert "found no room on the NPU" in answer.text
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"


@shares
async def test_the_json_is_that_of_the_file(shared):
    answer = await shared.get(f"/{ID}")
    assert answer.json() == json.loads((shared.incidents.folder / f"{ID}.json").read_bytes())
    assert answer.json()["engine"]["model"] == ATTACK


@shares
async def test_the_page_runs_nothing(shared):
    answer = await shared.get(f"/{ID}", BROWSER)
    assert answer.headers["content-security-policy"] == f"{CONTENT_SECURITY_POLICY}; frame-ancestors 'none'; sandbox"
    assert "<script" not in answer.text
    assert answer.text.count("&lt;script&gt;") >= 2


@shares
@pytest.mark.parametrize(
    "incident_id",
    ["20991121T143233Z-died", "x", "..", "../../../etc/passwd", "%2e%2e%2fx", f"{ID}.json", f"{ID}\x00", "x" * 5000],
)
@pytest.mark.parametrize("accept", ["*/*", BROWSER])
async def test_what_there_is_none_of_is_not_found(shared, incident_id, accept):
    answer = await shared.get(f"/{quote(incident_id, safe='')}", accept)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == "not_found"


async def test_one_that_cannot_be_read_says_why(one):
    (one.incidents.folder / f"{numbered(1)}.json").write_text('{"schema": 2}')
    listed = {each["id"]: each for each in (await one.get()).json()["incidents"]}
    assert listed[numbered(1)]["problem"] == "is of schema 2, and this version reads 1"
    answer = await one.get(f"/{numbered(1)}")
    assert answer.status_code == 409
    assert "is of schema 2" in answer.json()["error"]["message"]


@shares
@pytest.mark.parametrize("path", ["", f"/{ID}"])
@pytest.mark.parametrize("query", [{"format": "xml"}, {"fromat": "text"}])
async def test_a_query_that_is_none_is_refused(shared, path, query):
    answer = await shared.get(path, **query)
    assert answer.status_code == 422
    assert next(iter(query)) in answer.json()["error"]["message"]


async def test_a_folder_that_cannot_be_written_is_told(running):
    running.incidents.folder.rmdir()
    await running.incidents.open_incident(evidence("died"))
    answer = (await running.get()).json()
    assert "could not be written" in answer["problem"]
    assert [each["id"] for each in answer["incidents"]] == [ID]
    assert "could not be written" in (await running.get(format="text")).text
    assert (await running.get(f"/{ID}")).json()["id"] == ID
