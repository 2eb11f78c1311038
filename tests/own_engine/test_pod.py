"""The pod without Kubernetes, with stand-ins for an engine: what the situations in the files beside this rest on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from highwater_worker.kernel.cgroup import read_container
from tests.helm import chart
from tests.patience import wait_until
from tests.pod.pod import Container, Pod, own_group, why_not

MIB = 1024**2
LIMIT_BYTES = 64 * MIB
GREEDY = "kept = [bytearray(1 << 20) for _ in range(200)]"
SLEEPY = "import time; time.sleep(3600)"
ORDERLY = f"""
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
{SLEEPY}
"""
# A test that is killed in the middle, in a process of its own.
KILLED = """
import os, sys
from pathlib import Path
from tests.pod.pod import Pod
folder = Path(sys.argv[1])
with Pod(folder) as pod:
    pod.container("vllm", limit_bytes=None).start(sys.argv[2:], env=os.environ, cwd=folder)
    print(pod.group, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    if reason := why_not(tmp_path / "tried"):
        pytest.skip(reason)
    with Pod(tmp_path / "pod") as made:
        yield made


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


def run(container: Container, program: str) -> None:
    container.start(python(program), env=os.environ, cwd=Path("/"))


def run_to_the_end(container: Container, program: str) -> None:
    run(container, program)
    wait_until(lambda: not container.is_running())


def test_the_chart_removes_what_a_killed_life_left_in_shm(pod: Pod) -> None:
    program = "ls /dev/shm; touch /dev/shm/psm_$$-$(date +%N) /dev/shm/mine; exec sleep 3600"
    values = {"engine": {"command": ["sh", "-c", program], "args": ["sh"]}}
    engine = chart.container(chart.pod(values), "vllm")
    command = [text.replace("/run/highwater/shm", "/dev/shm") for text in [*engine["command"], *engine["args"]]]
    container = pod.container("vllm", limit_bytes=LIMIT_BYTES)
    for _ in range(2):
        container.start(command, env=os.environ, cwd=Path("/"))
        wait_until(lambda: len(pod.shm()) == 2 and container.log_path.read_text().count("\n") == container.starts - 1)
        container.kill()
        wait_until(lambda: not container.is_running())
    assert container.log_path.read_text().split() == ["mine"]
    assert len(pod.shm()) == 2


def test_the_sidecars_own_group_does_not_count_the_engines_kill(pod: Pod) -> None:
    engine, sidecar = pod.container("vllm", limit_bytes=LIMIT_BYTES), pod.container("highwater", limit_bytes=None)
    run(sidecar, ORDERLY)
    wait_until(sidecar.pids)
    run_to_the_end(engine, GREEDY)
    group = read_container(pid=sidecar.pids()[0])
    assert group is not None
    assert group["events"]["oom_kill"] == 0


def test_nothing_is_left_of_a_pod_whose_test_is_killed(pod: Pod, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), *python(ORDERLY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        group = Path(test.stdout.readline().strip())
        container = group / "vllm-1"
        wait_until(lambda: (container / "cgroup.procs").exists() and (container / "cgroup.procs").read_text())
        pids = [*map(int, (container / "cgroup.procs").read_text().split())]
        test.send_signal(signal.SIGKILL)
    wait_until(lambda: not group.exists())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert group.parent == own_group()
