"""Kubernetes' own schemas, strictly: those of the newest three versions, each read once."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate import utils as known
from packaging.version import Version
from referencing import Registry, Resource

NEWEST = sorted(set(known.all_versions()), key=Version)[-3:]


@cache
def _definitions(version: str) -> Resource[Any]:
    """A megabyte, which the library would read again for each object."""
    text = known.schema_contents(f"kubernetes-json-schema/v{version}-local-strict/_definitions.json", version)
    return Resource.from_contents(text)


@cache
def _judge_of(kind: str, api_version: str, version: str) -> Draft202012Validator:
    """The schema of a kind, as `kubernetes_validate.validate` takes it."""
    group = api_version.replace(".k8s.io", "").replace("/", "-")
    schema = known.schema_contents(
        f"kubernetes-json-schema/v{version}-local-strict/{kind.lower()}-{group}.json", version
    )
    registry = _definitions(version) @ (Resource.from_contents(schema) @ Registry())
    return Draft202012Validator(schema, registry=registry.crawl())


@cache
def _validate(text: str, version: str) -> None:
    each = json.loads(text)
    _judge_of(each["kind"], each["apiVersion"], version).validate(each)


def validate(each: dict[str, Any], *versions: str) -> None:
    """Look at an object with these versions' schemas, or with all three; at the same one only once."""
    text = json.dumps(each, sort_keys=True)
    for version in versions or NEWEST:
        _validate(text, version)
