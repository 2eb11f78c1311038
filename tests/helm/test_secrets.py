"""Secrets: made once, kept, named and never shown."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import yaml
from helm_python import Config

from tests.helm.chart import (
    CI_FILES,
    LEAST,
    NAMESPACE,
    RELEASE,
    Object,
    chart,
    ci_values,
    container,
    containers,
    env,
    freshly_rendered,
    kinds,
    merged,
    pod,
    pods,
    the,
    volume,
)
from tests.helm.cluster import cluster

BOTH = {"engine": {"apiKey": {"enabled": True}}}


def decoded(secret: Object) -> dict[str, str]:
    return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}


def secret_in(url: str, values: Object) -> Object:
    """As an upgrade renders it in that cluster."""
    with Config(kube_apiserver=url, kube_token="none", namespace=NAMESPACE, storage_driver="memory") as config:
        rendered = config.render(chart(), merged(LEAST, values), name=RELEASE, namespace=NAMESPACE, is_upgrade=True)
    return next(yaml.safe_load(text) for name, text in rendered.items() if name.endswith("/secret.yaml"))


def test_a_token_is_made_that_the_sidecar_takes() -> None:
    rendered = [each for _ in range(2) for each in freshly_rendered({}) if each["kind"] == "Secret"]
    first, second = (decoded(each)["admin-token"] for each in rendered)
    assert first != second
    assert len(first) == 40
    assert first.isalnum()


def test_an_upgrade_keeps_the_generated_token() -> None:
    made = the("Secret", {})
    with cluster({f"{NAMESPACE}/{made['metadata']['name']}": made}) as url:
        upgraded = secret_in(url, BOTH)
    assert upgraded["data"]["admin-token"] == made["data"]["admin-token"]
    assert len(decoded(upgraded)["api-key"]) == 40


def test_the_first_installation_into_a_cluster_makes_one() -> None:
    with cluster({}) as url:
        assert len(decoded(secret_in(url, {}))["admin-token"]) == 40


def test_existing_secrets_are_named_and_none_is_made() -> None:
    values = ci_values("statefulset-values.yaml")
    assert "Secret" not in kinds(values)
    each = pod(values)
    token = volume(each, "highwater-admin")["secret"]
    key = env(container(each, "vllm"))["VLLM_API_KEY"]
    assert (token["secretName"], token["items"]) == ("operators", [{"key": "highwater", "path": "token"}])
    assert key == {"secretKeyRef": {"name": "engine-key", "key": "key"}}


def test_without_a_secret_each_pod_makes_a_token_of_its_own() -> None:
    values = {"adminToken": {"enabled": False}}
    each = pod(values)
    sidecar = container(each, "highwater")
    assert "HIGHWATER_ADMIN_TOKEN" not in env(sidecar)
    (mount,) = [mount for mount in sidecar["volumeMounts"] if mount["name"] == "highwater-admin"]
    assert env(sidecar)["HIGHWATER_ADMIN_TOKEN_FILE"] == f"{mount['mountPath']}/token"
    assert not mount.get("readOnly", False)
    (volume,) = [volume for volume in each["spec"]["volumes"] if volume["name"] == "highwater-admin"]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert "highwater-admin" not in json.dumps(container(each, "vllm"))
    assert "Secret" not in kinds(values)


def test_a_file_of_ones_own_holds_the_token() -> None:
    """As a driver for secrets mounts it: nothing is made beside it."""
    values = {"adminToken": {"enabled": False}, "config": {"admin_token_file": "/mnt/secrets/token"}}
    each = pod(values)
    assert env(container(each, "highwater"))["HIGHWATER_ADMIN_TOKEN_FILE"] == "/mnt/secrets/token"
    assert "highwater-admin" not in json.dumps(each)


def test_the_engine_never_has_the_admin_token() -> None:
    names = [name for name in env(container(pod(BOTH), "vllm")) if name.startswith("HIGHWATER_")]
    assert names == ["HIGHWATER_RECORDER_DIR"]
    assert "admin-token" not in json.dumps(container(pod(BOTH), "vllm"))


@pytest.mark.parametrize("name", CI_FILES)
def test_no_value_renders_a_secret_in_clear_text_into_an_argument(name: str) -> None:
    values = merged(ci_values(name), {} if name == "attach-values.yaml" else BOTH)
    for each in pods(values):
        for one in containers(each):
            sources: dict[str, Any] = {k: v for k, v in env(one).items() if k.endswith(("_TOKEN", "_KEY"))}
            assert all(isinstance(source, dict) and "secretKeyRef" in source for source in sources.values())
            assert not [text for text in one.get("args", []) if "key" in text or "token" in text.replace("tokens", "")]
