"""Values of the chart, drawn at random: any option with any other, as far as the chart says that they go together."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from highwater.act.rules import SIGNAL_REMEDIES
from highwater.model.policy import SIGNALS
from highwater.model.remedies import TRAITS

Values = dict[str, Any]
Draw = st.DrawFn

FLAG = st.booleans()
WORDS = st.sampled_from(["a", "team-b", "x1", "gpu"])
LABELS = st.dictionaries(st.sampled_from(["team", "example.org/part", "release"]), WORDS, max_size=2)
# Helm allows dots and a digit in front, up to 53 characters.
RELEASES = st.sampled_from(
    ["demo", "qwen2.5-7b", "7b", "llama-3.1-8b-instruct", "highwater", "0.highwater", "a" * 53, "1" * 45 + ".abc"]
) | st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?)?", fullmatch=True)
IMAGE = {"repository": "registry.example.org/some/image"}
DIGEST = "sha256:" + "c" * 64
CLIENT = {"podSelector": {"matchLabels": {"app": "client"}}}
ELSEWHERE = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
SOME_PEERS = st.sampled_from([[CLIENT], [ELSEWHERE], [ELSEWHERE, {"ipBlock": {"cidr": "10.0.0.0/8"}}]])
PEERS = st.just([]) | SOME_PEERS
TIMING = st.fixed_dictionaries(
    {},
    optional={
        "initialDelaySeconds": st.integers(0, 60),
        "periodSeconds": st.integers(1, 60),
        "timeoutSeconds": st.integers(1, 30),
        "failureThreshold": st.integers(1, 9),
    },
)
CONFIG_FOLDERS = {
    "recorder_dir": st.sampled_from([None, "/run/highwater/recorder", "/mnt/rec"]),
    "engine_log": st.sampled_from([None, "/var/log/vllm/engine.log"]),
}


@st.composite
def rules(draw: Draw) -> Values:
    """A rule that the sidecar would take."""
    signal = draw(st.sampled_from([*SIGNAL_REMEDIES]))
    scale = 1.0 if SIGNALS[signal].is_ratio else 1e9
    waters = sorted(draw(st.lists(st.sampled_from([0.1, 0.5, 0.9, 1.0]), min_size=2, max_size=2, unique=True)))
    low, high = waters if not SIGNALS[signal].falls else waters[::-1]
    remedies = draw(st.lists(st.sampled_from(list(TRAITS)), unique=True, min_size=0 if SIGNAL_REMEDIES[signal] else 1))
    rule = {"name": signal, "signal": signal, "high_water": high * scale, "low_water": low * scale}
    return rule | ({"remedies": remedies} if remedies else {})


@st.composite
def config(draw: Draw) -> Values:
    port, control = draw(
        st.lists(st.integers(1024, 65535).filter(lambda n: n != 8000), min_size=2, max_size=2, unique=True)
    )
    state = draw(st.sampled_from([None, "/var/lib/highwater/state.json", "/var/tmp/s/state.json"]))
    found = {
        "port": port,
        "control_port": control,
        "state_file": state,
        "incidents": {"folder": state and state.rpartition("/")[0]},
        "policy": {"mode": draw(st.sampled_from(["act", "observe"]))},
        **{key: draw(value) for key, value in CONFIG_FOLDERS.items()},
    }
    if draw(FLAG):
        found["policy"]["rules"] = draw(st.lists(rules(), max_size=3, unique_by=lambda rule: rule["name"]))
    return found


@st.composite
def device(draw: Draw) -> Values:
    """Values of `engine` and `pod` about devices."""
    kind = draw(st.sampled_from(["nvidia", "ascend", "amd", "gaudi", "cpu"]))
    if kind == "cpu":
        return {"engine": {"device": {"kind": kind}}}
    found: Values = {"kind": kind, "count": draw(st.integers(1, 8))}
    how = draw(st.sampled_from(["usual", "resource", "claims"]))
    if how == "resource":
        found["resource"] = "example.org/slice"
    if how != "claims":
        return {"engine": {"device": found}}
    claim = {"name": "gpus", "resourceClaimTemplateName": "some-gpus"}
    return {"engine": {"device": found | {"claims": ["gpus"]}}, "pod": {"resourceClaims": [claim]}}


@st.composite
def engine(draw: Draw, *, needs_socket: bool) -> Values:
    return {
        "model": draw(st.sampled_from(["Qwen/Qwen3-8B", "/models/some model", "{{ no template }}"])),
        "servedModelName": draw(st.sampled_from(["", "served"])),
        "image": draw(st.sampled_from([IMAGE, IMAGE | {"digest": DIGEST}, {"repository": "vllm", "tag": "v1"}])),
        "command": draw(st.sampled_from([["vllm", "serve"], ["python3", "-m", "vllm.entrypoints.openai.api_server"]])),
        "environmentFiles": draw(st.sampled_from([[], ["/opt/set_env.sh"]])),
        "args": draw(st.sampled_from([[], ["--max-num-seqs=8"], ['--x={"a": [1, "two words"]}']])),
        "tensorParallelSize": draw(st.sampled_from([0, 4])),
        "env": draw(st.sampled_from([[], [{"name": "HOME", "value": "/tmp"}, {"name": "MINE", "value": "1"}]])),
        "workerExtension": draw(st.sampled_from(["", "mine.Both"])),
        "listen": {"kind": "socket" if needs_socket or draw(FLAG) else "loopback"},
        "resources": draw(st.sampled_from([{}, {"limits": {"memory": "64Gi"}}, {"requests": {"cpu": "8"}}])),
        "apiKey": {"enabled": draw(FLAG), "existingSecret": {"name": draw(st.sampled_from(["", "theirs"]))}},
        "probes": {
            "liveness": draw(FLAG),
            "startupSeconds": draw(st.integers(1, 86400)),
            "overrides": {key: draw(TIMING) for key in ("startup", "liveness", "readiness")},
        },
        "lifecycle": {"postStart": draw(st.sampled_from([{}, {"exec": {"command": ["true"]}}]))},
        "securityContext": draw(st.sampled_from([{}, {"readOnlyRootFilesystem": False}])),
    }


@st.composite
def models(draw: Draw, *, shared: bool) -> Values:
    """Where models are; `shared`: several pods would mount one claim."""
    kind = draw(st.sampled_from(["emptyDir", "claim", "existingClaim", "hostPath", "none"]))
    return {
        "kind": kind,
        "mountPath": draw(st.sampled_from(["/models", "/data/m"])),
        "accessModes": ["ReadWriteMany"] if shared else draw(st.sampled_from([["ReadWriteOnce"], ["ReadWriteMany"]])),
        "existingClaim": "models" if kind == "existingClaim" else "",
        "hostPath": "/srv/models" if kind == "hostPath" else "",
        "readOnly": draw(FLAG) if kind != "claim" else False,
        "offline": draw(FLAG),
        "tokenSecret": {"name": draw(st.sampled_from(["", "hub"]))},
    }


@st.composite
def pod(draw: Draw, *, host_network: bool) -> Values:
    return {
        "hostNetwork": host_network,
        "hostIPC": draw(st.sampled_from([False, False, False, True])),
        "shareProcessNamespace": draw(FLAG),
        "dnsConfig": draw(st.sampled_from([{}, {"options": [{"name": "ndots", "value": "2"}]}])),
        "hostAliases": draw(st.sampled_from([[], [{"ip": "10.1.1.1", "hostnames": ["hub.example.org"]}]])),
        "labels": draw(LABELS),
        "annotations": draw(LABELS),
        "nodeSelector": draw(LABELS),
        "runtimeClassName": draw(st.sampled_from(["", "nvidia"])),
        "tolerations": draw(st.sampled_from([[], [{"operator": "Exists"}]])),
        "securityContext": draw(st.sampled_from([{}, {"supplementalGroups": [1000]}])),
    }


@st.composite
def service(draw: Draw) -> Values:
    kind = draw(st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]))
    found: Values = {
        "type": kind,
        "port": draw(st.integers(1, 65535)),
        "labels": draw(LABELS),
        "annotations": draw(LABELS),
        "trafficDistribution": draw(st.sampled_from(["", "PreferClose", "PreferSameZone", "PreferSameNode"])),
    }
    if kind == "ClusterIP":
        found["clusterIP"] = draw(st.sampled_from(["", "None", "10.96.7.7"]))
    else:
        found["nodePort"] = draw(st.sampled_from([0, 30123]))
        found["externalTrafficPolicy"] = draw(st.sampled_from(["", "Local"]))
    if kind == "LoadBalancer":
        found["loadBalancerClass"] = draw(st.sampled_from(["", "example.org/internal"]))
        found["loadBalancerSourceRanges"] = draw(st.sampled_from([[], ["10.0.0.0/8"]]))
    return found


@st.composite
def monitor(draw: Draw) -> Values:
    return {
        "enabled": True,
        "engineMetrics": draw(FLAG),
        "labels": draw(LABELS),
        "annotations": draw(LABELS),
        "jobLabel": draw(st.sampled_from(["", "app"])),
        "honorLabels": draw(FLAG),
        "sampleLimit": draw(st.sampled_from([0, 5000])),
        "basicAuth": draw(st.sampled_from([{}, {"username": {"name": "s", "key": "u"}}])),
        "tlsConfig": draw(st.sampled_from([{}, {"insecureSkipVerify": True}])),
    }


@st.composite
def around(draw: Draw, *, has_service: bool, kind: str) -> Values:
    """What stands beside the pods; only that which the Service and the workload allow."""
    found: Values = {
        "service": {"enabled": has_service, **draw(service())},
        "helmTest": {"enabled": has_service and draw(FLAG)},
        "podDisruptionBudget": {"enabled": draw(FLAG)},
        "dashboards": {
            "enabled": draw(FLAG),
            "namespace": draw(st.sampled_from(["", "monitoring"])),
            "baseUrl": draw(st.sampled_from(["", "https://grafana.example.org/"])),
        },
        "docs": {"baseUrl": draw(st.sampled_from(["", "https://docs.example.org"]))},
        "networkPolicy": {"enabled": draw(FLAG), "clients": draw(PEERS), "operators": draw(PEERS)},
    }
    which = draw(st.sampled_from(["podMonitor", "serviceMonitor", None] if has_service else ["podMonitor", None]))
    if which:
        found[which] = draw(monitor())
    found["networkPolicy"]["scrapers"] = draw(SOME_PEERS if which else PEERS)
    if has_service and draw(FLAG):
        found["ingress"] = {"enabled": True, "hosts": ["llm.example.org"], "className": draw(WORDS)}
    if has_service and draw(FLAG):
        found["httpRoute"] = {"enabled": True, "parentRefs": [{"name": "gateway"}]}
    if draw(st.integers(0, 3)) == 0:  # rendering the alerts takes longest
        alerts = {
            draw(st.sampled_from(["HighwaterPolicyNotActing", "HighwaterPolicyNotActing/observe"])): {
                "enabled": draw(FLAG),
                "severity": "info",
                "for": "1h",
                "labels": {"a": "b"},
            }
        }
        found["prometheusRule"] = {"enabled": True, "recordings": draw(FLAG), "alerts": alerts}
    scaler = draw(st.sampled_from(["hpa", "keda", None])) if kind != "None" else None
    if scaler:
        address = {"serverAddress": "http://prometheus:9090"} if scaler == "keda" else {}
        found["autoscaling"] = {scaler: {"enabled": True, **address}}
    return found


@st.composite
def values(draw: Draw) -> Values:
    kind = draw(st.sampled_from(["Deployment", "StatefulSet", "LeaderWorkerSet", "None"]))
    host_network = draw(st.sampled_from([False, False, True]))
    beside = draw(around(has_service=draw(st.sampled_from([True, True, False])), kind=kind))
    replicas = draw(st.integers(0, 3))
    several = replicas > 1 or "autoscaling" in beside or kind == "LeaderWorkerSet"
    found: Values = {
        **beside,
        "nameOverride": draw(st.sampled_from(["", "", "2.x"])),
        "fullnameOverride": draw(st.sampled_from(["", "", "", "7b.model"])),
        "commonLabels": draw(LABELS),
        "commonAnnotations": draw(LABELS),
        "workload": {"kind": kind, "replicas": replicas},
        "config": draw(config()),
        "engine": draw(engine(needs_socket=host_network)),
        "models": draw(models(shared=several and kind != "StatefulSet")),
        "pod": draw(pod(host_network=host_network)),
        "sidecar": {
            "image": IMAGE,
            "tls": {"existingSecret": draw(st.sampled_from(["", "pair"]))},
            "state": {"persistent": kind == "StatefulSet" and draw(FLAG)},
            "probes": {"overrides": {key: draw(TIMING) for key in ("liveness", "readiness")}},
        },
        "extension": draw(st.sampled_from([{}, {"from": "copy"}, {"from": "image", "image": IMAGE}])),
        "adminToken": {"enabled": draw(FLAG), "existingSecret": {"name": draw(st.sampled_from(["", "theirs"]))}},
        "serviceAccount": {"create": draw(FLAG)},
        "multiNode": {"executor": draw(st.sampled_from(["mp", "ray"]))},
        "attach": {"name": "my-vllm", "podLabels": {"app": "my-vllm"}} if kind == "None" else {},
        "global": draw(st.sampled_from([{}, {"imageRegistry": "mirror.example.org:5000"}])),
    }
    if kind == "None":  # a key that the chart makes would go with the release
        found["engine"]["apiKey"]["existingSecret"]["name"] = "theirs"
    devices = draw(device())
    found["engine"]["device"] = devices["engine"]["device"]
    found["pod"] |= devices.get("pod", {})
    return found
