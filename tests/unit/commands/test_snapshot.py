"""`highwater snapshot`: of files, printed so that no terminal obeys them; and taken by a sidecar."""

from __future__ import annotations

import json
import pickle
import re
from xml.etree import ElementTree as ET

import httpx
import pytest
from click.testing import CliRunner, Result

from highwater.commands.snapshot import snapshot as command
from tests.unit.snapshots.made import MIB, block, fragmented, frames, segment, snapshot


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.pickle"
    path.write_bytes(pickle.dumps(fragmented()))
    return path


def test_a_file_is_explained_with_a_picture(file, tmp_path):
    """In words, and as SVG."""
    picture = tmp_path / "segments.svg"
    result = invoke("explain", str(file), "--want", "180MiB", "--picture", str(picture))
    assert result.exit_code == 0, result.output
    assert "83.0 MiB < 180 MiB wanted" in result.output
    assert ET.parse(picture).getroot().tag.endswith("svg")  # noqa: S314 - our own text


def test_as_json(file):
    """Bytes as integers."""
    found = json.loads(invoke("explain", str(file), "--json").output)
    assert (found["schema"], found["file"], found["devices"][0]["segments"]) == (1, "some.pickle", 58)
    difference = json.loads(invoke("diff", str(file), str(file), "--json").output)
    assert (difference["warnings"], difference["devices"][0]["by_stack"]) == ([], [])


def test_a_refused_file_ends_it_with_one_line(tmp_path):
    """And status 1."""
    bad = tmp_path / "bad.pickle"
    bad.write_bytes(pickle.dumps(print))
    result = invoke("explain", str(bad))
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert result.output.startswith("Error: bad.pickle: instruction STACK_GLOBAL (builtins.print)")


def test_a_terminal_obeys_nothing_of_a_file(tmp_path):
    """A function may be called anything."""
    odd = tmp_path / "odd.pickle"
    stack = frames("run\x1b[2J\x07")
    raw = snapshot([segment([block(MIB, "live", stack), block(MIB, "free")])])
    odd.write_bytes(pickle.dumps(raw))
    for arguments in (("explain", str(odd)), ("explain", str(odd), "--json"), ("diff", str(odd), str(odd))):
        result = invoke(*arguments)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output


def test_no_size_is_a_usage_error(file):
    """It says what one is."""
    assert "'much' is not a size; one is 1GiB" in invoke("explain", str(file), "--want", "much").output


@pytest.fixture
def sidecar(monkeypatch):
    """What a sidecar answers, by path; what it was asked is kept in `asked`."""
    asked: list[tuple[str, str]] = []
    rank = {"dp_rank": None, "rank": 0, "bytes": 4 * MIB, "segments": 9, "elapsed_ms": 20.0, "path": "/run/a.pickle"}
    taken = {"dry_run": False, "snapshot": "a", "ranks": [rank]}
    stacks = {"rank": 0, "recording": True, "was_recording": False, "seconds_left": 600.0, "entries": 50_000}
    answers = {"/memory/snapshot": taken, "/memory/snapshot/stacks": {"ranks": [stacks]}}

    def handle(request):
        asked.append((request.url.path, request.content.decode()))
        return httpx.Response(200, json=answers[request.url.path])

    client = httpx.Client

    def in_process(**options):
        options.pop("verify")
        return client(transport=httpx.MockTransport(handle), **options)

    monkeypatch.setattr(httpx, "Client", in_process)
    monkeypatch.setattr("highwater.client.options.check_there", lambda _: None)
    return asked


def test_a_snapshot_is_taken(sidecar):
    """Its files are named."""
    assert re.search(r"^(rank )?0 +4\.0 MiB +0\.02 s +/run/a\.pickle$", invoke("take").output, re.MULTILINE)
    assert sidecar == [("/memory/snapshot", '{"dry_run":false}')]


def test_stacks_are_recorded_for_so_many_minutes(sidecar):
    """No snapshot is taken by that."""
    assert "rank 0: allocation stacks are recorded for 10 m\n" in invoke("take", "--record-stacks", "10").output
    assert sidecar == [("/memory/snapshot/stacks", '{"minutes":10.0}')]
    assert invoke("take", "--record-stacks", "61").exit_code == 2
