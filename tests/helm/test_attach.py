"""For a vLLM workload that is there already: the patch, and the templates from another chart."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from helm_python import Chart
from kubernetes_validate import utils as known

from tests.helm.chart import HELM, Object, ci_values, container, env, kinds, mounts, objects, pod_templates, the

ATTACH = ci_values("attach-values.yaml")
# Where Kubernetes merges lists, by which key (the patchMergeKey of its API types).
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
THEIRS = yaml.safe_load("""
apiVersion: apps/v1
kind: Deployment
metadata: {name: my-vllm}
spec:
  selector: {matchLabels: {app: my-vllm}}
  template:
    metadata: {labels: {app: my-vllm}}
    spec:
      containers:
        - name: server
          image: vllm/vllm-openai:v0.30.0
          args: [--model=some/model, --host=0.0.0.0, --max-num-seqs=8]
          env: [{name: HF_HOME, value: /cache}]
          ports: [{containerPort: 8000}]
          livenessProbe: {exec: {command: [curl, localhost:8000/health]}}
          readinessProbe: {httpGet: {path: /health, port: 8000}}
          volumeMounts: [{name: cache, mountPath: /cache}]
      volumes: [{name: cache, emptyDir: {}}]
""")


def strategic(base: Any, patch: Any, key: str = "") -> Any:
    """Kubernetes' strategic merge, as far as the patch uses it."""
    if isinstance(patch, dict):
        if patch.get("$patch") == "replace" or not isinstance(base, dict):
            return {name: value for name, value in patch.items() if name != "$patch"}
        result = dict(base)
        for name, value in patch.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = strategic(result.get(name), value, name)
        return result
    if not isinstance(patch, list) or not isinstance(base, list) or key not in MERGE_KEYS:
        return patch
    if {"$patch": "replace"} in patch:
        return [entry for entry in patch if entry != {"$patch": "replace"}]
    by = MERGE_KEYS[key]
    merged = {entry[by]: entry for entry in base}
    for entry in patch:
        merged[entry[by]] = strategic(merged.get(entry[by]), entry)
    return list(merged.values())


def patched() -> Object:
    """Their Deployment, after both parts."""
    parts = the("ConfigMap", ATTACH, ending="-patch")["data"]
    result = strategic(copy.deepcopy(THEIRS), yaml.safe_load(parts["patch.yaml"]))
    for operation in json.loads(parts["arguments.json"]):
        *path, last = operation["path"].split("/")[1:]
        at = result
        for part in path:
            at = at[int(part)] if isinstance(at, list) else at[part]
        assert (operation["op"], last) == ("add", "-")
        at.append(operation["value"])
    return result


def test_the_patch_makes_a_valid_workload_of_theirs() -> None:
    """Strictly, for the newest Kubernetes."""
    kubernetes_validate.validate(patched(), known.latest_version(), strict=True)


def test_the_patch_adds_sidecar_extension_and_arguments_and_keeps_what_was_theirs() -> None:
    """Their image, arguments, variables and volumes are all there."""
    (each,) = pod_templates(patched())
    engine = container(each, "server")
    assert [c["name"] for c in each["spec"]["initContainers"]] == ["highwater-extension", "highwater"]
    assert engine["image"] == "vllm/vllm-openai:v0.30.0"
    assert engine["args"][:3] == ["--model=some/model", "--host=0.0.0.0", "--max-num-seqs=8"]
    assert engine["args"][3:] == ["--host=127.0.0.1", "--port=8000"]
    assert {"HF_HOME", "VLLM_SERVER_DEV_MODE", "PYTHONPATH"} <= set(env(engine))
    assert {"/cache", "/opt/highwater", "/run/highwater/recorder"} <= set(mounts(engine))
    assert {"cache", "highwater-extension"} <= {v["name"] for v in each["spec"]["volumes"]}


def test_the_patch_closes_the_engines_port_and_turns_its_probes_to_the_sidecar() -> None:
    """What was a probe of the engine's own cannot reach it any more."""
    (each,) = pod_templates(patched())
    engine = container(each, "server")
    assert engine["ports"] == []
    assert engine["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert engine["readinessProbe"]["httpGet"]["port"] == 8002
    assert engine["livenessProbe"]["exec"]["command"][:4] == ["python3", "-I", "-S", "-c"]
    assert "httpGet" not in engine["livenessProbe"]


def test_no_workload_is_made_and_all_else_finds_theirs() -> None:
    """Service, monitor, policy and budget select by their labels."""
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
    """As README.md shows it; the lines are taken from there."""
    readme = (HELM / "README.md").read_text(encoding="utf-8")
    lines = readme.partition("```yaml\n")[2].partition("```")[0]
    head = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: theirs}\nspec:\n  selector: {matchLabels: {a: b}}\n"
    head += "  template:\n    metadata: {labels: {a: b}}\n    spec:\n"
    folder = tmp_path / "theirs"
    shutil.copytree(
        HELM, folder / "charts" / "highwater", ignore=shutil.ignore_patterns("source", "generator", "*.pyc")
    )
    (folder / "templates").mkdir()
    (folder / "templates" / "theirs.yaml").write_text(head + lines)
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: theirs\nversion: 1.0.0\n")
    (folder / "values.yaml").write_text(yaml.safe_dump({"highwater": ATTACH}))
    with Chart.load(folder) as theirs:
        rendered = theirs.render({}, name="demo", namespace="models")
    workload = yaml.safe_load(rendered["theirs/templates/theirs.yaml"])
    (each,) = pod_templates(workload)
    kubernetes_validate.validate(workload, known.latest_version(), strict=True)
    assert [c["name"] for c in each["spec"]["initContainers"]] == ["highwater-extension", "highwater"]
    assert env(container(each, "vllm"))["HIGHWATER_RECORDER_DIR"] == "/run/highwater/recorder"
    assert "theirs/charts/highwater/templates/service.yaml" in rendered


def test_the_patch_is_all_that_is_made_for_people() -> None:
    """Strategic part, arguments, and a kustomization that applies both."""
    parts = the("ConfigMap", ATTACH, ending="-patch")["data"]
    assert sorted(parts) == ["arguments.json", "kustomization.yaml", "patch.yaml"]
    strategic_one, arguments = yaml.safe_load(parts["kustomization.yaml"])["patches"]
    named = yaml.safe_load(parts["patch.yaml"])
    # Kustomize finds by kind and name what it patches, a list of operations by its target.
    assert (strategic_one, arguments["path"]) == ({"path": "patch.yaml"}, "arguments.json")
    assert (named["kind"], named["metadata"]) == (arguments["target"]["kind"], {"name": arguments["target"]["name"]})
    assert len([each for each in objects(ATTACH) if each["kind"] == "ConfigMap"]) == 2
