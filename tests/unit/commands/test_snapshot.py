"""`highwater snapshot`: taken by a sidecar."""

from __future__ import annotations

import re

import httpx
import pytest
from click.testing import CliRunner, Result

from highwater.commands.snapshot import snapshot as command
from highwater.units import MIB


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


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
    assert "rank 0: allocation stacks are recorded for 10 min\n" in invoke("take", "--record-stacks", "10").output
    assert sidecar == [("/memory/snapshot/stacks", '{"minutes":10.0}')]
    assert invoke("take", "--record-stacks", "61").exit_code == 2
