"""docs/install/llm-d.md, followed with the real Helm on a chart of the shape of llm-d-modelservice."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

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
    saved_files,
)
from tests.support.kubernetes_tools import BUNDLES, OLD, Bundle, tools

PAGE = page("llm-d")
PORTS = {"decode": 8200, "prefill": 8000}


def rendered(lines: str, folder: Path, bundle: Bundle) -> dict[str, Object]:
    """The workloads that the page's `helm upgrade` would send, by their role, as `helm template` shows them."""
    shown = lines.replace("helm upgrade", "helm template")
    shown = shown.replace("llm-d-modelservice/llm-d-modelservice", str(CHARTS / "llm-d-modelservice"))
    assert shown.count("helm template") == lines.count("helm upgrade") == 1
    found = manifests(followed(shown, folder, tools(bundle)))
    return {each["metadata"]["name"].rpartition("-")[2]: each for each in found}


@pytest.fixture(scope="module", params=BUNDLES, ids=str)
def workloads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Object]:
    """With each Helm."""
    folder = tmp_path_factory.mktemp("llm-d")
    save(PAGE, folder)
    (lines,) = commands(PAGE, "Install")
    return rendered(lines, folder, request.param)


@pytest.mark.parametrize("role", PORTS)
def test_each_role_has_the_sidecar_at_the_port_where_vllm_was(role: str, workloads: dict[str, Object]) -> None:
    (pod,) = pod_templates(workloads[role])
    assert_in_front(pod, "vllm", port=PORTS[role], engine_port=10_000 + PORTS[role])
    assert_recorded(pod, "vllm")
    assert_harmless(pod)
    assert_valid(workloads[role])


def test_the_routing_proxy_still_leads_to_the_same_port(workloads: dict[str, Object]) -> None:
    (pod,) = pod_templates(workloads["decode"])
    settings = env(container(pod, "highwater"))
    assert f"--vllm-port={settings['HIGHWATER_PORT']}" in container(pod, "routing-proxy")["args"]
    assert {"name": "metrics", "containerPort": 8200} in container(pod, "vllm")["ports"]


def test_the_marked_lines_are_all_that_highwater_needs(tmp_path: Path) -> None:
    save(PAGE, tmp_path)
    before = yaml.safe_load(saved_files(PAGE)["values.yaml"])
    selectors = [each["spec"]["selector"] for each in rendered(commands(PAGE, "Install")[0], tmp_path, OLD).values()]
    (lines,) = commands(PAGE, "Remove")
    removed = rendered(lines, tmp_path, OLD)
    values = (tmp_path / "values.yaml").read_text()
    assert "highwater" not in values
    assert "highwater" not in yaml.safe_dump_all(removed.values())
    (pod,) = pod_templates(removed["prefill"])
    assert container(pod, "vllm")["args"] == ["Qwen/Qwen3-0.6B", "--port", "8000", "--enforce-eager"]
    assert "initContainers" not in pod["spec"]
    assert [each["spec"]["selector"] for each in removed.values()] == selectors, "a selector cannot be changed"
    for role in PORTS:
        left = yaml.safe_load(values)[role]["containers"][0]
        assert left.items() <= {**before[role]["containers"][0], "args": left["args"], "env": left["env"]}.items()
