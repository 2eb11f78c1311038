"""docs/install/leaderworkerset.md, followed with real Kustomize on a manifest of the shape of the project's example."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helm.chart import Object, container, env, mounts
from tests.install.guides import (
    CHARTS,
    assert_harmless,
    assert_in_front,
    assert_recorded,
    assert_valid,
    commands,
    followed,
    last_of,
    manifests,
    page,
    pod_of,
    save,
    the,
)
from tests.support.kubernetes_tools import BUNDLES, OLD, Bundle, tools

PAGE = page("leaderworkerset")
THEIRS = (CHARTS.parent / "manifests" / "lws.yaml").read_text(encoding="utf-8")

# Ends with 2 twice, as on a setting that cannot be; then runs until SIGTERM.
STAND_IN = """#!{python}
import pathlib, signal, sys
folder = pathlib.Path("{folder}")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with (folder / "starts").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if len((folder / "starts").read_text().splitlines()) < 3:
    sys.exit(2)
(folder / "said").write_text("running")
signal.sigwait([signal.SIGTERM])
(folder / "end").write_text("in order")
"""


def built(folder: Path, bundle: Bundle) -> list[Object]:
    """What `kubectl apply -k` would send."""
    (folder / "lws.yaml").write_text(THEIRS)
    save(PAGE, folder)
    (lines,) = commands(PAGE, "Install")
    look, apply = lines.splitlines()
    assert apply == "kubectl -n models apply -k ."
    return manifests(followed(look, folder, tools(bundle)))


@pytest.fixture(scope="module", params=BUNDLES, ids=str)
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """With each Kustomize."""
    return built(tmp_path_factory.mktemp("lws"), request.param)


def pod(objects: list[Object], template: str) -> Object:
    return pod_of(the("LeaderWorkerSet", objects)["spec"]["leaderWorkerTemplate"][template])


def with_words(leader: Object) -> Object:
    """The leader with its shell line taken apart: vLLM's command comes last in it."""
    engine = container(leader, "vllm-leader")
    engine["args"] = shlex.split(engine["command"].pop().rpartition(";")[2])
    return leader


def test_the_leader_has_the_sidecar_at_the_port_of_the_service(objects: list[Object]) -> None:
    leader = with_words(pod(objects, "leaderTemplate"))
    assert_in_front(leader, "vllm-leader", port=8080, engine_port=18080)
    assert_recorded(leader, "vllm-leader")
    assert_harmless(leader)
    assert container(leader, "vllm-leader")["ports"] == [{"containerPort": 8080}]
    extension = last_of("--worker-extension-cls", container(leader, "vllm-leader")["args"])
    assert extension == "highwater_worker.MemoryExtension"


def test_other_nodes_find_the_worker_package_and_have_no_sidecar(objects: list[Object]) -> None:
    worker = pod(objects, "workerTemplate")
    engine = container(worker, "vllm-worker")
    package = env(engine)["PYTHONPATH"]
    assert mounts(engine)[package] == mounts(container(worker, "highwater-extension"))[package]
    assert container(worker, "highwater") == {}
    assert engine["command"][-1].startswith("serve worker")


def test_both_templates_are_valid_pods_and_keep_what_was_theirs(objects: list[Object]) -> None:
    """For the three newest versions of Kubernetes; size, restart policy and Service are untouched."""
    for template, name in (("leaderTemplate", "vllm-leader"), ("workerTemplate", "vllm-worker")):
        each = pod(objects, template)
        assert_valid(each)
        assert env(container(each, name))["HF_TOKEN"] == "theirs"
        assert mounts(container(each, name))["/dev/shm"] == "dshm"
    group, before = (the("LeaderWorkerSet", each)["spec"] for each in (objects, manifests(THEIRS)))
    kept = {"size", "restartPolicy"}
    assert [{key: each["leaderWorkerTemplate"][key] for key in kept} for each in (group, before)] == [
        {"size": 2, "restartPolicy": "RecreateGroupOnPodRestart"}
    ] * 2
    assert the("Service", objects) == the("Service", manifests(THEIRS))


def test_a_second_time_changes_nothing_and_removal_is_their_own_file(tmp_path: Path) -> None:
    once = built(tmp_path, OLD)
    assert manifests(tools(OLD).kubectl("kustomize", str(tmp_path))) == once
    assert commands(PAGE, "Remove") == ["kubectl -n models apply -f lws.yaml\n"]
    assert (tmp_path / "lws.yaml").read_text() == THEIRS


def test_a_sidecar_that_ends_restarts_no_container(objects: list[Object], tmp_path: Path) -> None:
    """The shell runs it again: the controller would make the group anew. SIGTERM reaches the sidecar and ends both."""
    sidecar = container(pod(objects, "leaderTemplate"), "highwater")
    assert "livenessProbe" not in sidecar, "the kubelet would restart the container"
    os.mkfifo(tmp_path / "said")
    (tmp_path / "sleep").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "highwater").write_text(STAND_IN.format(python=sys.executable, folder=tmp_path))
    for name in ("highwater", "sleep"):
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen([*sidecar["command"], *sidecar["args"]], env=environ, start_new_session=True) as shell:
        try:
            assert (tmp_path / "said").read_text() == "running"
            assert (tmp_path / "starts").read_text() == "serve\n" * 3
            shell.send_signal(signal.SIGTERM)
            assert shell.wait(timeout=300) == 0
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
    assert (tmp_path / "end").read_text() == "in order"
