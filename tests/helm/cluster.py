"""A cluster's API as far as Helm's `lookup` asks it: discovery, and Secrets. There is no other that runs here."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

from tests.helm.server import answering

RESOURCES = {
    "kind": "APIResourceList",
    "groupVersion": "v1",
    "resources": [{"name": "secrets", "namespaced": True, "kind": "Secret", "verbs": ["get", "list"]}],
}


def answer(path: str, secrets: dict[str, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Status and body of a GET; `secrets` by `namespace/name`."""
    path = path.partition("?")[0]
    if path == "/version":
        return 200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return 200, {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
    if path == "/api/v1":
        return 200, RESOURCES
    parts = path.split("/")
    if parts[:4] == ["", "api", "v1", "namespaces"] and len(parts) == 7 and parts[5] == "secrets":
        found = secrets.get(f"{parts[4]}/{parts[6]}")
        if found is not None:
            return 200, found
    return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def cluster(secrets: dict[str, dict[str, Any]]) -> AbstractContextManager[str]:
    """The URL of one that has these Secrets."""

    def answered(path: str) -> tuple[int, str]:
        status, body = answer(path, secrets)
        return status, json.dumps(body)

    return answering(answered)
