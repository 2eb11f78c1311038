"""Values drawn at random: whatever goes together renders, is valid Kubernetes, and holds what every rendering holds."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from tests.helm.chart import CI_FILES, LOADER, NAMESPACE, Object, chart, ci_values, merged, pod_templates
from tests.helm.drawn_values import RELEASES, values
from tests.helm.invariants import Rendering
from tests.helm.test_manifests import CUSTOM
from tests.helm.validity import validate

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


def rendering(release: str, drawn: dict[str, Any]) -> Rendering:
    """Rendered by Helm's own engine, schema and checks included."""
    shown = chart()
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
@settings(CALM, max_examples=40, derandomize=True)
@given(**DRAWN)
def test_whatever_goes_together_renders_and_holds(release: str, drawn: dict[str, Any]) -> None:
    """The same ones every time, so that a change of the chart is what a failure shows."""
    judge(release, drawn)


@pytest.mark.parametrize("name", CI_FILES)
def test_the_examples_hold_too(name: str) -> None:
    """But that Secrets are named which somebody else makes."""
    it = rendering("qwen2.5-7b", merged(ci_values(name), {"extraObjects": []}))
    assert [problem for problem in it.problems() if not problem.startswith("there is no Secret ")] == []


ALL_ON: dict[str, Any] = {
    "engine": {"model": "m", "device": {"kind": "nvidia"}},
    "sidecar": {"image": {"repository": "a/b"}},
    "podMonitor": {"enabled": True},
    "podDisruptionBudget": {"enabled": True},
    "ingress": {"enabled": True, "hosts": ["llm.example.org"]},
    "networkPolicy": {"enabled": True, "scrapers": [{"podSelector": {}}]},
    "autoscaling": {"hpa": {"enabled": True}},
}


@pytest.mark.slow("values of the chart, drawn by chance")
@settings(CALM, max_examples=30, derandomize=True)
@given(release=RELEASES)
def test_any_name_that_helm_allows_becomes_one_that_a_service_may_have(release: str) -> None:
    assert [*rendering(release, ALL_ON).problems()] == []
