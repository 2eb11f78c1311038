"""Decides where each request goes.

::

    one port       Front         the sidecar's paths win, and the allow list decides about all others
    data port      Front         the allow list decides; none of the sidecar's paths
    control port   ControlFront  the sidecar's paths, and nothing for the engine
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from highwater.proxy.allowlist import METRICS, NO_ROOT_PATH, ROOT_PATH_SETTING, AllowList, read_path
from highwater.proxy.destination import LIVE_STREAM, Destination, path_class
from highwater.proxy.failures import Failure

BAD_REQUEST, NOT_FOUND = 400, 404
# Labels of refusals; any other status is that of a path that is not on the allow list.
_REFUSAL_REASONS = {BAD_REQUEST: "bad_request", 403: "forbidden"}
SIDECAR_PATHS_HINT = ". The sidecar's own: /memory, /dashboard, /metrics, /policy, /readyz, /docs/runbooks/"
DATA_PORT_HINT = ". The sidecar's own paths are on its control port (control_port)"
PATH_BYTES_REMEMBERED = 256
# What the engine's allow list does not have below these, only the sidecar could have: it says what it has.
_SIDECAR_FOLDERS = ("/dashboard/", "/docs/", "/memory/", "/policy/")


@dataclass(frozen=True, slots=True)
class SidecarPaths:
    """The sidecar's own paths: exact ones, and prefixes; the response to a live one does not end by itself."""

    exact: frozenset[str]
    prefixes: tuple[str, ...] = ()
    live: frozenset[str] = frozenset()

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
        if may_be_own and path.decoded.startswith(_SIDECAR_FOLDERS):
            return _to_sidecar(path.decoded, self._sidecar_paths)
        # For first-time users, with curl and no documentation.
        hint = DATA_PORT_HINT if self._has_control_port else SIDECAR_PATHS_HINT
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
        is_own = path.decoded in self._sidecar_paths or path.decoded.startswith(_SIDECAR_FOLDERS)
        if is_own and not websocket:
            return _to_sidecar(path.decoded, self._sidecar_paths)
        return _refused(NOT_FOUND, f"{path.decoded} is not served on this port, {self._elsewhere}{SIDECAR_PATHS_HINT}")


def _to_sidecar(path: str, paths: SidecarPaths) -> Destination:
    return Destination("sidecar", LIVE_STREAM if path in paths.live else "other")


def _refused(status: int, message: str) -> Destination:
    return Destination("nowhere", refusal=Failure(status, _REFUSAL_REASONS.get(status, "not_admitted"), message))
