"""What holds of every rendering of the chart, whatever the values: each problem in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.helm.chart import Object, container, containers, env, pod_templates

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@dataclass(frozen=True)
class Rendering:
    """What a release becomes, with its values as the templates saw them."""

    release: str
    values: Mapping[str, Any]
    objects: list[Object]

    @cached_property
    def pods(self) -> list[Object]:
        """Every pod, with the namespace's view of it: labels and ports."""
        return [pod for each in self.objects for pod in pod_templates(each)]

    @cached_property
    def serving(self) -> list[Object]:
        """Those with the sidecar; of a workload that is somebody else's, as its patch leaves them."""
        ours = [pod for pod in self.pods if container(pod, "highwater")]
        if self.values["workload"]["kind"] != "None":
            return ours
        ports = [{"name": "highwater", "containerPort": self.port}, {"name": "control", "containerPort": self.control}]
        labels = self.values["attach"]["podLabels"]
        return [{"metadata": {"labels": labels}, "spec": {"containers": [{"name": "highwater", "ports": ports}]}}]

    @property
    def port(self) -> int:
        return int(self.values["config"]["port"])

    @property
    def control(self) -> int:
        return int(self.values["config"]["control_port"])

    def of(self, *kinds: str) -> Iterator[Object]:
        return (each for each in self.objects if each["kind"] in kinds)

    def problems(self) -> Iterator[str]:
        for check in (closed, restricted, selectors, probes, services, monitors, routes, names, wired):
            yield from check(self)


def matches(selector: Mapping[str, str], each: Object) -> bool:
    return selector.items() <= each["metadata"].get("labels", {}).items()


def ports_of(pod: Object) -> dict[str, int]:
    """What a pod's containers say that they serve, by name."""
    return {port["name"]: port["containerPort"] for one in containers(pod) for port in one.get("ports", [])}


def closed(it: Rendering) -> Iterator[str]:
    """vLLM is on loopback or on a socket, the last word is the chart's, and nobody names its port."""
    for pod in it.serving:
        engine = container(pod, "vllm")
        binding = [text for text in engine.get("args", []) if re.match(r"--(host|port|uds)\b", text)]
        if engine and binding not in (["--host=127.0.0.1", "--port=8000"], ["--uds=/run/highwater/engine/engine.sock"]):
            yield f"the engine binds to {binding}"
        elif engine and engine["args"].index(binding[0]) < len(engine["args"]) - 3:  # the address, and a class
            yield f"the chart has not the last word: {engine['args']}"
        if pod["spec"].get("hostNetwork") and not binding[-1].startswith("--uds"):
            yield "on the node's network the engine is on its loopback"
    for pod in it.pods:
        if set(ports_of(pod).values()) - {it.port, it.control}:
            yield f"a container names the ports {ports_of(pod)}"
        if container(pod, "vllm").get("ports"):
            yield "the engine's container names ports"


def restricted(it: Rendering) -> Iterator[str]:
    """The restricted Pod Security Standard, but for what a value asks for by name."""
    for pod in it.pods:
        spec, wanted = pod["spec"], it.values["pod"]
        is_test = pod["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "test"
        for key in ("hostNetwork", "hostIPC", "hostPID"):
            if spec.get(key, False) and (is_test or not wanted.get(key, False)):
                yield f"{key} without being asked for"
        has_host_path = any("hostPath" in volume for volume in spec.get("volumes", []))
        if has_host_path and it.values["models"]["kind"] != "hostPath":
            yield "a hostPath without being asked for"
        if spec.get("automountServiceAccountToken") is not False or spec.get("enableServiceLinks") is not False:
            # One called highwater would stop the sidecar.
            yield "a pod has a token of the cluster, or the variables of Services"
        for one in containers(pod):
            context = spec["securityContext"] | one["securityContext"]
            right = (
                context.get("allowPrivilegeEscalation") is False
                and context.get("capabilities") == {"drop": ["ALL"]}
                and context.get("seccompProfile") == {"type": "RuntimeDefault"}
                and context.get("runAsNonRoot") is True
                and context.get("runAsUser", 0) > 0
                and not context.get("privileged")
            )
            may_write = one["name"] == "vllm" and "readOnlyRootFilesystem" in it.values["engine"]["securityContext"]
            if not right or not (context.get("readOnlyRootFilesystem") or may_write):
                yield f"{one['name']} is not restricted: {context}"
            if any("hostPort" in port for port in one.get("ports", [])):
                yield f"{one['name']} has a port of the node"
    if any(each["automountServiceAccountToken"] for each in it.of("ServiceAccount")):
        yield "an account gives its pods a token of the cluster"


def selectors(it: Rendering) -> Iterator[str]:
    """Each finds pods of ours, and none of another release or of anybody else."""
    is_attached = it.values["workload"]["kind"] == "None"
    whose = it.values["attach"]["podLabels"] if is_attached else {"app.kubernetes.io/instance": it.release}
    found: list[tuple[str, Mapping[str, str], list[Object]]] = []
    for each in it.objects:
        spec, name = each.get("spec", {}), f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "Service":
            found.append((name, spec["selector"], it.serving))
        elif each["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget", "PodMonitor"):
            found.append((name, spec["selector"]["matchLabels"], it.serving))
        elif each["kind"] == "ServiceMonitor":
            found.append((name, spec["selector"]["matchLabels"], [*it.of("Service")]))
            if spec["selector"]["matchLabels"].get("app.kubernetes.io/instance") != it.release:
                yield f"{name} finds Services of others"
            continue
        elif each["kind"] == "NetworkPolicy":
            found.append((name, spec["podSelector"]["matchLabels"], it.serving))
        else:
            continue
        if not whose.items() <= found[-1][1].items():
            yield f"{name} finds pods of others: {found[-1][1]}"
    for name, selector, there in found:
        if not selector or not any(matches(selector, each) for each in there):
            yield f"{name} finds nothing: {selector}"


def probes(it: Rendering) -> Iterator[str]:
    """At the control port of the same pod, where the sidecar is; none that others wait for."""
    for pod in it.pods:
        engine_urls = {"http://127.0.0.1:8000", "unix:/run/highwater/engine/engine.sock"}
        for one in containers(pod):
            for kind in PROBES:
                probe = one.get(kind, {})
                if "httpGet" in probe and probe["httpGet"]["port"] not in [ports_of(pod).get("control")]:
                    yield f"{one['name']}'s {kind} asks port {probe['httpGet']['port']}"
                if "exec" in probe:
                    sidecar, engine = probe["exec"]["command"][-2:]
                    if not re.fullmatch(f"https?://127\\.0\\.0\\.1:{it.control}", sidecar) or engine not in engine_urls:
                        yield f"{one['name']}'s {kind} asks {sidecar} and {engine}"
            if one.get("restartPolicy") == "Always" and "startupProbe" in one:
                yield f"the engine waits for {one['name']}"


def services(it: Rendering) -> Iterator[str]:
    """Each port of a Service is one that a pod behind it serves; a policy admits to these and no others."""
    for each in it.of("Service"):
        behind = [pod for pod in it.serving if matches(each["spec"]["selector"], pod)]
        for port in each["spec"]["ports"]:
            if not all(port["targetPort"] in ports_of(pod).values() for pod in behind):
                yield f"Service {each['metadata']['name']} leads to port {port['targetPort']}"
            if port["targetPort"] == it.control and each["spec"].get("type", "ClusterIP") != "ClusterIP":
                yield f"Service {each['metadata']['name']} publishes the control port"
    for each in it.of("NetworkPolicy"):
        admitted = {port["port"] for rule in each["spec"]["ingress"] for port in rule.get("ports", [])}
        if not admitted <= {it.port, it.control}:
            yield f"the policy admits to {admitted}"


def monitors(it: Rendering) -> Iterator[str]:
    """By a port's name that is there, where metrics are; and Prometheus is let in."""
    for each in it.of("PodMonitor", "ServiceMonitor"):
        selector = each["spec"]["selector"]["matchLabels"]
        if each["kind"] == "PodMonitor":
            served = [ports_of(pod) for pod in it.serving if matches(selector, pod)]
            endpoints = each["spec"]["podMetricsEndpoints"]
        else:
            behind = [one for one in it.of("Service") if matches(selector, one)]
            served = [{port["name"]: port["targetPort"] for port in one["spec"]["ports"]} for one in behind]
            endpoints = each["spec"]["endpoints"]
        ports = [ports.get(endpoint["port"]) for ports in served for endpoint in endpoints]
        if ports != [it.control]:
            yield f"{each['kind']} scrapes {ports}"
        for policy in it.of("NetworkPolicy"):
            admitted = [port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])]
            if it.control not in admitted:
                yield f"{each['kind']} is shut out"


def routes(it: Rendering) -> Iterator[str]:
    """What leads in from outside, what scales, and what `helm test` asks, is there."""
    offered = {
        (each["metadata"]["name"], port["port"]): port["targetPort"]
        for each in it.of("Service")
        for port in each["spec"]["ports"]
    }
    for each in it.of("Ingress", "HTTPRoute"):
        if each["kind"] == "Ingress":
            paths = [path for rule in each["spec"]["rules"] for path in rule["http"]["paths"]]
            backends = [path["backend"]["service"] for path in paths]
            leads = [(one["name"], one["port"]["number"]) for one in backends]
        else:
            leads = [(ref["name"], ref["port"]) for rule in each["spec"]["rules"] for ref in rule["backendRefs"]]
        if [offered.get(one) for one in leads] != [it.port]:
            yield f"{each['kind']} leads to {leads}, and there are {offered}"
    there = {(each["kind"], each["metadata"]["name"]) for each in it.objects}
    for each in it.of("HorizontalPodAutoscaler", "ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        if (target["kind"], target["name"]) not in there:
            yield f"{each['kind']} scales {target}"
    for each in it.of("Pod"):
        url = env(each["spec"]["containers"][0])["HIGHWATER_URL"]
        host, _, port = url.partition("://")[2].partition(":")
        if offered.get((host, int(port))) != it.control:
            yield f"helm test asks {url}"


def names(it: Rendering) -> Iterator[str]:
    """DNS labels, unique within a kind; values of labels as Kubernetes takes them."""
    seen = set()
    for each in it.objects:
        metadata = each["metadata"]
        key = (each["kind"], metadata.get("namespace"), metadata["name"])
        if key in seen:
            yield f"two of {key}"
        seen.add(key)
        if not DNS_LABEL.fullmatch(metadata["name"]):
            yield f"{each['kind']} is called {metadata['name']}"
    for each in [*it.objects, *it.pods]:
        for value in each["metadata"].get("labels", {}).values():
            if not isinstance(value, str) or not re.fullmatch(LABEL_VALUE, value):
                yield f"the value of a label is {value}"
    for pod in it.pods:
        for name in [*(one["name"] for one in containers(pod)), *(v["name"] for v in pod["spec"].get("volumes", []))]:
            if not DNS_LABEL.fullmatch(name):
                yield f"a container or volume is called {name}"
    ports = [name for pod in it.pods for name in ports_of(pod)]
    ports += [port["name"] for each in it.of("Service") for port in each["spec"]["ports"]]
    yield from (f"a port is called {name}" for name in ports if not PORT_NAME.fullmatch(name))


def wired(it: Rendering) -> Iterator[str]:
    """No variable or mount twice; each mount has its volume, each volume its source."""
    given = {"models", "theirs", "pair", "hub"}
    there = {(each["kind"], each["metadata"]["name"]) for each in it.objects}
    claimed = {c["metadata"]["name"] for e in it.of("StatefulSet") for c in e["spec"].get("volumeClaimTemplates", [])}
    for pod in it.pods:
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        for one in containers(pod):
            variables = [entry["name"] for entry in one.get("env", [])]
            paths = [mount["mountPath"] for mount in one.get("volumeMounts", [])]
            if len(set(variables)) < len(variables) or len(set(paths)) < len(paths):
                yield f"{one['name']} has something twice: {sorted(variables)}, {sorted(paths)}"
            missing = {mount["name"] for mount in one.get("volumeMounts", [])} - volumes.keys() - claimed
            if missing:
                yield f"{one['name']} mounts {missing}"
        text = json.dumps(pod)
        wanted = {("ConfigMap", name) for name in re.findall(r'"configMap": \{"name": "([^"]+)"', text)}
        wanted |= {("Secret", name) for name in re.findall(r'"secretKeyRef": \{"name": "([^"]+)"', text)}
        wanted |= {("Secret", name) for name in re.findall(r'"secretName": "([^"]+)"', text)}
        wanted |= {("PersistentVolumeClaim", name) for name in re.findall(r'"claimName": "([^"]+)"', text)}
        yield from (f"there is no {kind} {name}" for kind, name in wanted - there if name not in given)
