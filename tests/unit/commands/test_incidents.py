"""`highwater incidents`: of a sidecar, or of its files where none lives."""

from __future__ import annotations

import json

import httpx
import pytest
from click.testing import CliRunner, Result

from highwater.commands import incidents
from highwater.diagnose.incidents.store import IncidentStore
from tests.fakes.incident import ID, incident, numbered


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(incidents.incidents, arguments)


@pytest.fixture
def folder(tmp_path):
    store = IncidentStore(tmp_path)
    store.write(incident())
    store.write(incident(numbered(1), summary="another \x1b[2J"))
    (tmp_path / f"{numbered(2)}.json").write_text('{"schema": 9}')
    return tmp_path


@pytest.fixture
def sidecar(monkeypatch):
    """What a sidecar answers; what it was asked is kept in `asked`."""

    class Sidecar:
        def __init__(self):
            self.asked: list[str] = []
            self.answer: httpx.Response | Exception = httpx.Response(200, text="no incidents\n")

        def handle(self, request):
            self.asked.append(str(request.url))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    made = Sidecar()
    client = httpx.Client

    def in_process(**options):
        options.pop("verify")
        return client(transport=httpx.MockTransport(made.handle), **options)

    monkeypatch.setattr(httpx, "Client", in_process)
    return made


# --- files ---


def test_the_files_are_listed(folder):
    """Newest first, the one that cannot be read with its reason, and nothing that a terminal would obey."""
    result = invoke("--folder", str(folder))
    assert result.exit_code == 0
    assert result.output.index(ID) < result.output.index(numbered(2)) < result.output.index(numbered(1))
    assert "it is of schema 9" in result.output
    assert "\x1b" not in result.output


def test_the_list_as_json(folder):
    """As GET /memory/incidents has it."""
    listed = json.loads(invoke("--folder", str(folder), "--json").output)
    assert [headline["id"] for headline in listed["incidents"]] == [ID, numbered(2), numbered(1)]


def test_one_of_them_is_shown(folder):
    """As text, or as the file has it."""
    assert "## The ranks" in invoke(ID, "--folder", str(folder)).output
    assert json.loads(invoke(ID, "--folder", str(folder), "--json").output)["id"] == ID


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("20991121T143233Z-died", "there is no incident"),
        ("20991121T143233Z-died", "`highwater incidents --folder"),
        ("../x", "there is no incident"),
        (numbered(2), "is of schema 9"),
    ],
)
def test_what_is_not_there_is_said(folder, asked, problem):
    """With exit status 1."""
    result = invoke(asked, "--folder", str(folder))
    assert result.exit_code == 1
    assert problem in result.output


def test_reading_changes_nothing(folder):
    """A sidecar may live and write there."""
    (folder / f".{ID}.json.draft").write_text("half")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    invoke("--folder", str(folder))
    invoke(ID, "--folder", str(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_is_not_there_is_a_usage_error(tmp_path):
    """Said before anything is read."""
    assert invoke("--folder", str(tmp_path / "none")).exit_code == 2


# --- a sidecar ---


def test_the_sidecar_is_asked(sidecar):
    """For text, or with --json for JSON."""
    assert invoke().output == "no incidents\n"
    invoke(ID, "--url", "http://other:9/", "--json")
    assert sidecar.asked == [
        "http://127.0.0.1:8001/memory/incidents?format=text",
        f"http://other:9/memory/incidents/{ID}?format=json",
    ]


def test_an_id_is_no_path(sidecar):
    """Whatever is typed, it is asked for as one incident."""
    invoke("../../policy?x=1#y")
    assert sidecar.asked == ["http://127.0.0.1:8001/memory/incidents/..%2F..%2Fpolicy%3Fx%3D1%23y?format=text"]


@pytest.mark.parametrize(
    ("answer", "status", "problem"),
    [
        (
            httpx.Response(404, json={"error": {"code": "not_found", "message": "there is no such"}}),
            1,
            "there is no such",
        ),
        (httpx.Response(502, text="<html>"), 3, "answered with 502"),
        (httpx.Response(500, json=["odd"]), 3, "answered with 500"),
        (httpx.Response(200, html="<html>"), 3, "a web page"),
        (httpx.ConnectError("refused"), 3, "no sidecar answers at http://127.0.0.1:8001 (refused)"),
    ],
)
def test_what_goes_wrong_is_said(sidecar, answer, status, problem):
    """With an exit status, and what to try instead."""
    sidecar.answer = answer
    result = invoke()
    assert result.exit_code == status
    assert problem in result.output
    assert ("--folder" in result.output) == (status == 3)


def test_a_url_that_is_none_is_said(sidecar):
    """And no traceback."""
    result = invoke("--url", "http://[::1")
    assert result.exit_code == 3
    assert "Traceback" not in result.output


def test_what_a_sidecar_says_is_plain(sidecar):
    """Whoever it is that answers there."""
    sidecar.answer = httpx.Response(200, text="a\x1b[2Jb\x07\n\u202ec")
    assert invoke().output == "a[2Jb\nc\n"
