"""The guides for others' charts and objects, followed with real Helm and kubectl: what becomes of an engine's pod.

Each page's lines are run as printed, on charts and manifests of the shape of the project's own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from highwater.diagnose.verdict import verdict
from highwater.model.engine import STATES
from tests.fakes.engine import Core, core_on
from tests.helm.chart import Object, container, env, mounts, pod_templates
from tests.helm.validity import validate
from tests.install.guides import (
    CHARTS,
    GUIDES,
    assert_harmless,
    assert_in_front,
    assert_recorded,
    followed,
    last_of,
    manifests,
    pod_of,
    save,
    saved_files,
    the,
)
from tests.install.page import commands
from tests.support.kubernetes_tools import BUNDLES, OLD, Bundle, Tools, tools

with_each = pytest.mark.parametrize("bundle", BUNDLES, ids=str)


def test_the_index_leads_to_every_guide() -> None:
    linked = set(re.findall(r"\]\(([a-z-]+\.md)", (GUIDES / "index.md").read_text(encoding="utf-8")))
    assert {path.name for path in GUIDES.glob("*.md")} - {"index.md"} <= linked


def templated(lines: str, folder: Path, bundle: Bundle, published: str) -> list[Object]:
    """What a page's `helm upgrade` of a published chart would send, as `helm template` of one of its shape shows it."""
    shown = lines.replace("helm upgrade", "helm template").replace(
        published, str(CHARTS / published.rpartition("/")[2])
    )
    assert shown.count("helm template") == lines.count("helm upgrade") == 1
    return manifests(followed(shown, folder, tools(bundle)).rpartition("Installed plugin: highwater\n")[2])


# --- production-stack ---

STACK: Object = {
    "servingEngineSpec": {
        "modelSpec": [
            {
                "name": "opt",
                "repository": "vllm/vllm-openai",
                "tag": "v0.32.0",
                "modelURL": "facebook/opt-125m",
                "replicaCount": 2,
                "requestGPU": 1,
                "initContainer": {"name": "fetch", "image": "busybox:1.36", "command": ["true"]},
                "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
                "vllmConfig": {"extraArgs": ["--max-num-seqs", "8"]},
            },
            {
                "name": "qwen",
                "repository": "vllm/vllm-openai",
                "tag": "v0.32.0",
                "modelURL": "Qwen/Qwen3-0.6B",
                "replicaCount": 1,
                "requestGPU": 1,
            },
        ]
    }
}


@with_each
def test_each_model_of_a_production_stack_stands_behind_the_sidecar(bundle: Bundle, tmp_path: Path) -> None:
    """At the port that the router knows: vLLM takes the last of two flags. Helm 3 and 4 have lines of their own."""
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(STACK))
    save("production-stack", tmp_path)
    helm3, helm4 = commands("install/production-stack.md", "Install")
    objects = templated(helm3 if bundle == OLD else helm4, tmp_path, bundle, "vllm/vllm-stack")
    for each in objects:
        validate(each)
    for model in ("opt", "qwen"):
        (pod,) = pod_templates(the("Deployment", objects, model=model))
        assert_in_front(pod, "vllm", port=8000, engine_port=18000)
        assert_recorded(pod, "vllm")
        assert_harmless(pod)
    (pod,) = pod_templates(the("Deployment", objects, model="opt"))
    engine = container(pod, "vllm")
    named = {port["name"]: port["containerPort"] for port in engine["ports"]}
    (service,) = [each for each in objects if each["kind"] == "Service" and "opt" in each["metadata"]["name"]]
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(named)
    assert named["container-port"] == int(env(container(pod, "highwater"))["HIGHWATER_PORT"])
    assert container(pod, "fetch")["command"] == ["true"]
    assert env(engine)["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert engine["command"][-2:] == ["--max-num-seqs", "8"]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert (engine["startupProbe"]["failureThreshold"], engine["livenessProbe"]["failureThreshold"]) == (60, 3)
    (router,) = pod_templates(next(each for each in objects if each["metadata"]["name"] == "vllm-deployment-router"))
    assert "initContainers" not in router["spec"]


# --- llm-d ---


@with_each
def test_each_role_of_llm_d_has_the_sidecar_at_the_port_where_vllm_was(bundle: Bundle, tmp_path: Path) -> None:
    save("llm-d", tmp_path)
    (lines,) = commands("install/llm-d.md", "Install")
    found = templated(lines, tmp_path, bundle, "llm-d-modelservice/llm-d-modelservice")
    workloads = {each["metadata"]["name"].rpartition("-")[2]: each for each in found}
    for role, port in {"decode": 8200, "prefill": 8000}.items():
        (pod,) = pod_templates(workloads[role])
        assert_in_front(pod, "vllm", port=port, engine_port=10_000 + port)
        assert_recorded(pod, "vllm")
        assert_harmless(pod)
        validate(workloads[role])
    (pod,) = pod_templates(workloads["decode"])
    assert "--vllm-port=8200" in container(pod, "routing-proxy")["args"]
    assert {"name": "metrics", "containerPort": 8200} in container(pod, "vllm")["ports"]


# --- LeaderWorkerSet ---

LWS = (CHARTS.parent / "manifests" / "lws.yaml").read_text(encoding="utf-8")
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


def group(folder: Path, bundle: Bundle) -> list[Object]:
    """What `kubectl apply -k` would send."""
    (folder / "lws.yaml").write_text(LWS)
    save("leaderworkerset", folder)
    look, apply = commands("install/leaderworkerset.md", "Install")[0].splitlines()
    assert apply == "kubectl -n models apply -k ."
    return manifests(followed(look, folder, tools(bundle)))


def pod_of_group(objects: list[Object], template: str) -> Object:
    return pod_of(the("LeaderWorkerSet", objects)["spec"]["leaderWorkerTemplate"][template])


@with_each
def test_the_leader_of_a_group_has_the_sidecar_and_the_other_nodes_the_package(bundle: Bundle, tmp_path: Path) -> None:
    objects = group(tmp_path, bundle)
    leader, worker = (pod_of_group(objects, template) for template in ("leaderTemplate", "workerTemplate"))
    for pod, name in ((leader, "vllm-leader"), (worker, "vllm-worker")):
        validate(pod)
        assert env(container(pod, name))["HF_TOKEN"] == "theirs"
        assert mounts(container(pod, name))["/dev/shm"] == "dshm"
    engine = container(leader, "vllm-leader")
    engine["args"] = shlex.split(engine["command"].pop().rpartition(";")[2])  # vLLM's command comes last in a line
    assert_in_front(leader, "vllm-leader", port=8080, engine_port=18080)
    assert_recorded(leader, "vllm-leader")
    assert_harmless(leader)
    assert last_of("--worker-extension-cls", engine["args"]) == "highwater_worker.MemoryExtension"
    engine = container(worker, "vllm-worker")
    package = env(engine)["PYTHONPATH"]
    assert mounts(engine)[package] == mounts(container(worker, "highwater-extension"))[package]
    assert container(worker, "highwater") == {}
    made, before = (the("LeaderWorkerSet", each)["spec"]["leaderWorkerTemplate"] for each in (objects, manifests(LWS)))
    assert (made["size"], made["restartPolicy"]) == (before["size"], before["restartPolicy"])
    assert the("Service", objects) == the("Service", manifests(LWS))


def test_a_sidecar_that_ends_restarts_no_container_of_its_group(tmp_path: Path) -> None:
    """The shell runs it again: the controller would make the group anew. SIGTERM reaches the sidecar and ends both."""
    sidecar = container(pod_of_group(group(tmp_path, OLD), "leaderTemplate"), "highwater")
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


# --- KServe ---

KSERVE = {name: yaml.safe_load(text) for name, text in saved_files("kserve").items()}
KSERVE_BASE = yaml.safe_load((CHARTS.parent / "manifests" / "kserve-base.yaml").read_text(encoding="utf-8"))


def merged(base: Object, over: Object, programs: Tools, folder: Path) -> Object:
    """Two pods' specs, by the library that KServe merges them with: lists by their entries' names."""
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "any"}}
    file = folder / "base.json"
    file.write_text(json.dumps({**deployment, "spec": {"template": {"spec": base}}}))
    patch = json.dumps({"spec": {"template": {"spec": over}}})
    text = programs.kubectl("patch", "--local", "-f", str(file), "--type=strategic", f"--patch={patch}", "-o", "json")
    return pod_of(json.loads(text)["spec"]["template"])


@with_each
def test_an_llm_service_of_kserve_is_watched_and_nothing_of_its_engine_moves(bundle: Bundle, tmp_path: Path) -> None:
    pod = merged(KSERVE_BASE, KSERVE["llm.yaml"]["spec"]["template"], tools(bundle), tmp_path)
    engine, (before,) = container(pod, "main"), KSERVE_BASE["containers"]
    kept = ("image", "command", "ports", "livenessProbe", "readinessProbe", "startupProbe", "securityContext")
    assert [engine[key] for key in kept] == [before[key] for key in kept]
    assert "args" not in engine
    assert "VLLM_SERVER_DEV_MODE" not in env(engine)
    assert_only_watches(container(pod, "highwater"), "http://127.0.0.1:8000")
    assert_recorded(pod, "main")
    assert_harmless(pod)
    validate(pod)


def assert_only_watches(sidecar: Object, engine_url: str | None = None) -> None:
    """No request goes through it, and it never makes its pod unready; it is run again by the shell of the LWS page."""
    settings = env(sidecar)
    assert settings["HIGHWATER_PROXY__ENABLED"] == "false"
    assert engine_url in (None, settings["HIGHWATER_ENGINE_URL"])
    assert not {"readinessProbe", "livenessProbe", "startupProbe"} & set(sidecar)
    leader = yaml.safe_load(saved_files("leaderworkerset")["leader.yaml"])[-1]["value"][1]
    assert [sidecar[key] for key in ("command", "args")] == [leader[key] for key in ("command", "args")]


@with_each
def test_a_runtimes_engine_stands_behind_the_sidecar_at_kserves_port(bundle: Bundle, tmp_path: Path) -> None:
    """Without a runtime's name KServe would look for one, and by default it makes Knative services."""
    service, runtime = KSERVE["service.yaml"], KSERVE["runtime.yaml"]
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Standard"}
    assert "initContainers" not in runtime["spec"], "a ServingRuntime has no such field"
    model = {"name": "kserve-container", "resources": predictor["model"]["resources"]}
    over = {"initContainers": predictor["initContainers"], "containers": [model]}
    pod = merged({key: runtime["spec"][key] for key in ("containers", "volumes")}, over, tools(bundle), tmp_path)
    pod = yaml.safe_load(yaml.safe_dump(pod).replace("{{.Name}}", service["metadata"]["name"]))
    assert_in_front(pod, "kserve-container", port=8080, engine_port=18080)
    assert_recorded(pod, "kserve-container")
    assert_harmless(pod)
    validate(pod)
    assert pod["spec"]["containers"][0]["ports"][0]["containerPort"] == 8080
    assert container(pod, "kserve-container")["args"][0] == "--served-model-name=qwen"


# --- Ray ---


def test_a_ray_workers_vllm_is_recorded_and_nothing_of_ray_moves() -> None:
    service = yaml.safe_load(saved_files("ray")["service.yaml"])
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = pod_of(workers["template"])
    ray = container(pod, "ray-worker")
    assert_recorded(pod, "ray-worker")
    assert_harmless(pod)
    validate(pod)
    assert_only_watches(container(pod, "highwater"))
    assert set(ray) == {"name", "image", "resources", "env", "volumeMounts"}
    assert pod["spec"]["containers"] == [ray], "KubeRay takes the first container for Ray's"
    assert "runtime_env" not in service["spec"]["serveConfigV2"]
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    (model,) = app["args"]["llm_configs"]
    assert int(ray["resources"]["limits"]["nvidia.com/gpu"]) == model["engine_kwargs"]["tensor_parallel_size"]


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    """Workers that record themselves, and nobody at the engine's address."""
    made = core_on(recorder_dir=tmp_path, dev_mode=False)
    made.fake.start_recorders(tmp_path / "recorder")
    made.fake.down = True
    yield made
    made.recorders.close()
    for worker in made.fake.workers:
        worker.recorder.close()


async def test_every_rank_is_read_and_fresh_without_an_api_server(core: Core) -> None:
    for _ in range(5):
        core.fake.end_step()
        report = await core.tick(1.0, spare_idle=True)
        assert (report.ranks_reported, report.stale, report.age_seconds) == (2, False, 0.0)
        assert {rank.source for rank in report.ranks} == {"recorder"}
        assert all(rank.used_bytes and rank.components and rank.encoder_cache for rank in report.ranks)
    assert core.fake.ops() == []


async def test_without_an_api_server_the_state_is_starting_for_ever_and_the_rest_unknown(core: Core) -> None:
    for _ in range(40):
        core.fake.end_step()
        report = await core.tick(60.0, spare_idle=True)
    assert report.engine.state == "starting"
    assert STATES[report.engine.state].is_absent
    assert report.progress is None
    assert report.growth.since_ready_bytes is None
    assert verdict(report).exit_status == 1
