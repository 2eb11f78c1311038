"""Decides where each request goes.

::

    one port       Front         the sidecar's paths win, and the allow list decides about all others
    data port      Front         the allow list decides; none of the sidecar's paths
    control port   ControlFront  the sidecar's paths, and nothing for the engine
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gated_proxy import allowlist
from gated_proxy.allowlist import METRICS, NO_ROOT_PATH, ROOT_PATH_SETTING, AllowList, read_path
from gated_proxy.failures import Failure
from gated_proxy.traffic import HEALTH

BAD_REQUEST, NOT_FOUND = 400, 404
# Labels of refusals; any other status is that of a path that is not on the allow list.
_REFUSAL_REASONS = {BAD_REQUEST: "bad_request", 403: "forbidden"}
DATA_PORT_HINT = ". The sidecar's own paths are on its control port (control_port)"
PATH_BYTES_REMEMBERED = 256
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


@dataclass(frozen=True, slots=True)
class SidecarPaths:
    """The sidecar's own paths: exact ones, and prefixes; the response to a live one does not end by itself.

    What the engine's allow list does not have below ``folders``, only the sidecar could have: it says what it has.
    ``hint`` is a sentence for first-time users, with curl and no documentation, behind a refusal.
    """

    exact: frozenset[str]
    prefixes: tuple[str, ...] = ()
    live: frozenset[str] = frozenset()
    folders: tuple[str, ...] = ()
    hint: str = ""

    def __contains__(self, path: str) -> bool:
        return path in self.exact or path.startswith(self.prefixes)


class Front:
    """Decides where each request goes on a port that requests for the engine come to.

    Where the sidecar ``has_control_port``, its own paths are refused here, whatever the allow list says, and the
    engine's own metrics can be read.
    """

    def __init__(self, sidecar_paths: SidecarPaths, allowed: AllowList, *, has_control_port: bool = False) -> None:
        self._sidecar_paths = sidecar_paths
        self._allowed = replace(allowed, has_metrics=has_control_port, knows_root_path=allowed.root_path is not None)
        self._has_control_port = has_control_port
        self._remembered = lru_cache(maxsize=1024)(self._decide)

    def learn_root_path(self, root_path: str | None) -> str | None:
        """Use the engine's root path where the setting names none, and return what is wrong with the setting.

        ``root_path`` is empty where the engine has none; None where it does not report it, or where it may have been
        restarted with another since.
        """
        is_set, was_known = self._allowed.root_path, self._allowed.knows_root_path
        is_known = is_set is not None and was_known if root_path is None else is_set in (None, root_path)
        allowed = replace(self._allowed, knows_root_path=is_known)
        if is_set is None and root_path is not None:
            allowed = replace(allowed, unset_root_path=root_path or None)
        if allowed != self._allowed:
            self._allowed = allowed
            self._remembered.cache_clear()
        if root_path is None or root_path == (is_set or ""):
            return None
        if is_set is None:
            return (
                f"the engine has the root path {root_path} (vLLM's --root-path), and {ROOT_PATH_SETTING} is not set: "
                f"nothing below it is proxied; set {ROOT_PATH_SETTING}={root_path}"
            )
        has = f"has the root path {root_path}" if root_path else "has no root path"
        is_set = is_set or NO_ROOT_PATH
        return f"{ROOT_PATH_SETTING} is {is_set}, and the engine {has} (vLLM's --root-path): set it to the same"

    def __call__(self, method: bytes, raw_path: bytes, websocket: bool) -> Destination:
        if len(raw_path) > PATH_BYTES_REMEMBERED:
            return self._decide(method, raw_path, websocket)
        return self._remembered(method, raw_path, websocket)

    def _decide(self, method: bytes, raw_path: bytes, websocket: bool) -> Destination:
        path = read_path(raw_path)
        if path.decoded in self._sidecar_paths:
            # As a WebSocket neither: the engine may read such a handshake as an ordinary GET.
            if self._has_control_port and path.decoded != METRICS:
                return _refused(NOT_FOUND, f"{path.decoded} is not served on this port{DATA_PORT_HINT}")
            if not (self._has_control_port or websocket):
                return _to_sidecar(path.decoded, self._sidecar_paths)
        decision = self._allowed.decide(method.decode(), path)
        if decision.admitted:
            return Destination("engine", path_class(decision.route))
        may_be_own = decision.status == NOT_FOUND and not (self._has_control_port or websocket)
        if may_be_own and path.decoded.startswith(self._sidecar_paths.folders):
            return _to_sidecar(path.decoded, self._sidecar_paths)
        hint = DATA_PORT_HINT if self._has_control_port else self._sidecar_paths.hint
        return _refused(decision.status, decision.reason + (hint if decision.status == NOT_FOUND else ""))


class ControlFront:
    """Decides where each request goes on a port that serves the control plane alone.

    Its refusals say where the engine's paths are served (``elsewhere``).
    """

    def __init__(self, sidecar_paths: SidecarPaths, elsewhere: str) -> None:
        self._sidecar_paths = sidecar_paths
        self._elsewhere = elsewhere

    def __call__(self, method: bytes, raw_path: bytes, websocket: bool) -> Destination:
        del method
        path = read_path(raw_path)
        if path.flaw:
            return _refused(BAD_REQUEST, f"the request path is malformed: {path.flaw}")
        is_own = path.decoded in self._sidecar_paths or path.decoded.startswith(self._sidecar_paths.folders)
        if is_own and not websocket:
            return _to_sidecar(path.decoded, self._sidecar_paths)
        hint = self._sidecar_paths.hint
        return _refused(NOT_FOUND, f"{path.decoded} is not served on this port, {self._elsewhere}{hint}")


def _to_sidecar(path: str, paths: SidecarPaths) -> Destination:
    return Destination("sidecar", LIVE_STREAM if path in paths.live else "other")


def _refused(status: int, message: str) -> Destination:
    return Destination("nowhere", refusal=Failure(status, _REFUSAL_REASONS.get(status, "not_admitted"), message))
