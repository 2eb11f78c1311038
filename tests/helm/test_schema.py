"""values.schema.json: what is refused, and in which words; and `config` is highwater.server.settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_python import HelmRenderError, HelmValuesError

from helm.source.__main__ import CHARTS_OWN
from helm.source.__main__ import files as generated
from highwater.process.errors import SettingsError
from highwater.server.settings import is_list, keys, load, variable
from tests.helm.chart import HELM, chart, container, env, files, merged, pod

# A value of each setting that is not its default. What is none of these is text or a number that doubles.
OTHER: dict[str, Any] = {
    "host": "127.0.0.2",
    "engine_has_extension": True,
    "admin_token_file": "/mnt/secrets/token",
    "trust_loopback": True,
    "recorder_dir": "/run/other",
    "recorder_seconds": 60.0,
    "engine_log": "/run/log/engine.log",
    "state_file": "/var/tmp/state.json",
    "access_log": "-",
    "log_level": "debug",
    "log_format": "json",
    "policy.mode": "observe",
    "policy.rules": [{"name": "one", "signal": "encoder_cache_bytes", "high_water": 2e9, "low_water": 1e9}],
    "trim.host_budget_bytes": 17179869184,
    "door.mode": "on",
    "door.decoded_bytes": 1073741824,
    "door.encoder_tokens": 32768,
    "incidents.folder": "/var/tmp",
    "control_port": 9002,
    "proxy.enabled": True,
    "proxy.extra_paths": ["/invocations"],
    "proxy.max_connections": 7,
    "proxy.forwarded": "replace",
    "engine_root_path": "/llm",
    "gate.drain_seconds": 12.5,
}


def nested(key: str, value: object) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {head: nested(rest, value) if rest else value}


def other(key: str, default: Any) -> Any:
    return OTHER[key] if key in OTHER else default * 2


@pytest.mark.parametrize("key", [key for key, _ in keys() if key.partition(".")[0] not in CHARTS_OWN])
def test_a_setting_is_the_same_as_helm_value_environment_and_key(key: str) -> None:
    default = dict(keys())[key].default
    given = {"config": nested(key, other(key, default))}
    if key in ("incidents.folder", "state_file"):  # they share a folder
        given = {"config": {"state_file": OTHER["state_file"], "incidents": {"folder": "/var/tmp"}}}
    if key == "admin_token_file":  # in place of a Secret
        given["adminToken"] = {"enabled": False}
    variables = env(container(pod(given), "highwater"))
    text = variables[variable(key)]
    settings = load(environ={variable(key): text})
    for part in key.split("."):
        settings = getattr(settings, part)
    plain = [rule.model_dump(exclude_unset=True) for rule in settings] if key == "policy.rules" else settings
    expected = other(key, default)
    if is_list(dict(keys())[key]):
        assert list(plain) == expected
    else:
        assert str(plain) == str(expected)


@pytest.mark.parametrize("name", sorted(generated()))
def test_what_is_generated_is_what_its_sources_say(name: str) -> None:
    assert (HELM / name).read_text(encoding="utf-8") == generated()[name]


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    schema = json.loads((HELM / "values.schema.json").read_text(encoding="utf-8"))

    def paths(values: object, rule: dict[str, Any], at: str) -> None:
        if isinstance(values, dict) and "properties" in rule and at.rpartition(".")[2] != "resources":
            missing = set(rule["properties"]) - set(values) - {"global"}
            # Of a table without a default every key is optional.
            assert at.startswith(".config") or not values or not missing, f"{at}: {missing}"
            for key, value in values.items():
                paths(value, rule["properties"][key], f"{at}.{key}")

    paths(chart().values, schema, "")


def test_every_value_is_explained() -> None:
    """By its own comment in values.yaml; a table of Kubernetes', none of whose keys has one, by its own."""
    source = (HELM / "values.yaml").read_text(encoding="utf-8")
    commented = {number + 1 for number, line in enumerate(source.splitlines()) if line.lstrip().startswith("#")}

    def has_comment(key: yaml.Node) -> bool:
        return key.start_mark.line in commented

    def unexplained(node: yaml.Node, at: str) -> Iterator[str]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            inner = list(unexplained(value, f"{at}.{key.value}"))
            keys = [*value.value] if isinstance(value, yaml.MappingNode) else []
            if len(inner) < len(keys):  # its own values are explained one by one
                yield from inner
            elif not has_comment(key):
                yield f"{at}.{key.value}"

    assert len(commented) > 150
    assert [*unexplained(yaml.compose(source, Loader=yaml.SafeLoader), "")] == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key that is none": ({"replicaCount": 2}, "additional properties 'replicaCount' not allowed"),
    "a key that is none, deep": ({"engine": {"imgae": {}}}, "at '/engine': additional properties 'imgae' not allowed"),
    "a setting that is none": ({"config": {"poll_second": 1}}, "at '/config': additional properties 'poll_second'"),
    "a setting out of bounds": ({"config": {"poll_seconds": 0}}, "at '/config/poll_seconds': minimum: got 0, want 0.1"),
    "a secret among the settings": ({"config": {"admin_token": "x"}}, "additional properties 'admin_token'"),
    "a log in no place": ({"config": {"access_log": "access.log"}}, "at '/config/access_log'"),
    "a wrong word": ({"workload": {"kind": "DaemonSet"}}, "value must be one of 'Deployment', 'StatefulSet'"),
    "a wrong type": ({"engine": {"args": "--enforce-eager"}}, "at '/engine/args': got string, want array"),
    "a privileged port": ({"config": {"port": 80}}, "at '/config/port': minimum: got 80, want 1,024"),
    "a tag in the repository": ({"sidecar": {"image": {"repository": "a/b:1"}}}, "at '/sidecar/image/repository'"),
    "a short digest": ({"engine": {"image": {"digest": "sha256:abc"}}}, "at '/engine/image/digest'"),
    "a size without meaning": ({"engine": {"sharedMemory": "8GB"}}, "at '/engine/sharedMemory'"),
    "an Ingress for no host": ({"ingress": {"enabled": True}}, "at '/ingress/hosts': minItems: got 0, want 1"),
    "an HTTPRoute of no Gateway": ({"httpRoute": {"enabled": True}}, "at '/httpRoute/parentRefs': minItems"),
    "a group of one": ({"multiNode": {"size": 1}}, "at '/multiNode/size': minimum: got 1, want 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_schema_refuses(what: str) -> None:
    values, words = REFUSED[what]
    with pytest.raises((HelmValuesError, HelmRenderError)) as refused:
        files(values)
    assert words in str(refused.value)


TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "the engine's address": ({"engine": {"args": ["--host=0.0.0.0"]}}, "engine.args: --host is set by this chart"),
    "its address, with an underscore": (
        {"engine": {"args": ["--worker_extension_cls", "x.Y"]}},
        "is set by this chart",
    ),
    "a secret as an argument": ({"engine": {"args": ["--api-key", "s3cret"]}}, "would show a secret"),
    "development mode by hand": (
        {"engine": {"env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "0"}]}},
        "engine.env: VLLM_SERVER_DEV_MODE is set by this chart",
    ),
    "the plugin filtered out": (
        {"engine": {"env": [{"name": "VLLM_PLUGINS", "value": "ascend,lora"}]}},
        "engine.env: VLLM_PLUGINS (ascend,lora) leaves out highwater",
    ),
    "a setting beside config": (
        {"sidecar": {"env": [{"name": "HIGHWATER_ADMIN_TOKEN", "value": "s3cret"}]}},
        "sidecar.env: HIGHWATER_ADMIN_TOKEN belongs into config",
    ),
    "the node's loopback": ({"pod": {"hostNetwork": True}}, "set engine.listen.kind to socket"),
    "one port for two": ({"engine": {"listen": {"port": 8001}}}, "share the pod's addresses and must differ"),
    "the control port for two": (
        {"engine": {"listen": {"port": 8002}}},
        "engine.listen.port and config.control_port are both 8002",
    ),
    "one port for both planes": (
        {"config": {"control_port": 8001}},
        "config.port and config.control_port are both 8001",
    ),
    "nobody passes requests on": (
        {"config": {"proxy": {"enabled": False}}},
        "config.proxy.enabled: false leaves no way to the engine",
    ),
    "devices of a CPU": (
        {"engine": {"device": {"kind": "cpu", "count": 2}}},
        "kind is cpu; leave count, resource and claims out",
    ),
    "a kind without devices": ({"engine": {"device": {"count": 0}}}, "count: 0; nvidia needs at least 1"),
    "NVIDIA's image on a CPU": (
        {"engine": {"device": {"kind": "cpu"}}},
        "vllm/vllm-openai:v0.32.0 is vLLM for nvidia, and engine.device.kind is cpu",
    ),
    "devices by two ways": (
        {
            "engine": {"device": {"resource": "nvidia.com/mig-3g.40gb", "claims": ["gpus"]}},
            "pod": {"resourceClaims": [{"name": "gpus"}]},
        },
        "by resource (nvidia.com/mig-3g.40gb) or by claims (gpus)",
    ),
    "a claim that the pod lacks": (
        {"engine": {"device": {"claims": ["gpus"]}}},
        "engine.device.claims: gpus is not among pod.resourceClaims",
    ),
    "no name server": ({"pod": {"dnsPolicy": "None"}}, "pod.dnsConfig: pod.dnsPolicy is None"),
    "an Ingress to no Service": (
        {"service": {"enabled": False}, "ingress": {"enabled": True, "hosts": ["a"]}},
        "ingress.enabled: it leads to the Service, and service.enabled is false",
    ),
    "a route to no Service": (
        {"service": {"enabled": False}, "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}},
        "httpRoute.enabled: it leads to the Service",
    ),
    "a monitor of no Service": (
        {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}},
        "serviceMonitor.enabled: it leads to the Service",
    ),
    "a test of no Service": ({"service": {"enabled": False}}, "helmTest.enabled: it leads to the Service"),
    "a node's port of a ClusterIP": (
        {"service": {"nodePort": 30001}},
        "service.nodePort: service.type is ClusterIP; it needs NodePort or LoadBalancer",
    ),
    "a load balancer's class of none": (
        {"service": {"type": "NodePort", "loadBalancerClass": "example.org/x"}},
        "service.loadBalancerClass: service.type is NodePort; it needs LoadBalancer",
    ),
    "a headless load balancer": (
        {"service": {"type": "LoadBalancer", "clusterIP": "None"}},
        "service.clusterIP: None is a headless Service",
    ),
    "Prometheus shut out": (
        {"networkPolicy": {"enabled": True}, "podMonitor": {"enabled": True}},
        "networkPolicy.scrapers: it is empty, so the policy shuts Prometheus out",
    ),
    "two ways to log in": (
        {"podMonitor": {"enabled": True, "authorization": {"type": "Bearer"}, "basicAuth": {"username": {}}}},
        "podMonitor: authorization and basicAuth exclude each other",
    ),
    "an alert that is none": (
        {"prometheusRule": {"enabled": True, "alerts": {"HighwaterNoSuch": {"enabled": False}}}},
        "prometheusRule.alerts: HighwaterNoSuch is no alert of this chart; there are Highwater",
    ),
    "an image volume without an image": ({"extension": {"from": "image"}}, "extension.image.repository"),
    "two autoscalers": ({"autoscaling": {k: {"enabled": True} for k in ("hpa", "keda")}}, "hpa and keda would both"),
    "two monitors": (
        {k: {"enabled": True} for k in ("podMonitor", "serviceMonitor")},
        "each series would be there twice",
    ),
    "fewer at most than at least": (
        {"autoscaling": {"hpa": {"enabled": True, "minReplicas": 5}}},
        "minReplicas (5) is over maxReplicas (4)",
    ),
    "both budgets": ({"podDisruptionBudget": {"enabled": True, "minAvailable": 1}}, "exclude each other"),
    "one disk for two nodes": ({"models": {"kind": "claim"}, "workload": {"replicas": 2}}, "needs ReadWriteMany"),
    "a folder that is not there": (
        {"config": {"incidents": {"folder": "/elsewhere"}}},
        "nothing is mounted at /elsewhere",
    ),
    "a file in the root": ({"config": {"engine_log": "/engine.log"}}, "config.engine_log: / is there for the root"),
    "one folder for two": (
        {"config": {"engine_log": "/var/lib/highwater/engine.log"}},
        "config.state_file: /var/lib/highwater is there for config.engine_log already",
    ),
    "nobody's workload": ({"workload": {"kind": "None"}}, "attach.podLabels: workload.kind is None"),
    "a workload without a name": ({"workload": {"kind": "None"}}, "say what your Deployment is called"),
    "no Prometheus to ask": (
        {"autoscaling": {"keda": {"enabled": True}}},
        "keda.serverAddress: say where Prometheus is",
    ),
    "a claim without a name": ({"models": {"kind": "existingClaim"}}, "models.existingClaim: say which claim"),
    "no time to end": ({"engine": {"drain": {"firstSeconds": 60}}}, "engine.probes.killSeconds"),
    "a token from two places": (
        {"config": {"admin_token_file": "/etc/highwater/token"}},
        "config.admin_token_file: adminToken.enabled is true",
    ),
}


@pytest.mark.parametrize("what", TOGETHER)
def test_values_that_do_not_go_together_are_refused(what: str) -> None:
    values, words = TOGETHER[what]
    with pytest.raises(HelmRenderError) as refused:
        files(values)
    assert words in str(refused.value)


def test_all_that_does_not_go_together_is_told_at_once() -> None:
    values = merged(TOGETHER["one port for two"][0], TOGETHER["two monitors"][0])
    with pytest.raises(HelmRenderError) as refused:
        files(values)
    assert "must differ" in str(refused.value)
    assert "twice" in str(refused.value)


def test_what_has_no_default_is_asked_for_at_once() -> None:
    with pytest.raises(HelmRenderError) as refused:
        chart().render({}, name="demo", namespace="models")
    for asked in (
        "sidecar.image.repository: say where the sidecar's image is",
        "engine.model: say which model",
        "engine.device.kind: say which devices the engine uses: nvidia, ascend, amd, gaudi or cpu",
    ):
        assert asked in str(refused.value)


RULE = {"name": "r", "signal": "device_used_ratio", "high_water": 0.95, "low_water": 0.9}
WRONG_RULES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a signal that is none": ([RULE | {"signal": "nope"}], "at '/config/policy/rules/0/signal': value must be one of"),
    "a remedy that is none": ([RULE | {"remedies": ["pray"]}], "at '/config/policy/rules/0/remedies/0': value must be"),
    "a remedy twice": ([RULE | {"remedies": ["release", "release"]}], "at '/config/policy/rules/0/remedies'"),
    "no signal": ([{"name": "r"}], "at '/config/policy/rules/0': missing property 'signal'"),
    "no name": ([{"signal": "device_free_bytes"}], "at '/config/policy/rules/0': missing property 'name'"),
    "a key that is none": ([RULE | {"highwater": 1}], "additional properties 'highwater' not allowed"),
    "low over high": (
        [RULE | {"low_water": 0.96}],
        "config.policy.rules[0] (r): high_water (0.95) and low_water (0.96): low_water must be under high_water",
    ),
    "low under high where less is worse": (
        [{"name": "f", "signal": "device_free_bytes", "high_water": 2e9, "low_water": 1e9}],
        "config.policy.rules[0] (f): high_water (2000000000) and low_water (1000000000): low_water must be over",
    ),
    "one water": (
        [{"name": "r", "signal": "device_free_bytes", "high_water": 1e9}],
        "config.policy.rules[0] (r): low_water is missing; give both, or neither",
    ),
    "no water": (
        [{"name": "r", "signal": "encoder_cache_bytes"}],
        "config.policy.rules[0] (r): high_water and low_water are required for encoder_cache_bytes",
    ),
    "a ratio over 1": ([RULE | {"high_water": 95, "low_water": 0.9}], "device_used_ratio is a ratio from 0 to 1"),
    "bytes under 0": (
        [{"name": "r", "signal": "encoder_cache_bytes", "high_water": 5, "low_water": -1}],
        "encoder_cache_bytes is never negative",
    ),
    "no remedy for the host": (
        [RULE | {"signal": "host_used_ratio"}],
        "config.policy.rules[0] (r): remedies must be named for host_used_ratio",
    ),
    "one name for two": ([RULE, RULE], "config.policy.rules[1] (r): another rule has this name"),
}


@pytest.mark.parametrize("what", WRONG_RULES)
def test_a_wrong_rule_is_refused_by_helm_as_by_the_sidecar(what: str) -> None:
    """It would keep the sidecar from starting; the message has the key, the value and what would be right."""
    rules, words = WRONG_RULES[what]
    with pytest.raises((HelmValuesError, HelmRenderError)) as refused:
        files({"config": {"policy": {"rules": rules}}})
    assert words in str(refused.value)
    with pytest.raises(SettingsError):
        load(environ={"HIGHWATER_POLICY__RULES": json.dumps(rules)})


def test_right_rules_are_taken_by_both() -> None:
    rules = [
        {"name": "device", "signal": "device_free_bytes"},
        {"name": "free", "signal": "device_free_bytes", "high_water": 1e9, "low_water": 2e9},
        RULE | {"name": "host", "signal": "host_used_ratio", "remedies": ["reset_mm_cache"]},
    ]
    text = env(container(pod({"config": {"policy": {"rules": rules}}}), "highwater"))["HIGHWATER_POLICY__RULES"]
    assert len(load(environ={"HIGHWATER_POLICY__RULES": text}).policy.rules) == 3
