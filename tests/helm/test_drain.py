"""files/drain.py, as the preStop hook runs it: beside a sidecar that answers what it should."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.helm.chart import HELM
from tests.helm.server import answering

DRAIN = (HELM / "files" / "drain.py").read_text(encoding="utf-8")
# As it is, but patient: a busy machine is not what decides here.
PATIENT = DRAIN.replace("timeout=5)", "timeout=60)")
assert PATIENT != DRAIN


class Sidecar:
    """Answers with the next of the numbers of requests under way, and goes on with the last."""

    def __init__(self) -> None:
        self.under_way = [0]
        self.healthy = True
        self.metric = "highwater_proxy_requests_in_flight"
        self.asked = 0

    def answer(self, path: str) -> tuple[int, str]:
        if path == "/health/deep":
            return (200 if self.healthy else 503), "{}"
        self.asked += 1
        number = self.under_way.pop(0) if len(self.under_way) > 1 else self.under_way[0]
        return 200, f"# TYPE x gauge\n{self.metric} {number}.0\nother 1.0\n"


@pytest.fixture
def sidecar() -> Iterator[tuple[Sidecar, str]]:
    told = Sidecar()
    with answering(told.answer) as url:
        yield told, url.replace("127.0.0.1", "${LEADER}")


def drain(url: str, seconds: str) -> subprocess.CompletedProcess[str]:
    """With a proxy in the environment that nobody is at: the hook does not use it."""
    environ = {"LEADER": "127.0.0.1", "http_proxy": "http://127.0.0.1:1"}
    command = [sys.executable, "-c", PATIENT, url, "0", seconds]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


def test_it_waits_until_no_request_is_under_way(sidecar: tuple[Sidecar, str]) -> None:
    told, url = sidecar
    told.under_way = [3, 1, 0]
    assert drain(url, "100").returncode == 0
    assert told.asked == 3


def test_it_gives_up_at_last(sidecar: tuple[Sidecar, str]) -> None:
    told, url = sidecar
    told.under_way = [1]
    assert drain(url, "3").returncode == 0
    assert told.asked >= 1


def test_a_sidecar_that_does_not_count_is_not_waited_for(sidecar: tuple[Sidecar, str]) -> None:
    told, url = sidecar
    told.metric = "something_else"
    assert drain(url, "100").returncode == 0
    assert told.asked == 1


def test_it_does_not_wait_for_an_engine_that_hangs(sidecar: tuple[Sidecar, str]) -> None:
    told, url = sidecar
    told.under_way, told.healthy = [5], False
    assert "503" in drain(url, "100").stderr
    assert told.asked == 0


def test_without_a_sidecar_there_is_nobody_to_ask() -> None:
    """And the engine ends as it would without a hook."""
    ended = drain("http://127.0.0.1:1", "100")
    assert ended.returncode == 0
    assert "nothing to wait for" in ended.stderr
