"""For a vLLM workload that is there already: what comes beside the patch, and the templates from another chart.

The patch itself is tested with real programs: tests/install/test_attach.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from helm_python import Chart, HelmRenderError

from tests.helm.chart import HELM, ci_values, container, env, kinds, merged, objects, pod_templates, the
from tests.helm.validity import validate

ATTACH = ci_values("attach-values.yaml")


def test_no_workload_is_made_and_all_else_finds_theirs() -> None:
    assert not {"Deployment", "StatefulSet", "LeaderWorkerSet", "ServiceAccount"} & set(kinds(ATTACH))
    selectors = [
        the("Service", ATTACH, ending="highwater")["spec"]["selector"],
        the("Service", ATTACH, ending="-control")["spec"]["selector"],
        the("PodMonitor", ATTACH)["spec"]["selector"]["matchLabels"],
        the("NetworkPolicy", ATTACH)["spec"]["podSelector"]["matchLabels"],
        the("PodDisruptionBudget", ATTACH)["spec"]["selector"]["matchLabels"],
    ]
    assert selectors == [{"app": "my-vllm"}] * 5


def test_another_chart_may_use_the_templates(tmp_path: Path) -> None:
    readme = (HELM / "README.md").read_text(encoding="utf-8")
    lines = readme.partition("```yaml\n")[2].partition("```")[0]
    head = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: theirs}\nspec:\n  selector: {matchLabels: {a: b}}\n"
    head += "  template:\n    metadata: {labels: {a: b}}\n    spec:\n"
    folder = tmp_path / "theirs"
    shutil.copytree(HELM, folder / "charts" / "highwater", ignore=shutil.ignore_patterns("source", "*.pyc"))
    (folder / "templates").mkdir()
    (folder / "templates" / "theirs.yaml").write_text(head + lines)
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: theirs\nversion: 1.0.0\n")
    (folder / "values.yaml").write_text(yaml.safe_dump({"highwater": ATTACH}))
    with Chart.load(folder) as theirs:
        rendered = theirs.render({}, name="demo", namespace="models")
    workload = yaml.safe_load(rendered["theirs/templates/theirs.yaml"])
    (each,) = pod_templates(workload)
    validate(workload)
    assert [c["name"] for c in each["spec"]["initContainers"]] == ["highwater-extension", "highwater"]
    assert env(container(each, "vllm"))["HIGHWATER_RECORDER_DIR"] == "/run/highwater/recorder"
    assert "theirs/charts/highwater/templates/service.yaml" in rendered


def test_what_would_open_the_engine_alone_is_not_made() -> None:
    assert sorted(the("ConfigMap", ATTACH, ending="-patch")["data"]) == ["kustomization.yaml"]
    given = merged(ATTACH, {"attach": {"args": ["--model=some/model"]}})
    assert sorted(the("ConfigMap", given, ending="-patch")["data"]) == ["kustomization.yaml", "patch.yaml"]


def test_a_generated_key_of_the_engine_is_refused() -> None:
    """It would go with the release."""
    with pytest.raises(HelmRenderError, match=r"engine\.apiKey: workload\.kind is None"):
        objects(merged(ATTACH, {"engine": {"apiKey": {"enabled": True}}}))
