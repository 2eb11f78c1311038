"""docs/install/production-stack.md, followed with the real Helm and kubectl on a chart of production-stack's shape."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from release.version import current
from tests.helm.chart import Object, container, env, pod_templates
from tests.install.guides import (
    CHARTS,
    assert_harmless,
    assert_in_front,
    assert_recorded,
    assert_valid,
    commands,
    followed,
    manifests,
    page,
    save,
    the,
)
from tests.support.kubernetes_tools import BUNDLES, OLD, Bundle, tools

PAGE = page("production-stack")
VALUES: Object = {
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


def rendered(lines: str, folder: Path, bundle: Bundle) -> list[Object]:
    """What the page's `helm upgrade` would send, as `helm template` shows it."""
    (folder / "values.yaml").write_text(yaml.safe_dump(VALUES))
    shown = lines.replace("helm upgrade", "helm template").replace("vllm/vllm-stack", str(CHARTS / "vllm-stack"))
    assert shown.count("helm template") == lines.count("helm upgrade") == 1
    printed = followed(shown, folder, tools(bundle))
    return manifests(printed.rpartition("Installed plugin: highwater\n")[2])


def installed(folder: Path, bundle: Bundle) -> list[Object]:
    """After the page's lines for that Helm."""
    save(PAGE, folder)
    helm3, helm4 = commands(PAGE, "Install")
    return rendered(helm3 if bundle == OLD else helm4, folder, bundle)


@pytest.fixture(scope="module", params=BUNDLES, ids=str)
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """With each Helm."""
    return installed(tmp_path_factory.mktemp("stack"), request.param)


def test_every_engine_stands_behind_the_sidecar_at_the_port_that_the_router_knows(objects: list[Object]) -> None:
    """Each model of the release; vLLM takes the last of two flags."""
    for model in ("opt", "qwen"):
        (pod,) = pod_templates(the("Deployment", objects, model=model))
        assert_in_front(pod, "vllm", port=8000, engine_port=18000)
        assert_recorded(pod, "vllm")
        assert_harmless(pod)


def test_what_comes_out_is_valid_kubernetes(objects: list[Object]) -> None:
    """Strictly, for the three newest versions."""
    for each in objects:
        assert_valid(each)


def test_the_service_finds_its_port_by_name(objects: list[Object]) -> None:
    (pod,) = pod_templates(the("Deployment", objects, model="opt"))
    (service,) = [each for each in objects if each["kind"] == "Service" and "opt" in each["metadata"]["name"]]
    named = {port["name"]: port["containerPort"] for port in container(pod, "vllm")["ports"]}
    wanted = {port["targetPort"] for port in service["spec"]["ports"]}
    assert wanted <= set(named)
    assert named["container-port"] == int(env(container(pod, "highwater"))["HIGHWATER_PORT"])


def test_what_was_theirs_is_kept(objects: list[Object]) -> None:
    (pod,) = pod_templates(the("Deployment", objects, model="opt"))
    engine = container(pod, "vllm")
    assert container(pod, "fetch")["command"] == ["true"]
    assert env(engine)["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert engine["command"][-2:] == ["--max-num-seqs", "8"]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert (engine["startupProbe"]["failureThreshold"], engine["livenessProbe"]["failureThreshold"]) == (60, 3)
    (router,) = [each for each in objects if each["metadata"]["name"] == "vllm-deployment-router"]
    (pod,) = pod_templates(router)
    assert "initContainers" not in pod["spec"]


@pytest.mark.parametrize("bundle", BUNDLES, ids=str)
def test_a_second_time_changes_nothing(bundle: Bundle, tmp_path: Path) -> None:
    once = installed(tmp_path, bundle)
    (tmp_path / "once.yaml").write_text(yaml.safe_dump_all(once))
    assert manifests(followed("./highwater/post-render.sh < once.yaml", tmp_path, tools(bundle))) == once


@pytest.mark.parametrize("bundle", BUNDLES, ids=str)
def test_after_removal_all_is_as_it_was(bundle: Bundle, tmp_path: Path) -> None:
    installed(tmp_path, bundle)
    plain = f"helm template vllm {CHARTS / 'vllm-stack'} -n models -f values.yaml"
    (removal,) = commands(PAGE, "Remove")
    removed = rendered(removal, tmp_path, bundle)
    assert removed == manifests(followed(plain, tmp_path, tools(bundle)))
    assert "highwater" not in yaml.safe_dump_all(removed)


def test_an_upgrade_is_another_tag(tmp_path: Path) -> None:
    once = installed(tmp_path, OLD)
    file = tmp_path / "highwater" / "kustomization.yaml"
    file.write_text(file.read_text().replace(f"newTag: {current()}", "newTag: 9.8.7"))
    again = rendered(commands(PAGE, "Install")[0], tmp_path, OLD)
    old, new = (yaml.safe_dump_all(each) for each in (once, again))
    assert old.count(f"highwater:{current()}") == 4  # two containers in each of two models' pods
    assert new == old.replace(f"highwater:{current()}", "highwater:9.8.7")


def test_to_watch_only_vllm_stays_where_it_is(tmp_path: Path) -> None:
    watching = PAGE.partition("**To watch only**")[2].partition("## ")[0]
    variables = [yaml.safe_load(line) for line in re.findall(r"`(\{name: [^`]*\})`", watching)]
    save(PAGE, tmp_path)
    file = tmp_path / "highwater" / "sidecar.yaml"
    patch = yaml.safe_load(file.read_text())
    _, sidecar = patch["spec"]["template"]["spec"]["initContainers"]
    (engine,) = patch["spec"]["template"]["spec"]["containers"]
    for key in ("args", "startupProbe", "livenessProbe", "readinessProbe"):
        del engine[key]
    for key in ("livenessProbe", "readinessProbe"):
        del sidecar[key]
    engine["env"] = [each for each in engine["env"] if each["name"] != "VLLM_SERVER_DEV_MODE"]
    left_out = {"HIGHWATER_PORT", "HIGHWATER_ENGINE_URL"}
    sidecar["env"] = [each for each in sidecar["env"] if each["name"] not in left_out] + variables
    file.write_text(yaml.safe_dump(patch))
    objects = rendered(commands(PAGE, "Install")[0], tmp_path, OLD)
    plain = manifests(
        tools(OLD).helm(
            "template", "vllm", str(CHARTS / "vllm-stack"), "-n", "models", "-f", str(tmp_path / "values.yaml")
        )
    )
    (pod,), (before,) = (pod_templates(the("Deployment", each, model="opt")) for each in (objects, plain))
    now, then = container(pod, "vllm"), container(before, "vllm")
    unchanged = {"command", "ports", "startupProbe", "livenessProbe", "readinessProbe", "resources"}
    assert {key: now[key] for key in unchanged} == {key: then[key] for key in unchanged}
    assert "args" not in now
    settings = env(container(pod, "highwater"))
    assert settings["HIGHWATER_PROXY__ENABLED"] == "false"
    assert settings["HIGHWATER_ENGINE_URL"] == "http://127.0.0.1:8000"
    assert_recorded(pod, "vllm")
    assert_valid(the("Deployment", objects, model="opt"))
