"""Values drawn at random: whatever goes together renders, is valid Kubernetes, and holds what every rendering holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart
from hypothesis import HealthCheck, given, settings
from jsonschema import ValidationError

from tests.helm.chart import HELM, LOADER, NAMESPACE, Object, chart, ci_values, merged, pod_templates
from tests.helm.drawn_values import RELEASES, values
from tests.helm.invariants import Rendering
from tests.helm.test_manifests import CUSTOM
from tests.helm.validity import NEWEST, validate

DRAWN = {"release": RELEASES, "drawn": values()}
CALM = settings(deadline=None, database=None, print_blob=True, suppress_health_check=[*HealthCheck])


def as_validated(each: Object) -> list[Object]:
    """What Kubernetes' own schemas can judge, without what differs in every rendering and means nothing."""
    judged = [] if each["kind"] in CUSTOM else [each]
    if each["kind"] == "LeaderWorkerSet":
        judged = pod_templates(each)
    if each["kind"] == "Secret":
        judged = [each | {"data": dict.fromkeys(each["data"], "AAAA")}]
    return judged


def rendering(release: str, drawn: dict[str, Any], of: Chart | None = None) -> Rendering:
    """Rendered by Helm's own engine, schema and checks included."""
    shown = of or chart()
    texts = shown.render(drawn, name=release, namespace=NAMESPACE)
    found = (yaml.load_all(text, Loader=LOADER) for name, text in texts.items() if name.endswith(".yaml"))
    return Rendering(release, merged(shown.values, drawn), [each for some in found for each in some if each])


def judge(release: str, drawn: dict[str, Any]) -> None:
    it = rendering(release, drawn)
    assert [*it.problems()] == []
    for each in it.objects:
        for judged in as_validated(each):
            validate(judged)


@pytest.mark.slow("values of the chart, drawn by chance")
@settings(CALM, max_examples=200, derandomize=True)
@given(**DRAWN)
def test_two_hundred_combinations_render_and_hold(release: str, drawn: dict[str, Any]) -> None:
    """The same ones every time, so that a change of the chart is what a failure shows."""
    judge(release, drawn)


@settings(CALM, max_examples=300)
@given(**DRAWN)
def test_three_hundred_other_combinations_render_and_hold(release: str, drawn: dict[str, Any]) -> None:
    judge(release, drawn)


@pytest.mark.parametrize("name", sorted(path.name for path in (HELM / "ci").glob("*-values.yaml")))
def test_the_examples_hold_too(name: str) -> None:
    whole = {"pod": {"extraVolumes": []}, "extraObjects": []}
    it = rendering("qwen2.5-7b", merged(ci_values(name), whole if "host-driver" in name else {"extraObjects": []}))
    ours = {"read", "mounts", "there is no"}
    found = [problem for problem in it.problems() if not any(word in problem for word in ours)]
    assert found == []


ALL_ON: dict[str, Any] = {
    "engine": {"model": "m", "device": {"kind": "nvidia"}},
    "sidecar": {"image": {"repository": "a/b"}},
    "podMonitor": {"enabled": True},
    "podDisruptionBudget": {"enabled": True},
    "ingress": {"enabled": True, "hosts": ["llm.example.org"]},
    "networkPolicy": {"enabled": True, "scrapers": [{"podSelector": {}}]},
    "autoscaling": {"hpa": {"enabled": True}},
}
# File, what stands there, what a slip of the pen would make of it, and a word of the problem.
SLIPS = {
    "an open engine": ("_engine.tpl", "--host=127.0.0.1", "--host=0.0.0.0", "the engine binds to"),
    "a privilege": ("_sidecar.tpl", "allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true", "restricted"),
    "a writable root": ("_sidecar.tpl", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "restricted"),
    "a token of the cluster": ("_pod.tpl", "automountServiceAccountToken: false", "", "a token of the cluster"),
    "a wide selector": (
        "_names.tpl",
        "app.kubernetes.io/instance: {{ .Release.Name | quote }}",
        "",
        "finds pods of others",
    ),
    "a selector of nobody": ("poddisruptionbudget.yaml", "matchLabels:", "matchLabels:\n      x: y", "finds nothing"),
    "a probe at the engine": (
        "_engine.tpl",
        "{path: /readyz, port: {{ int .Values.config.control_port }}",
        "{path: /readyz, port: {{ int .Values.engine.listen.port }}",
        "asks port 8000",
    ),
    "a Service to nobody": (
        "service.yaml",
        "targetPort: {{ int .Values.config.port }}",
        "targetPort: 80",
        "leads to port 80",
    ),
    "a monitor of no port": ("podmonitor.yaml", '"port" "control"', '"port" "metrics"', "scrapes [None]"),
    "a route to nobody": ("ingress.yaml", 'fullname" $ }}', 'fullname" $ }}-x', "Ingress leads to"),
    "a scaler of nothing": ("_names.tpl", "kind: {{ .Values.workload.kind }}", "kind: DaemonSet", "scales"),
    "a name with a dot": ("_names.tpl", 'regexReplaceAll "[^a-z0-9-]" . "-"', "toString .", "is called"),
    "a sidecar that is waited for": (
        "_sidecar.tpl",
        "livenessProbe:\n",
        "startupProbe: {exec: {command: [a, http://127.0.0.1:8002, http://127.0.0.1:8000]}}\nlivenessProbe:\n",
        "the engine waits for highwater",
    ),
    "a volume without a source": ("_volumes.tpl", "-logging\n", "-log\n", "there is no ConfigMap"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_a_template_is_seen(slip: str, tmp_path: Path) -> None:
    file, right, wrong, words = SLIPS[slip]
    copied = Path(shutil.copytree(HELM, tmp_path / "helm", ignore=shutil.ignore_patterns("__pycache__")))
    template = copied / "templates" / file
    text = template.read_text(encoding="utf-8")
    assert right in text
    template.write_text(text.replace(right, wrong), encoding="utf-8")
    found = [*rendering("qwen2.5-7b", ALL_ON, Chart.load(copied)).problems()]
    assert any(words in problem for problem in found), found
    assert [*rendering("qwen2.5-7b", ALL_ON).problems()] == []


def test_a_key_that_kubernetes_does_not_have_is_seen() -> None:
    (deployment,) = rendering("demo", ALL_ON).of("Deployment")
    wrong = deployment | {"spec": deployment["spec"] | {"replica": 1}}
    with pytest.raises(ValidationError, match="replica"):
        validate(wrong)
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, NEWEST[-1], strict=True)


@pytest.mark.slow("values of the chart, drawn by chance")
@settings(CALM, max_examples=30, derandomize=True)
@given(release=RELEASES)
def test_any_name_that_helm_allows_becomes_one_that_a_service_may_have(release: str) -> None:
    assert [*rendering(release, ALL_ON).problems()] == []
