"""`highwater incidents --folder`: of a sidecar's files, where none lives."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from highwater.diagnose.incidents.store import IncidentStore
from highwater.terminal.verbs import incidents
from tests.fakes.incident import ID, incident, numbered


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(incidents, arguments)


@pytest.fixture
def folder(tmp_path):
    store = IncidentStore(tmp_path)
    store.write(incident())
    store.write(incident(numbered(1), summary="another \x1b[2J"))
    (tmp_path / f"{numbered(2)}.json").write_text('{"schema": 9}')
    return tmp_path


def test_the_files_are_listed(folder):
    result = invoke("--folder", str(folder))
    assert result.exit_code == 0
    assert result.output.index(ID) < result.output.index(numbered(2)) < result.output.index(numbered(1))
    assert "it is of schema 9" in result.output
    assert "\x1b" not in result.output


def test_the_list_as_json(folder):
    listed = json.loads(invoke("--folder", str(folder), "--json").output)
    assert [headline["id"] for headline in listed["incidents"]] == [ID, numbered(2), numbered(1)]


def test_one_of_them_is_shown(folder):
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
    assert invoke("--folder", str(tmp_path / "none")).exit_code == 2
