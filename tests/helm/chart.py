"""The chart, rendered by Helm's own engine, and what the tests ask of what comes out."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

HELM = Path(__file__).resolve().parents[2] / "helm"
CI_FILES = sorted(path.name for path in (HELM / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "demo", "models"
# LibYAML's where it is there: ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Object = dict[str, Any]
LEAST: Object = {
    "engine": {"model": "some/model", "device": {"kind": "nvidia"}},
    "sidecar": {"image": {"repository": "registry.example.org/hw"}},
}


@cache
def chart() -> Chart:
    """Loaded once: it is read only."""
    return Chart.load(HELM)


def ci_values(name: str) -> Object:
    return yaml.safe_load((HELM / "ci" / name).read_text(encoding="utf-8"))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Object:
    """As Helm merges values: tables by key, everything else replaced."""
    result = copy.deepcopy(dict(base))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def files(values: Mapping[str, Any]) -> dict[str, str]:
    """Every rendered file by its name, as text, with what must be said said."""
    return chart().render(merged(LEAST, values), name=RELEASE, namespace=NAMESPACE)


def objects(values: Mapping[str, Any]) -> list[Object]:
    """Every object. Rendered once for the same values: many tests look at the same examples."""
    return copy.deepcopy(_objects(json.dumps(values, sort_keys=True)))


@cache
def _objects(values: str) -> list[Object]:
    return freshly_rendered(json.loads(values))


def freshly_rendered(values: Mapping[str, Any]) -> list[Object]:
    texts = (text for name, text in files(values).items() if name.endswith(".yaml"))
    return [each for text in texts for each in yaml.load_all(text, Loader=LOADER) if each]


def kinds(values: Mapping[str, Any]) -> list[str]:
    return [each["kind"] for each in objects(values)]


def the(kind: str, values: Mapping[str, Any], *, ending: str = "") -> Object:
    """The one object of that kind (whose name ends so)."""
    found = [each for each in objects(values) if each["kind"] == kind and each["metadata"]["name"].endswith(ending)]
    (only,) = found
    return only


def pod_templates(each: Object) -> list[Object]:
    """The pods that an object makes, as objects of kind Pod."""
    spec = each.get("spec", {})
    if each["kind"] in ("Deployment", "StatefulSet"):
        templates = [spec["template"]]
    elif each["kind"] == "LeaderWorkerSet":
        templates = [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
    elif each["kind"] == "Pod":
        templates = [each]
    else:
        templates = []
    return [{"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)} for template in templates]


def pods(values: Mapping[str, Any]) -> list[Object]:
    """Every pod, the one of `helm test` too."""
    return [pod for each in objects(values) for pod in pod_templates(each)]


def pod(values: Mapping[str, Any]) -> Object:
    (only,) = [each for each in pods(values) if container(each, "highwater")]
    return only


def containers(each: Object) -> Iterator[Object]:
    """First those that start first."""
    yield from each["spec"].get("initContainers", [])
    yield from each["spec"]["containers"]


def container(each: Object, name: str) -> Object:
    """The container of this name; empty if the pod has none."""
    return next((found for found in containers(each) if found["name"] == name), {})


def env(each: Object) -> dict[str, Any]:
    """A container's variables: their text, or where it comes from."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in each.get("env", [])}


def mounts(each: Object) -> dict[str, str]:
    return {entry["mountPath"]: entry["name"] for entry in each["volumeMounts"]}


def volume(each: Object, name: str) -> Object:
    return next(found for found in each["spec"]["volumes"] if found["name"] == name)
