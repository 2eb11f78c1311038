"""Decides where each request goes: the sidecar's paths win, and the allow list decides about all others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from highwater.proxy.allowlist import ROOT_PATH_SETTING, AllowList, read_path
from highwater.proxy.failures import Failure
from highwater.proxy.heads import LIVE_STREAM, Destination, path_class

NOT_FOUND = 404
# Labels of the allow list's refusals; any other status is that of a path that is not on it.
_REFUSAL_REASONS = {400: "bad_request", 403: "forbidden"}
SIDECAR_PATHS_HINT = ". The sidecar's own: /memory, /dashboard, /metrics, /policy, /readyz"
PATH_BYTES_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class SidecarPaths:
    """The paths that the sidecar serves itself.

    Attributes:
        exact: Served as they are.
        prefixes: Served with everything below them: paths with a part that varies.
        live: Of them, those whose response does not end by itself.
    """

    exact: frozenset[str]
    prefixes: tuple[str, ...] = ()
    live: frozenset[str] = frozenset()

    def __contains__(self, path: str) -> bool:
        return path in self.exact or path.startswith(self.prefixes)


class Front:
    """Decides where each request goes.

    Args:
        sidecar_paths: The paths that the control plane serves.
        allowed: Decides about all others.
    """

    def __init__(self, sidecar_paths: SidecarPaths, allowed: AllowList) -> None:
        self._sidecar_paths = sidecar_paths
        self._allowed = allowed
        self._remembered = lru_cache(maxsize=1024)(self._decide)

    def learn_root_path(self, root_path: str | None) -> str | None:
        """Compare the engine's root path with the setting, and use it where no setting names one.

        Args:
            root_path: As the engine reports it: empty where it has none; None where it does not report it.

        Returns:
            What is wrong with the setting; None where nothing is.
        """
        if root_path is None:
            return None
        is_set = self._allowed.root_path
        if is_set is None and (root_path or None) != self._allowed.unset_root_path:
            self._allowed = replace(self._allowed, unset_root_path=root_path or None)
            self._remembered.cache_clear()
        if root_path == (is_set or ""):
            return None
        if is_set is None:
            return (
                f"the engine has the root path {root_path} (vLLM's --root-path), and {ROOT_PATH_SETTING} is not set: "
                f"nothing below it is proxied; set {ROOT_PATH_SETTING}={root_path}"
            )
        has = f"has the root path {root_path}" if root_path else "has no root path"
        return f"{ROOT_PATH_SETTING} is {is_set}, and the engine {has} (vLLM's --root-path): set it to the same"

    def __call__(self, method: bytes, raw_path: bytes, websocket: bool) -> Destination:
        """Return the destination of one request."""
        if len(raw_path) > PATH_BYTES_REMEMBERED:
            return self._decide(method, raw_path, websocket)
        return self._remembered(method, raw_path, websocket)

    def _decide(self, method: bytes, raw_path: bytes, websocket: bool) -> Destination:
        path = read_path(raw_path)
        if not websocket and path.decoded in self._sidecar_paths:
            return Destination("sidecar", LIVE_STREAM if path.decoded in self._sidecar_paths.live else "other")
        decision = self._allowed.decide(method.decode(), path)
        if decision.admitted:
            return Destination("engine", path_class(decision.route))
        # For first-time users, with curl and no documentation.
        hint = SIDECAR_PATHS_HINT if decision.status == NOT_FOUND else ""
        reason = _REFUSAL_REASONS.get(decision.status, "not_admitted")
        return Destination("nowhere", refusal=Failure(decision.status, reason, decision.reason + hint))
