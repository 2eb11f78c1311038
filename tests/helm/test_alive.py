"""files/alive.py, as the engine's liveness probe runs it: who is asked, and who decides."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.helm.chart import HELM, ci_values, container, pod
from tests.helm.server import answering

ALIVE = (HELM / "files" / "alive.py").read_text(encoding="utf-8")
# As it is, but patient: a busy machine is not what decides here.
PATIENT = ALIVE.replace("SECONDS = 3.0", "SECONDS = 60.0")
assert PATIENT != ALIVE
NOBODY = "http://127.0.0.1:1"
STARTING = '{"healthy": true, "engine": "starting", "reason": "nothing answers"}'


def knowing(path: str, status: int, at: Path | None = None, body: str = "") -> AbstractContextManager[str]:
    return answering(lambda asked: (status, body) if asked == path else (404, ""), at)


def probe(sidecar: str, engine: str) -> int:
    """With a proxy in the environment that nobody is at: the probe does not use it."""
    command = [sys.executable, "-I", "-S", "-c", PATIENT, sidecar, engine]
    environ = {"http_proxy": NOBODY}
    return subprocess.run(command, env=environ, capture_output=True, timeout=300, check=False).returncode


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_sidecar_that_answers_decides(status, code):
    """Whatever the engine's own health says: it is 200 while the engine hangs."""
    with knowing("/health/deep", status) as sidecar, knowing("/health", 500 if status == 200 else 200) as engine:
        assert probe(sidecar, engine) == code


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_where_the_sidecar_is_gone_the_engine_decides(status, code):
    with knowing("/health", status) as engine:
        assert probe(NOBODY, engine) == code


def test_a_sidecar_that_knows_no_such_path_decides_nothing():
    with knowing("/", 200) as other, knowing("/health", 200) as engine:
        assert probe(other, engine) == 0


def test_an_engine_that_loads_has_not_started():
    with knowing("/health/deep", 200, body=STARTING) as sidecar:
        assert probe(sidecar, NOBODY) == 1


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_of_an_engine_that_starts_again_its_own_health_decides(status, code):
    with knowing("/health/deep", 200, body=STARTING) as sidecar, knowing("/health", status) as engine:
        assert probe(sidecar, engine) == code
        assert probe(sidecar, NOBODY) == 1


def test_where_nobody_answers_the_probe_fails():
    assert probe(NOBODY, NOBODY) == 1


def test_an_engine_on_a_socket_is_asked_there(tmp_path):
    with knowing("/health", 200, tmp_path / "s") as engine:
        assert probe(NOBODY, engine) == 0
    assert probe(NOBODY, f"unix:{tmp_path / 'none'}") == 1


@pytest.mark.parametrize("kind", ["startupProbe", "livenessProbe"])
def test_the_chart_runs_this_very_file(kind):
    command = container(pod(ci_values("default-values.yaml")), "vllm")[kind]["exec"]["command"]
    assert command[:4] == ["python3", "-I", "-S", "-c"]
    assert command[4].strip() == ALIVE.strip()
