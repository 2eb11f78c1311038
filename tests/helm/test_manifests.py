"""Every manifest of every example is valid Kubernetes, and the chart passes Helm's lint."""

from __future__ import annotations

import itertools
import json
import re
import tarfile
from pathlib import Path

import pytest
import yaml
from helm_python.chart import lint, package

from tests.helm.chart import (
    CI_FILES,
    HELM,
    LEAST,
    LOADER,
    Object,
    chart,
    ci_values,
    files,
    freshly_rendered,
    kinds,
    objects,
    pod_templates,
)
from tests.helm.validity import NEWEST, validate

GUIDE = (HELM.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")
# Not Kubernetes' own, so the schemas that are published with it do not have them. The pods within a LeaderWorkerSet are
# validated as pods; of the others the fields are looked at by name in test_around.py.
CUSTOM = {
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
}


@pytest.mark.parametrize(
    "values", [{}, LEAST, *(ci_values(name) for name in CI_FILES)], ids=["none", "least", *CI_FILES]
)
def test_lint_finds_nothing(values: Object) -> None:
    report = lint(HELM, values, strict=True, kube_version="v1.34.0")
    assert report["messages"] == []
    assert report["errors"] == []


@pytest.mark.parametrize("version", NEWEST)
@pytest.mark.parametrize("name", CI_FILES)
def test_manifests_are_valid(name: str, version: str) -> None:
    """Strictly, against the three newest versions of Kubernetes that the schemas are there for."""
    for each in objects(ci_values(name)):
        if each["kind"] in CUSTOM:
            assert each["apiVersion"] == CUSTOM[each["kind"]]
        else:
            validate(each, version)
        for pod in pod_templates(each):
            pod["metadata"]["name"] = "pod"
            validate(pod, version)


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL))
def test_values_in_the_guide_work(example: str) -> None:
    rendered = chart().render(yaml.safe_load(example), name="demo", namespace="models")
    for text in rendered.values():
        for each in yaml.safe_load_all(text) if "kind:" in text else ():
            validate(each, NEWEST[-1])


def test_the_examples_make_every_kind() -> None:
    seen = set(itertools.chain.from_iterable(kinds(ci_values(name)) for name in CI_FILES))
    templates = {path.name for path in (HELM / "templates").rglob("*.yaml")}
    rendered = {
        Path(name).name
        for ci in CI_FILES
        for name, text in files(ci_values(ci)).items()
        if name.endswith(".yaml") and any(yaml.load_all(text, Loader=LOADER))
    }
    assert set(CUSTOM) <= seen
    assert templates - rendered == set()


def test_rendering_twice_is_the_same_but_for_what_is_generated() -> None:
    first, second = (freshly_rendered(ci_values("statefulset-values.yaml")) for _ in range(2))
    assert first == second


def test_a_new_version_of_the_chart_restarts_no_engine() -> None:
    values = ci_values("nvidia-values.yaml")
    text = json.dumps(
        [pod["metadata"] for each in objects(values) if each["kind"] == "Deployment" for pod in pod_templates(each)]
    )
    assert chart().version not in text


def test_the_package_holds_the_chart_and_nothing_else(tmp_path: Path) -> None:
    archive = package(HELM, destination=tmp_path)
    with tarfile.open(archive) as packed:
        names = {name.removeprefix("highwater/") for name in packed.getnames()}
    assert {"values.schema.json", "README.md", "files/drain.py", "dashboards/highwater-server.json"} <= names
    assert {"alerts/highwater.rules.yaml", "templates/tests/status.yaml", "templates/NOTES.txt"} <= names
    assert [name for name in names if name.startswith(("source/", "ci/")) or "__pycache__" in name] == []
    # A release is kept in a Secret, of 1 MiB at most, with the whole chart in it.
    assert Path(archive).stat().st_size < 300_000


def test_the_charts_version_of_the_sidecar_is_the_projects() -> None:
    from highwater import __version__  # noqa: PLC0415 - only here

    assert chart().metadata["appVersion"] == __version__
