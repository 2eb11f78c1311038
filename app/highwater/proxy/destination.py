"""The destination of a request, and the few words for its path and method in logs and metrics. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from highwater.proxy import allowlist
from highwater.proxy.failures import Failure
from highwater.proxy.traffic import HEALTH

# These cannot reach the model: they pass the gate uncounted, because liveness must not wait for a reset.
SAFE_METHODS = frozenset(method.encode() for method in allowlist.SAFE_METHODS)
_METHODS = {name.encode(): name for name in allowlist.METHODS}

_PATH_CLASSES = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/realtime": "realtime",
    "/v1/models": "models",
    "/tokenize": "tokenize",
    "/detokenize": "tokenize",
    "/health": HEALTH,
    "/ping": HEALTH,
}
_PATH_CLASS_PREFIXES = (
    ("/v1/models/", "models"),
    ("/v1/responses/", "responses"),
    ("/v1/audio/", "audio"),
    ("/v1/", "other_v1"),
    ("/v2/", "other_v2"),
)


@dataclass(frozen=True, slots=True)
class Destination:
    to: Literal["engine", "sidecar", "nowhere"]
    path_class: str = "other"
    refusal: Failure | None = None


LIVE_STREAM = "live_stream"  # the path class of a sidecar path whose response does not end by itself


def path_class(path: str) -> str:
    """Name a decoded path with one of a few words, as a metric's label."""
    known = _PATH_CLASSES.get(path)
    return known or next((name for prefix, name in _PATH_CLASS_PREFIXES if path.startswith(prefix)), "other")


def method_class(method: bytes) -> str:
    return _METHODS.get(method, "other")
