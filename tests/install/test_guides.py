"""What the guides' tests ask of a pod finds what it is there to find, and the index leads to every guide."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import yaml

from tests.helm.chart import Object, container
from tests.install.guides import (
    GUIDES,
    assert_harmless,
    assert_in_front,
    assert_recorded,
    page,
    saved_files,
)


def good() -> Object:
    """A pod as production-stack's page makes it: its patch is nearly one, over the chart's command."""
    patch = yaml.safe_load(saved_files(page("production-stack"))["highwater/sidecar.yaml"])
    spec = copy.deepcopy(patch["spec"]["template"]["spec"])
    (engine,) = spec["containers"]
    engine["command"] = ["vllm", "serve", "some/model", "--host", "0.0.0.0", "--port", "8000"]
    for kind in ("startupProbe", "livenessProbe"):
        engine[kind] = {key: value for key, value in engine[kind].items() if key != "httpGet"}
    return {"kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def asked(pod: Object) -> None:
    assert_in_front(pod, "vllm", port=8000, engine_port=18000)
    assert_recorded(pod, "vllm")
    assert_harmless(pod)


def test_a_pod_as_it_should_be_passes() -> None:
    """Else the tests below would say nothing."""
    asked(good())


def _engine_on_every_address(pod: Object) -> None:
    container(pod, "vllm")["args"].remove("--host=127.0.0.1")


def _liveness_through_the_sidecar(pod: Object) -> None:
    container(pod, "vllm")["livenessProbe"] = {"httpGet": {"path": "/health", "port": 8000}}


def _both_kinds_of_probe(pod: Object) -> None:
    container(pod, "vllm")["startupProbe"]["httpGet"] = {"path": "/health", "port": 8000}


def _readiness_for_the_init_container_alone(pod: Object) -> None:
    container(pod, "vllm")["readinessProbe"] = {"httpGet": {"path": "/health", "port": 8000}}


def _another_port_than_clients_had(pod: Object) -> None:
    container(pod, "highwater")["env"][0]["value"] = "8001"


def _a_folder_of_its_own(pod: Object) -> None:
    container(pod, "highwater")["volumeMounts"][0]["name"] = "highwater-tmp"


def _a_package_that_nobody_brings(pod: Object) -> None:
    container(pod, "vllm")["env"][1]["value"] = "/elsewhere"
    container(pod, "vllm")["volumeMounts"][0]["mountPath"] = "/elsewhere"


def _an_engine_that_waits(pod: Object) -> None:
    container(pod, "highwater")["startupProbe"] = {"httpGet": {"path": "/livez", "port": 8002}}


def _an_init_container_that_never_ends(pod: Object) -> None:
    del container(pod, "highwater")["restartPolicy"]


def _a_secret_that_may_be_gone(pod: Object) -> None:
    pod["spec"]["volumes"][2] = {"name": "highwater-state", "secret": {"secretName": "highwater"}}


def _root(pod: Object) -> None:
    container(pod, "highwater")["securityContext"]["runAsNonRoot"] = False


BREAKAGES = [value for name, value in sorted(globals().items()) if re.match(r"_[a-z]", name) and callable(value)]


@pytest.mark.parametrize("breaks", BREAKAGES, ids=lambda breaks: breaks.__name__.strip("_"))
def test_each_fault_is_found(breaks: Callable[[Object], None]) -> None:
    """One change that would hurt somebody."""
    pod = good()
    breaks(pod)
    with pytest.raises((AssertionError, KeyError)):
        asked(pod)


def test_the_index_leads_to_every_guide() -> None:
    linked = set(re.findall(r"\]\(([a-z-]+\.md)", (GUIDES / "index.md").read_text(encoding="utf-8")))
    assert {path.name for path in GUIDES.glob("*.md")} - {"index.md"} <= linked


@pytest.mark.parametrize("name", ["production-stack", "llm-d", "kserve", "leaderworkerset", "ray"])
def test_each_guide_installs_verifies_upgrades_and_removes(name: str) -> None:
    text = page(name)
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [each for each in ("Verify", "Upgrade", "Remove", "What is tested") if each not in headings] == []
    assert "kubectl -n models exec" in text
    assert re.search(r"highwater (check|status)$", text, re.MULTILINE)
    assert re.search(r"No (cluster|Ray)", text.rpartition("## What is tested")[2])
