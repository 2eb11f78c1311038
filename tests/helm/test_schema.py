"""values.schema.json: what is refused, and in which words; and `config` is highwater.settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_python import HelmRenderError, HelmValuesError

from helm.generator.__main__ import files as generated
from helm.generator.settings import CHARTS_OWN
from highwater.settings import is_list, keys, variable
from highwater.settings_sources import load
from tests.helm.chart import CI_FILES, HELM, chart, ci_values, container, env, files, merged, pod

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
    "policy.mode": "observe",
    "policy.rules": [{"name": "one", "signal": "encoder_cache_bytes", "high_water": 2e9, "low_water": 1e9}],
    "trim.host_budget_bytes": 17179869184,
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
    """Given in `config`, it comes out as its variable, and the sidecar reads from that what was given."""
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
    """`python -m helm.generator` (and `make docs`) writes them anew."""
    assert (HELM / name).read_text(encoding="utf-8") == generated()[name]


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    """No value without a rule, and no rule for a value that is none; optional settings are in docs/settings.md."""
    schema = json.loads((HELM / "values.schema.json").read_text(encoding="utf-8"))

    def paths(values: object, rule: dict[str, Any], at: str) -> None:
        if isinstance(values, dict) and "properties" in rule and at.rpartition(".")[2] != "resources":
            missing = set(rule["properties"]) - set(values) - {"global"}
            assert at.startswith(".config") or not missing, f"{at}: {missing}"
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
    """Before anything is rendered, with the value's place and what would be right."""
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
    "devices of no kind": ({"engine": {"device": {"count": 2}}}, "kind is none, so count must be 0"),
    "a kind without devices": ({"engine": {"device": {"kind": "ascend"}}}, "ascend needs at least 1"),
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
    """In one sentence that names the values."""
    values, words = TOGETHER[what]
    with pytest.raises(HelmRenderError) as refused:
        files(values)
    assert words in str(refused.value)


def test_all_that_does_not_go_together_is_told_at_once() -> None:
    """Nobody corrects one value after the other."""
    values = merged(TOGETHER["one port for two"][0], TOGETHER["two monitors"][0])
    with pytest.raises(HelmRenderError) as refused:
        files(values)
    assert "must differ" in str(refused.value)
    assert "twice" in str(refused.value)


@pytest.mark.parametrize(
    ("section", "key", "words"), [("engine", "model", "say which model"), ("sidecar", "image", "say where")]
)
def test_what_has_no_default_is_asked_for(section: str, key: str, words: str) -> None:
    """The model and the sidecar's image, by name."""
    with pytest.raises(HelmRenderError) as refused:
        files({section: {key: "" if key == "model" else {"repository": ""}}})
    assert words in str(refused.value)


@pytest.mark.parametrize("name", CI_FILES)
def test_the_schema_accepts_each_example(name: str) -> None:
    """As Helm checks it before an installation."""
    chart().validate_schema(ci_values(name))
