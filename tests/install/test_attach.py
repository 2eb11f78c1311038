"""docs/install/attach.md, followed with the real kubectl, Kustomize and Helm, beside Deployments of several styles."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import Object, container, env, mounts, pod_templates
from tests.helm.validity import validate
from tests.install.conftest import Reader
from tests.install.page import Block, blocks, commands

PAGE = "install/attach.md"
FIRST, KUBECTL, GITOPS = "First", "kubectl", "Kustomize and GitOps"
MakeReader = Callable[..., Reader]

PLAIN = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: my-vllm, namespace: models, labels: {app: my-vllm}}
spec:
  selector: {matchLabels: {app: my-vllm}}
  template:
    metadata: {labels: {app: my-vllm}, annotations: {team: search}}
    spec:
      containers:
      - name: server
        image: vllm/vllm-openai:v0.32.0
        args: [--model=Qwen/Qwen3-VL-8B-Instruct, --max-num-seqs=64]
        env: [{name: HF_HOME, value: /cache}, {name: PYTHONPATH, value: /opt/ours}]
        ports: [{name: http, containerPort: 8000}]
        resources: {limits: {nvidia.com/gpu: 1}}
        livenessProbe:
          exec: {command: [curl, "localhost:8000/health"]}
          initialDelaySeconds: 600
        readinessProbe:
          httpGet: {path: /health, port: http, httpHeaders: [{name: X-Probe, value: "1"}]}
          successThreshold: 2
        lifecycle: {preStop: {httpGet: {path: /bye, port: 8000}}, postStart: {exec: {command: ["true"]}}}
        volumeMounts: [{name: cache, mountPath: /cache}]
      - {name: proxy, image: "istio/proxyv2:1.27", ports: [{containerPort: 15090}]}
      volumes: [{name: cache, emptyDir: {}}]
"""
ALL_IN_COMMAND = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: my-vllm}
spec:
  selector: {matchLabels: {app: my-vllm}}
  template:
    metadata: {labels: {app: my-vllm}}
    spec:
      securityContext: {runAsUser: 0}
      initContainers: [{name: fetch, image: busybox, command: ["true"]}]
      containers:
      - name: server
        image: vllm/vllm-openai:v0.32.0
        command: [vllm, serve, Qwen/Qwen3-VL-8B-Instruct, --host, 0.0.0.0, --port, "8000"]
        ports: [{name: container-port, containerPort: 8000}]
        startupProbe: {tcpSocket: {port: 8000}, failureThreshold: 3}
"""
A_SHELLS_LINE = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: my-vllm, namespace: models}
spec:
  selector: {matchLabels: {app: my-vllm}}
  template:
    metadata: {labels: {app: my-vllm}}
    spec:
      containers:
      - name: server
        image: vllm/vllm-openai:v0.32.0
        command: [/bin/sh, -c]
        args: ["vllm serve Qwen/Qwen3-VL-8B-Instruct --trust-remote-code\\n"]
"""
STYLES = {"arguments": PLAIN, "all in command": ALL_IN_COMMAND, "a line for a shell": A_SHELLS_LINE}
OURS = ["--host=127.0.0.1", "--port=18000"]


def engine_of(deployment: Object) -> Object:
    (template,) = pod_templates(deployment)
    return container(template, "server")


def the_one(section: str, having: str) -> str:
    (found,) = commands(PAGE, section, having=having)
    return found


def with_args(found: list[Block], deployment: Object) -> list[Block]:
    """The page's attach.yaml with this Deployment's arguments, which the page has its reader write into it."""
    args = json.dumps(engine_of(deployment).get("args", []))
    line = next(line for block in found for line in block.text.splitlines() if line.strip().startswith("args:"))
    return [replace(block, text=block.text.replace(line, f"  args: {args}")) for block in found]


def attached(make: MakeReader, style: str) -> Reader:
    """A reader who has followed the kubectl section's install lines."""
    theirs = yaml.safe_load(STYLES[style])
    reader = make(theirs)
    reader.write(with_args(blocks(PAGE, KUBECTL), theirs))
    reader.run(the_one(KUBECTL, "helm install"))
    return reader


def in_git(make: MakeReader, deployment: str, **attach: Any) -> Reader:
    """A reader who has followed the GitOps section up to its result."""
    reader = make()
    reader.write(blocks(PAGE, GITOPS))
    values = yaml.safe_load((reader.folder / "attach.yaml").read_text())
    values["attach"] |= attach
    (reader.folder / "attach.yaml").write_text(yaml.safe_dump(values))
    (reader.folder / "my-vllm" / "deployment.yaml").write_text(deployment)
    reader.run(the_one(GITOPS, "helm template"))
    return reader


def assert_attached(deployment: Object, theirs: Object) -> None:
    """It is valid, the engine is closed and guarded, and what was theirs is there."""
    validate(deployment)
    (template,), (before,) = pod_templates(deployment), pod_templates(theirs)
    engine, sidecar, old = engine_of(deployment), container(template, "highwater"), engine_of(theirs)
    assert (engine["image"], engine.get("command"), engine.get("ports")) == (
        old["image"],
        old.get("command"),
        old.get("ports"),
    )
    given = " ".join(engine["args"])
    assert given.endswith(" ".join(OURS))
    assert given.startswith(" ".join(old.get("args", [])).strip())
    assert env(engine)["VLLM_SERVER_DEV_MODE"] == "1"
    assert env(sidecar)["HIGHWATER_PORT"] == "8000"
    assert env(sidecar)["HIGHWATER_ENGINE_URL"] == "http://127.0.0.1:18000"
    for probe in ("startupProbe", "livenessProbe"):
        assert set(engine[probe]) == {
            "exec",
            "periodSeconds",
            "timeoutSeconds",
            "failureThreshold",
            "terminationGracePeriodSeconds",
        }
        assert engine[probe]["exec"]["command"][-2:] == ["http://127.0.0.1:8002", "http://127.0.0.1:18000"]
    assert engine["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 8002, "scheme": "HTTP"}
    assert set(engine["lifecycle"]["preStop"]) == {"exec"}
    assert needed(template) == []
    logging = template["metadata"]["annotations"]["highwater-logging.json"]
    assert json.loads(logging)["handlers"]["file"]["filename"] == env(sidecar)["HIGHWATER_ENGINE_LOG"]
    (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == "highwater-logging"]
    assert volume["downwardAPI"]["items"] == [
        {"path": "logging.json", "fieldRef": {"fieldPath": "metadata.annotations['highwater-logging.json']"}}
    ]
    assert {entry["name"] for entry in before["spec"].get("volumes", [])} <= {
        entry["name"] for entry in template["spec"]["volumes"]
    }
    assert set(mounts({"volumeMounts": [], **old})) <= set(mounts(engine))
    assert {each["name"] for each in before["spec"]["containers"]} < {
        each["name"] for each in template["spec"]["containers"]
    }


@pytest.mark.parametrize("style", STYLES)
def test_the_pages_kubectl_lines_install_upgrade_and_remove(reader: MakeReader, style: str) -> None:
    done, theirs = attached(reader, style), yaml.safe_load(STYLES[style])
    deployment = done.cluster.get("Deployment", "my-vllm")
    assert_attached(deployment, theirs)
    done.run(the_one(KUBECTL, "helm upgrade"))
    assert done.cluster.get("Deployment", "my-vllm") == deployment
    done.run(the_one(KUBECTL, "rollout undo"))
    assert done.cluster.get("Deployment", "my-vllm")["spec"]["template"] == theirs["spec"]["template"]
    assert done.cluster.names() == ["deployment/my-vllm"]


def needed(value: Any) -> list[Object]:
    """Every reference in a pod to a ConfigMap or a Secret without which it does not start."""
    found = []
    if isinstance(value, dict):
        for key, entry in value.items():
            if key in ("configMapKeyRef", "secretKeyRef", "configMapRef", "secretRef", "configMap", "secret"):
                found += [] if entry.get("optional") else [entry]
            else:
                found += needed(entry)
    elif isinstance(value, list):
        found = [reference for entry in value for reference in needed(entry)]
    return found


def test_a_pod_starts_after_the_release_is_gone(newest: MakeReader) -> None:
    theirs = yaml.safe_load(PLAIN)
    done = newest(theirs)
    found = with_args(blocks(PAGE, KUBECTL), theirs)
    done.write([replace(block, text=block.text.replace("adminToken: {enabled: false}", "")) for block in found])
    done.run(the_one(KUBECTL, "helm install"))
    assert "secret/highwater" in done.cluster.names()
    done.run("helm uninstall highwater -n models")
    (template,) = pod_templates(done.cluster.get("Deployment", "my-vllm"))
    assert done.cluster.names() == ["deployment/my-vllm"]
    assert needed(template) == []


def test_the_pages_gitops_lines_attach_the_sidecar(reader: MakeReader) -> None:
    done = in_git(reader, PLAIN)
    theirs = yaml.safe_load(PLAIN)
    rendered = [each for each in yaml.safe_load_all(done.run("kubectl kustomize my-vllm")) if each]
    (patched,) = [each for each in rendered if each["kind"] == "Deployment"]
    assert_attached(patched, theirs)
    done.run(the_one(GITOPS, "apply -k"))
    assert done.cluster.get("Deployment", "my-vllm")["spec"] == patched["spec"]
    assert "service/highwater-control" in done.cluster.names()


@pytest.mark.parametrize("style", ["all in command", "a line for a shell"])
def test_gitops_repeats_arguments_where_they_cannot_be_added(newest: MakeReader, style: str) -> None:
    theirs = yaml.safe_load(STYLES[style])
    done = in_git(newest, STYLES[style], args=engine_of(theirs).get("args", []))
    (patched,) = [
        each for each in yaml.safe_load_all(done.run("kubectl kustomize my-vllm")) if each["kind"] == "Deployment"
    ]
    assert_attached(patched, theirs)


def test_the_pages_first_pod_is_as_restricted_as_the_charts(newest: MakeReader) -> None:
    done = attached(newest, "arguments")
    words = shlex.split(the_one(FIRST, "kubectl -n models run").replace("\\\n", " "))
    (overrides,) = [word.removeprefix("--overrides=") for word in words if word.startswith("--overrides=")]
    name = words[words.index("run") + 1]
    made = {"metadata": {"name": name}, "spec": {"containers": [{"name": name, "image": "i", "args": ["--version"]}]}}
    (done.folder / "pod.json").write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", **made}))
    merge = ["kubectl", "patch", "--local", "-f", "pod.json", "--type=strategic", "-o", "json", "-p", overrides]
    pod = json.loads(done.run(shlex.join(merge)))
    assert "--override-type=strategic" in words
    (template,) = pod_templates(done.cluster.get("Deployment", "my-vllm"))
    charts = container(template, "highwater")["securityContext"]
    context = pod["spec"]["securityContext"] | container({"spec": pod["spec"]}, name)["securityContext"]
    beyond = {"runAsUser", "runAsGroup", "readOnlyRootFilesystem"}  # the image's, and what the standard does not ask
    assert context == {key: charts[key] for key in charts.keys() - beyond}
    validate(pod)


def test_the_page_lets_the_old_pod_go_first(newest: MakeReader) -> None:
    done = newest(yaml.safe_load(PLAIN))
    done.run(the_one(FIRST, "maxSurge"))
    deployment = done.cluster.get("Deployment", "my-vllm")
    assert deployment["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }
    validate(deployment)


def test_the_sidecar_holds_up_no_engine(newest: MakeReader, tmp_path: Path) -> None:
    done = attached(newest, "all in command")
    (template,) = pod_templates(done.cluster.get("Deployment", "my-vllm"))
    spec = template["spec"]
    assert "highwater" in [each["name"] for each in spec["containers"]]
    assert not [each for each in spec["initContainers"] if each.get("restartPolicy")]
    assert spec["securityContext"] == {"runAsUser": 0}
    for name in ("highwater", "highwater-extension"):
        assert container(template, name)["securityContext"]["runAsUser"] == 65532
    failing = tmp_path / "failing"
    failing.mkdir()
    (failing / "highwater").write_text("#!/bin/sh\nexit 1\n")
    (failing / "highwater").chmod(0o755)
    command = container(template, "highwater-extension")["command"]
    ended = subprocess.run(command, env={"PATH": f"{failing}:/usr/bin:/bin"}, capture_output=True, check=False)
    assert (ended.returncode, b"without the worker package" in ended.stdout) == (0, True)
