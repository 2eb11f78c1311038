"""docs/install/kserve.md: its objects, merged as KServe merges them, by Kubernetes' own merge in kubectl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import Object, container, env
from tests.install.guides import (
    CHARTS,
    assert_harmless,
    assert_in_front,
    assert_recorded,
    assert_valid,
    commands,
    followed,
    page,
    pod_of,
    save,
    saved_files,
)
from tests.support.kubernetes_tools import BUNDLES, OLD, Tools, tools

PAGE = page("kserve")
FILES = {name: yaml.safe_load(text) for name, text in saved_files(PAGE).items()}
BASE = yaml.safe_load((CHARTS.parent / "manifests" / "kserve-base.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=BUNDLES, ids=str)
def kubectl(request: pytest.FixtureRequest) -> Tools:
    """Each version."""
    return tools(request.param)


def merged(base: Object, over: Object, programs: Tools, folder: Path) -> Object:
    """Two pods' specs, by the library that KServe merges them with: lists by their entries' names."""
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "any"}}
    file = folder / "base.json"
    file.write_text(json.dumps({**deployment, "spec": {"template": {"spec": base}}}))
    patch = json.dumps({"spec": {"template": {"spec": over}}})
    text = programs.kubectl("patch", "--local", "-f", str(file), "--type=strategic", f"--patch={patch}", "-o", "json")
    return pod_of(json.loads(text)["spec"]["template"])


def llm_pod(programs: Tools, folder: Path, service: Object) -> Object:
    return merged(BASE, service["spec"]["template"], programs, folder)


def runtime_pod(programs: Tools, folder: Path) -> Object:
    """The runtime's containers and volumes, and over them what the service says of the pod."""
    runtime, predictor = FILES["runtime.yaml"]["spec"], FILES["service.yaml"]["spec"]["predictor"]
    base = {key: runtime[key] for key in ("containers", "volumes")}
    model = {"name": "kserve-container", "resources": predictor["model"]["resources"]}
    over = {"initContainers": predictor["initContainers"], "containers": [model]}
    pod = merged(base, over, programs, folder)
    return yaml.safe_load(yaml.safe_dump(pod).replace("{{.Name}}", FILES["service.yaml"]["metadata"]["name"]))


def test_an_llm_service_is_watched_and_nothing_of_its_engine_moves(kubectl: Tools, tmp_path: Path) -> None:
    pod = llm_pod(kubectl, tmp_path, FILES["llm.yaml"])
    engine, (before,) = container(pod, "main"), BASE["containers"]
    kept = ("image", "command", "ports", "livenessProbe", "readinessProbe", "startupProbe", "securityContext")
    assert [engine[key] for key in kept] == [before[key] for key in kept]
    assert "args" not in engine
    settings = env(container(pod, "highwater"))
    assert settings["HIGHWATER_PROXY__ENABLED"] == "false"
    assert settings["HIGHWATER_ENGINE_URL"] == "http://127.0.0.1:8000"
    assert "VLLM_SERVER_DEV_MODE" not in env(engine)
    assert_recorded(pod, "main")
    assert_harmless(pod)
    assert_valid(pod)


def test_a_watching_sidecar_never_makes_the_pod_unready(kubectl: Tools, tmp_path: Path) -> None:
    sidecar = container(llm_pod(kubectl, tmp_path, FILES["llm.yaml"]), "highwater")
    assert not {"readinessProbe", "livenessProbe", "startupProbe"} & set(sidecar)
    leader = yaml.safe_load(saved_files(page("leaderworkerset"))["leader.yaml"])[-1]["value"][1]
    assert [sidecar[key] for key in ("command", "args")] == [leader[key] for key in ("command", "args")]


def test_a_runtimes_engine_stands_behind_the_sidecar_at_kserves_port(kubectl: Tools, tmp_path: Path) -> None:
    pod = runtime_pod(kubectl, tmp_path)
    assert_in_front(pod, "kserve-container", port=8080, engine_port=18080)
    assert_recorded(pod, "kserve-container")
    assert_harmless(pod)
    assert_valid(pod)
    assert pod["spec"]["containers"][0]["ports"][0]["containerPort"] == 8080
    assert container(pod, "kserve-container")["args"][0] == "--served-model-name=qwen"


def test_the_service_names_the_runtime_and_no_knative() -> None:
    """Without a name KServe would look for one, and by default it makes Knative services."""
    service, runtime = FILES["service.yaml"], FILES["runtime.yaml"]
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Standard"}
    assert "initContainers" not in runtime["spec"], "a ServingRuntime has no such field"


def test_twice_changes_nothing_and_the_removal_gives_back_the_base(tmp_path: Path) -> None:
    once = llm_pod(tools(OLD), tmp_path, FILES["llm.yaml"])
    assert merged(once["spec"], FILES["llm.yaml"]["spec"]["template"], tools(OLD), tmp_path) == once
    save(PAGE, tmp_path)
    (lines,) = commands(PAGE, "Remove")
    marked, _apply = lines.splitlines()
    followed(marked, tmp_path, tools(OLD))
    left = yaml.safe_load((tmp_path / "llm.yaml").read_text())
    assert left["spec"]["template"] == {
        "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    }
    assert "highwater" not in (tmp_path / "llm.yaml").read_text()
