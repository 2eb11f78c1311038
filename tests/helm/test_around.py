"""What comes beside the pod: each off until its value says so, and then what it says."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import yaml

from tests.helm.chart import (
    CI_FILES,
    HELM,
    NAMESPACE,
    Object,
    ci_values,
    container,
    files,
    kinds,
    merged,
    objects,
    pod,
    the,
)

ALWAYS = {"Deployment", "Service", "ServiceAccount", "Secret", "ConfigMap", "Pod"}
OPTIONS: dict[str, Object] = {
    "PodMonitor": {"podMonitor": {"enabled": True}},
    "ServiceMonitor": {"serviceMonitor": {"enabled": True}},
    "PrometheusRule": {"prometheusRule": {"enabled": True}},
    "NetworkPolicy": {"networkPolicy": {"enabled": True}},
    "PodDisruptionBudget": {"podDisruptionBudget": {"enabled": True}},
    "HorizontalPodAutoscaler": {"autoscaling": {"hpa": {"enabled": True}}},
    "ScaledObject": {"autoscaling": {"keda": {"enabled": True, "serverAddress": "http://prometheus:9090"}}},
    "Ingress": {"ingress": {"enabled": True, "hosts": ["llm.example.org"]}},
    "HTTPRoute": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}},
}


def test_by_default_there_is_what_a_pod_needs_and_no_more() -> None:
    """Nothing that another operator would have to be installed for."""
    assert set(kinds({})) == ALWAYS


@pytest.mark.parametrize("kind", OPTIONS)
def test_one_value_adds_one_kind(kind: str) -> None:
    assert set(kinds(OPTIONS[kind])) == ALWAYS | {kind}


@pytest.mark.parametrize("kind", ["HorizontalPodAutoscaler", "ScaledObject"])
def test_what_is_scaled_has_no_number_of_its_own(kind: str) -> None:
    """An upgrade would set it back otherwise. The target is the workload by its name."""
    target = the(kind, OPTIONS[kind])["spec"]["scaleTargetRef"]
    workload = the("Deployment", OPTIONS[kind])
    assert "replicas" not in workload["spec"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": workload["metadata"]["name"]}


def test_autoscalers_ask_for_metrics_that_there_are() -> None:
    known = (HELM.parent / "tests" / "unit" / "http" / "golden" / "metrics.txt").read_text(encoding="utf-8")
    for metric in the("HorizontalPodAutoscaler", OPTIONS["HorizontalPodAutoscaler"])["spec"]["metrics"]:
        assert f"# TYPE {metric['pods']['metric']['name']} gauge" in known
    for trigger in the("ScaledObject", OPTIONS["ScaledObject"])["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        assert f'namespace="{NAMESPACE}", pod=~"demo-highwater-.*"' in query
        names = {word for word in query.replace("(", " ").replace("{", " ").split() if word.startswith("highwater_")}
        assert names
        assert all(f"# TYPE {name} " in known for name in names)


def test_engines_are_added_for_load_and_never_for_memory() -> None:
    """Another engine would start as full; and an empty answer of Prometheus scales nothing down."""
    triggers = the("ScaledObject", OPTIONS["ScaledObject"])["spec"]["triggers"]
    assert {each["metadata"]["ignoreNullValues"] for each in triggers} == {"false"}
    assert [each["metricType"] for each in triggers] == ["AverageValue", "Value"]
    assert not [each for each in triggers if "policy" in each["metadata"]["query"]]


def test_keda_scales_as_slowly_as_the_autoscaler_does() -> None:
    keda = OPTIONS["ScaledObject"]["autoscaling"]["keda"]
    spec = the("ScaledObject", OPTIONS["ScaledObject"])["spec"]
    behavior = the("HorizontalPodAutoscaler", OPTIONS["HorizontalPodAutoscaler"])["spec"]["behavior"]
    assert spec["advanced"] == {"horizontalPodAutoscalerConfig": {"behavior": behavior}}
    assert "fallback" not in spec
    fallback = {"failureThreshold": 3, "replicas": 2}
    given = the("ScaledObject", {"autoscaling": {"keda": keda | {"fallback": fallback}}})["spec"]
    assert given["fallback"] == fallback


def test_the_budget_finds_the_pods_that_serve() -> None:
    budget = the("PodDisruptionBudget", OPTIONS["PodDisruptionBudget"])["spec"]
    assert budget["selector"]["matchLabels"].items() <= pod({})["metadata"]["labels"].items()
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_ingress_and_route_publish_v1_and_nothing_else() -> None:
    ingress = the("Ingress", OPTIONS["Ingress"])["spec"]
    paths = [path["path"] for rule in ingress["rules"] for path in rule["http"]["paths"]]
    route = the("HTTPRoute", OPTIONS["HTTPRoute"])["spec"]
    matches = [match["path"] for rule in route["rules"] for match in rule["matches"]]
    assert paths == ["/v1"]
    assert matches == [{"type": "PathPrefix", "value": "/v1"}]


def test_a_policy_tells_the_two_ports_apart() -> None:
    peers = {who: [{"podSelector": {"matchLabels": {"app": who}}}] for who in ("clients", "operators", "scrapers")}
    ports = {"port": 9001, "control_port": 9002}
    policy = the("NetworkPolicy", {"networkPolicy": {"enabled": True, **peers}, "config": ports})["spec"]
    rules = [(rule["from"], [port["port"] for port in rule["ports"]]) for rule in policy["ingress"]]
    assert rules[:3] == [(peers["clients"], [9001]), (peers["operators"], [9002]), (peers["scrapers"], [9002])]
    (((test,), test_ports),) = rules[3:]
    labels = the("Pod", {})["metadata"]["labels"]
    assert (test["podSelector"]["matchLabels"].items() <= labels.items(), test_ports) == (True, [9002])


def test_a_policy_that_names_nobody_lets_nobody_in() -> None:
    """An empty list, and not a missing one, which would let in all."""
    nobody = {"networkPolicy": {"enabled": True, "clients": []}, "helmTest": {"enabled": False}}
    assert the("NetworkPolicy", nobody)["spec"]["ingress"] == []
    assert the("NetworkPolicy", nobody)["spec"]["policyTypes"] == ["Ingress"]


@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_no_service_publishes_the_control_port(kind: str) -> None:
    values = {"service": {"type": kind, "port": 80}, "config": {"port": 9001, "control_port": 9002}}
    data, control = (
        the("Service", values, ending="highwater")["spec"],
        the("Service", values, ending="-control")["spec"],
    )
    assert (data["type"], control["type"], control["publishNotReadyAddresses"]) == (kind, "ClusterIP", True)
    assert [(port["port"], port["targetPort"]) for port in data["ports"]] == [(80, 9001)]
    assert [(port["port"], port["targetPort"]) for port in control["ports"]] == [(9002, 9002)]
    assert data["selector"] == control["selector"]


def test_the_nodes_of_a_group_reach_each_other() -> None:
    """On any port, and nobody else does: Ray's would let them run code."""
    policy = the("NetworkPolicy", ci_values("leaderworkerset-ray-values.yaml"))["spec"]
    (group,) = [rule for rule in policy["ingress"] if "ports" not in rule]
    (peer,) = group["from"]
    assert peer["podSelector"]["matchLabels"] == policy["podSelector"]["matchLabels"]


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_monitors_scrape_the_sidecar_and_bring_the_engines_metrics(kind: str) -> None:
    monitor = the(kind, OPTIONS[kind])["spec"]
    (endpoint,) = monitor.get("podMetricsEndpoints") or monitor["endpoints"]
    service = the("Service", {}, ending="-control")
    ports = {
        "PodMonitor": {port["name"]: port["containerPort"] for port in container(pod({}), "highwater")["ports"]},
        "ServiceMonitor": {port["name"]: port["targetPort"] for port in service["spec"]["ports"]},
    }
    labels = {"PodMonitor": pod({})["metadata"]["labels"], "ServiceMonitor": service["metadata"]["labels"]}
    assert ports[kind][endpoint["port"]] == 8002
    assert monitor["selector"]["matchLabels"].items() <= labels[kind].items()
    assert (endpoint["path"], endpoint.get("params"), endpoint["scheme"]) == ("/metrics", None, "http")
    assert monitor["namespaceSelector"] == {"matchNames": [NAMESPACE]}


def test_options_of_the_service_reach_it_and_no_other() -> None:
    """Under Kubernetes' names, on the Service for clients alone; labels do not replace what it is found by."""
    values = merged(
        ci_values("dra-loadbalancer-values.yaml"), {"service": {"labels": {"app.kubernetes.io/component": "x"}}}
    )
    data, control = the("Service", values, ending="highwater"), the("Service", values, ending="-control")
    given = values["service"]
    for key in (
        "type",
        "loadBalancerClass",
        "loadBalancerSourceRanges",
        "externalTrafficPolicy",
        "trafficDistribution",
    ):
        assert data["spec"][key] == given[key]
        assert key == "type" or key not in control["spec"]
    assert data["spec"]["ports"][0]["nodePort"] == 30443
    labels = data["metadata"]["labels"]
    assert (labels["exposure"], labels["app.kubernetes.io/component"]) == ("internal", "engine")
    assert the("Service", {"service": {"clusterIP": "None"}}, ending="highwater")["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_options_of_a_monitor_reach_it(kind: str) -> None:
    of_endpoint = {"honorLabels": True, "basicAuth": {"username": {"name": "s", "key": "u"}}}
    of_monitor = {"sampleLimit": 20000, "jobLabel": "team"}
    ((option, value),) = OPTIONS[kind].items()
    usual = the(kind, OPTIONS[kind])
    changed = the(kind, {option: {**value, **of_endpoint, **of_monitor, "annotations": {"a": "b"}}})
    endpoints = "podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"
    assert changed["spec"] == usual["spec"] | of_monitor | {endpoints: [usual["spec"][endpoints][0] | of_endpoint]}
    assert changed["metadata"]["annotations"] == {"a": "b"}


def test_an_alert_is_changed_by_its_name_or_by_its_name_and_reason() -> None:
    rule = {"enabled": True, "recordings": False}
    alerts = {
        "HighwaterPolicyNotActing/observe": {"enabled": False},
        "HighwaterLeak": {"enabled": False},
        "HighwaterEngineDown": {"for": "10m", "labels": {"team": "a"}},
        "HighwaterEngineDown/died": {"severity": "info", "for": "15m", "labels": {"page": "office-hours"}},
    }
    usual, changed = (
        {
            (each["alert"], each["labels"].get("reason")): each
            for group in the("PrometheusRule", one)["spec"]["groups"]
            for each in group["rules"]
        }
        for one in ({"prometheusRule": rule}, {"prometheusRule": {**rule, "alerts": alerts}})
    )
    assert usual.keys() - changed.keys() == {("HighwaterPolicyNotActing", "observe"), ("HighwaterLeak", None)}
    died, down = changed["HighwaterEngineDown", "died"], changed["HighwaterEngineDown", "down"]
    assert died["labels"] == {"severity": "info", "reason": "died", "page": "office-hours", "team": "a"}
    assert (died["for"], died["expr"]) == ("15m", usual["HighwaterEngineDown", "died"]["expr"])
    assert (down["for"], down["labels"]) == ("10m", {"severity": "critical", "reason": "down", "team": "a"})
    assert {name for name, _ in (key for key in changed if changed[key] != usual[key])} == {"HighwaterEngineDown"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"engine": {"listen": {"kind": "socket"}}, "pod": {"hostNetwork": True}},
            "most networks apply no NetworkPolicy to such pods",
        ),
        (
            {"ingress": {"enabled": True, "hosts": ["a.example.org"]}},
            "networkPolicy.clients admits this namespace only",
        ),
        (
            {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}},
            "networkPolicy.clients admits this namespace only",
        ),
    ],
)
def test_the_notes_warn_of_what_a_policy_cannot_guard_or_shuts_out(values: Object, words: str) -> None:
    def notes(given: Object) -> str:
        return next(text for file, text in files(given).items() if file.endswith("NOTES.txt"))

    policy: Object = {"networkPolicy": {"enabled": True}}
    assert words in notes(merged(values, policy))
    assert words not in notes(values)
    assert words not in notes(policy)
    gateway = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}]
    named = merged(values, {"networkPolicy": {"enabled": True, "clients": gateway}})
    assert "hostNetwork" in str(values) or words not in notes(named)


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_monitors_leave_the_engines_metrics_out_where_others_scrape_them(kind: str) -> None:
    """Every series of vLLM would exist twice."""
    ((option, value),) = OPTIONS[kind].items()
    monitor = the(kind, {option: value | {"engineMetrics": False}})["spec"]
    (endpoint,) = monitor.get("podMetricsEndpoints") or monitor["endpoints"]
    assert endpoint["params"] == {"engine": ["0"]}


def without_links(spec: dict[str, Any]) -> dict[str, Any]:
    spec = copy.deepcopy(spec)
    for group in spec["groups"]:
        for rule in group["rules"]:
            for link in ("runbook_url", "dashboard_url"):
                rule.get("annotations", {}).pop(link, None)
    return spec


@pytest.mark.parametrize(
    ("values", "url"),
    [
        ({}, "http://demo-highwater-control.models:8002/docs/runbooks/{}.html"),
        ({"docs": {"baseUrl": "https://docs.example.org/hw/"}}, "https://docs.example.org/hw/runbooks/{}.html"),
        (
            {"docs": {"baseUrl": "https://git.example.org/docs", "suffix": "md"}},
            "https://git.example.org/docs/runbooks/{}.md",
        ),
        (
            {"sidecar": {"tls": {"existingSecret": "t"}}},
            "https://demo-highwater-control.models:8002/docs/runbooks/{}.html",
        ),
    ],
)
def test_every_alert_links_to_its_runbook(values: dict[str, Any], url: str) -> None:
    spec = the("PrometheusRule", {**values, "prometheusRule": {"enabled": True, "recordings": False}})["spec"]
    rules = [rule for group in spec["groups"] for rule in group["rules"]]
    assert {rule["annotations"]["runbook_url"] for rule in rules} == {url.format(rule["alert"]) for rule in rules}


def test_every_alert_links_to_its_dashboard() -> None:
    values = {"prometheusRule": {"enabled": True, "recordings": False}, "dashboards": {"baseUrl": "https://g.org/x/"}}
    rules = [rule for group in the("PrometheusRule", values)["spec"]["groups"] for rule in group["rules"]]
    uids = {path.stem for path in (HELM / "dashboards").glob("*.json")}
    links = [
        re.fullmatch(r"https://g\.org/x/d/([\w-]+)(\?.*)?", rule["annotations"]["dashboard_url"]) for rule in rules
    ]
    assert {link[1] for link in links if link} == uids
    assert all(links)


def test_the_rules_are_those_of_the_alert_files() -> None:
    source = yaml.safe_load((HELM / "alerts" / "highwater.rules.yaml").read_text(encoding="utf-8"))
    as_is = the("PrometheusRule", {"prometheusRule": {"enabled": True, "recordings": False}})["spec"]
    assert without_links(as_is) == without_links(source)
    changed = the("PrometheusRule", ci_values("nvidia-values.yaml"))["spec"]
    rules = [rule for group in changed["groups"] for rule in group["rules"] if "alert" in rule]
    assert "observe" not in {rule["labels"].get("reason") for rule in rules}
    assert {rule["labels"]["team"] for rule in rules} == {"inference"}
    base = "https://git.example.org/highwater/docs/runbooks/"
    assert {rule["annotations"]["runbook_url"] for rule in rules} == {f"{base}{rule['alert']}.md" for rule in rules}


def test_recording_rules_come_along() -> None:
    """As they are in their file: a label more would be on every series that they make."""
    (path,) = (HELM / "alerts").glob("*-recording.rules.yaml")
    source = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    made = the("PrometheusRule", ci_values("nvidia-values.yaml"))["spec"]["groups"]
    assert [group for group in made if "record" in group["rules"][0]] == source


def test_the_dashboards_are_those_of_the_folder() -> None:
    made = [e for e in objects({"dashboards": {"enabled": True}}) if "grafana_dashboard" in e["metadata"]["labels"]]
    texts = {name: text for each in made for name, text in each["data"].items()}
    assert sorted(texts) == sorted(path.name for path in (HELM / "dashboards").glob("*.json"))
    for each in made:
        ((name, text),) = each["data"].items()
        assert json.loads(text) == json.loads((HELM / "dashboards" / name).read_text(encoding="utf-8"))
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"]["grafana_folder"] == "Highwater"
        assert len(text) < 900_000


def test_extra_objects_are_filled_in() -> None:
    note = the("ConfigMap", ci_values("ingress-hpa-values.yaml"), ending="-note")
    assert (note["metadata"]["name"], note["data"]) == ("demo-note", {"note": "Qwen/Qwen3-VL-8B-Instruct"})


def test_labels_of_every_object_are_the_recommended_ones() -> None:
    for each in objects(merged(ci_values("nvidia-values.yaml"), {"commonLabels": {"team": "x"}})):
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "highwater"
        assert labels["app.kubernetes.io/instance"] == "demo"
        assert labels["team"] == "x"


def notes_of(values: Object) -> tuple[str, list[str]]:
    notes = next(text for file, text in files(values).items() if file.endswith("NOTES.txt"))
    indented = [line for line in notes.splitlines() if line.startswith("  ")]
    return notes, [line for line in indented if line.strip().startswith(("kubectl", "curl"))]


@pytest.mark.parametrize("name", CI_FILES)
def test_the_notes_tell_three_commands(name: str) -> None:
    notes, commands = notes_of(ci_values(name))
    assert len(commands) == (1 if name == "attach-values.yaml" else 3)
    assert all(f"-n {NAMESPACE}" in line or f".{NAMESPACE}:" in line or "localhost" in line for line in commands)
    assert "map[" not in notes
    assert "<no value>" not in notes


def test_the_notes_tell_how_to_apply_the_patch() -> None:
    values = ci_values("attach-values.yaml")
    with_args = merged(values, {"attach": {"args": ["--model=m"]}})
    for given, keys in ((values, ["kustomization.yaml"]), (with_args, ["patch.yaml"])):
        notes, commands = notes_of(given)
        found = the("ConfigMap", given, ending="-patch")
        assert re.findall(r'index \.data "([^"]+)"', notes) == keys
        assert {*keys} <= {*found["data"]}
        assert f"get configmap {found['metadata']['name']} " in commands[0]
    assert commands[1].split()[-1] == "patch.yaml"
