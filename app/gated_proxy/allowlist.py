"""The list of requests that may go on to the engine, decided from method and path alone. Pure.

The engine's control endpoints share a port with its inference API, and ``--api-key`` covers only some path prefixes
(vLLM ``serve/middleware/authenticate.py``), so this list is what stands between a client and ``/collective_rpc``. It
never repairs a path: a doubtful path is refused, because the engine sees it exactly as the client wrote it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

SETTING = "proxy.extra_paths"
ROOT_PATH_SETTING = "engine_root_path"
NO_ROOT_PATH = "/"  # the setting's value for an engine without one

# What OpenAI's clients send and vLLM's routers and plugins serve; OPTIONS is for browsers (CORS).
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# RFC 9110 9.2.1, without TRACE, which is not proxied.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

INFERENCE_PREFIXES = ("/v1/", "/v2/", "/inference/", "/cohere/")

OPEN_PATHS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/health",
        "/ping",
        "/load",
        "/version",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/openapi.json",
        "/pooling",
        "/classify",
        "/score",
        "/rerank",
        "/generative_scoring",
    }
)

READ_ONLY_PATHS = frozenset({"/is_sleeping", "/is_paused"})
# The engine's own, where the sidecar's own are on another port.
METRICS = "/metrics"

# Endpoints of vLLM 0.11 to 0.33 that steer the engine, load its weights, show its configuration with the tokens in it
# (/server_info, which the sidecar serves itself), or run inference outside every guarded prefix (/invocations). An
# operator may open one by its exact name; a prefix never opens them. Outside the prefixes above what is not listed is
# refused anyway.
CONTROL_PATHS = frozenset(
    {
        "/abort_requests",
        "/finish_weight_update",
        "/get_world_size",
        "/inference/v1/abort_requests",
        "/init_weight_transfer_engine",
        "/invocations",
        "/is_scaling_elastic_ep",
        "/kv_event_sources",
        "/metrics",
        "/pause",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/scale_elastic_ep",
        "/server_info",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_profile",
        "/start_weight_update",
        "/stop_profile",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
        "/weight_info",
    }
)
CONTROL_PREFIX = "/fault_tolerance/"
# Where the refusal needs a reason: this path is part of the inference API too (/inference/v1/abort_requests), but ends
# whatever request it names, whichever client sent it; without names, and outside that prefix, every request.
_REASONS = {"/abort_requests": "it ends other clients' requests"}

# Runs any method of the workers, and one that raises breaks the engine's RPC queues permanently: no setting opens it.
NEVER = "collective_rpc"

# What RFC 3986 lets a path hold (pchar and "/"), less ";": some routers strip path parameters, others keep them.
_PATH = re.compile(rb"/(?:[A-Za-z0-9._~!$&'()*+,=:@/-]|%[0-9A-Fa-f]{2})*")
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\\;]")
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")


class RequestPath(NamedTuple):
    """The path of one request, percent-decoded once; `read_path` makes it."""

    raw: bytes  # as sent
    decoded: str
    flaw: str | None  # the reason why its form is refused; None where it is not


def read_path(raw: bytes) -> RequestPath:
    unquoted = unquote_to_bytes(raw)
    decoded = unquoted.decode("utf-8", "replace")
    # The engine decodes once. A decoder behind it must not find a second meaning: hence no double encoding.
    flaws = (
        (
            not _PATH.fullmatch(raw),
            "it must start with '/' and hold only the characters of an RFC 3986 path, without ';'",
        ),
        ("\ufffd" in decoded and decoded.encode() != unquoted, "its percent escapes are not UTF-8"),
        (_HIDDEN.search(decoded), "a percent escape hides a backslash, a semicolon or a control character"),
        ("//" in decoded, "it has an empty segment"),
        ("." in decoded and not {".", ".."}.isdisjoint(decoded.split("/")), "it has a '.' or '..' segment"),
        ("%" in decoded and _ESCAPE.search(decoded), "it is percent-encoded twice"),
    )
    return RequestPath(raw, decoded, next((flaw for found, flaw in flaws if found), None))


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """A request refused with an HTTP status and a sentence for the client, or admitted: ``route`` has no root path."""

    admitted: bool
    status: int = 200
    reason: str = ""
    route: str = ""


def _refused(status: int, reason: str) -> RouteDecision:
    return RouteDecision(admitted=False, status=status, reason=reason)


@dataclass(frozen=True, slots=True)
class AllowList:
    """Decides by a table of admitted paths; ValueError: an entry could never match, or no entry may open its path.

    An engine that was started with a root path (vLLM's ``--root-path``) serves every route below that path as well, its
    control endpoints included. So a path below it is looked up without it, in the same table.

    Args:
        extra_paths: Paths that the operator adds. An entry that ends in ``/`` is one more place where clients find the
            API: below it passes what would pass without it. Any other entry admits exactly itself, and so opens control
            endpoints too; ``/collective_rpc`` opens by none.
        root_path: The engine's root path as the operator set it.
        unset_root_path: The engine's root path as it last reported it, where the operator set none: nothing below it
            passes except by an entry in ``extra_paths``.
        knows_root_path: True if it is certain which root path the engine has, or that it has none. While it is not, a
            path that would be a control endpoint below some root path is refused.
        has_metrics: True if the engine's ``/metrics`` can be read.
    """

    extra_paths: tuple[str, ...] = ()
    root_path: str | None = None
    unset_root_path: str | None = None
    knows_root_path: bool = False
    has_metrics: bool = False

    def __post_init__(self) -> None:
        for entry in self.extra_paths:
            if flaw := extra_path_flaw(entry):
                raise ValueError(f"{SETTING}: {flaw}")

    def decide(self, method: str, path_sent: RequestPath) -> RouteDecision:
        """Decide about one request by its method, in capitals, and its path. A WebSocket's handshake is a GET."""
        if path_sent.flaw:
            return _refused(400, f"the request path is malformed: {path_sent.flaw}")
        path, decoded = path_sent.raw.decode("ascii"), path_sent.decoded
        if _is_never(decoded):
            return _refused(403, f"/{NEVER} is never proxied, and {SETTING} cannot allow it")
        if method not in METHODS:
            return _refused(501, f"method {method} is not proxied; these are: {', '.join(sorted(METHODS))}")
        if self._is_named(path):
            return RouteDecision(admitted=True, route=_below(self.root_path, decoded) or decoded)
        return self._decide_below_root_path(method, path, decoded)

    def _decide_below_root_path(self, method: str, path: str, decoded: str) -> RouteDecision:
        root_path = self.root_path or self.unset_root_path
        below = _below(root_path, decoded)
        if below is None:
            return self._look_up(method, path, decoded)
        if self.root_path is None and f"{root_path}/" not in self.extra_paths:
            return _refused(
                403,
                f"{decoded} is below the engine's root path (vLLM's --root-path), and {ROOT_PATH_SETTING} is not set; "
                f"with {ROOT_PATH_SETTING}={root_path} it is looked up without that prefix",
            )
        # A prefix hidden in escapes is a prefix for the engine, which decodes, and not for the table.
        return self._look_up(method, _below(root_path, path) or "", below)

    def _is_named(self, path: str) -> bool:
        return path in self.extra_paths and not path.endswith("/")

    def _look_up(self, method: str, path: str, decoded: str) -> RouteDecision:
        # Looked up without a prefix, a control path of several segments may be none.
        prefixes = () if _is_control(decoded) else self.extra_paths
        for entry in prefixes:
            if entry.endswith("/") and path.startswith(entry):
                at = len(entry) - 1
                decision = self._look_up_plain(method, path[at:], decoded[at:])
                if decision.admitted:
                    return decision
        return self._look_up_plain(method, path, decoded)

    def _look_up_plain(self, method: str, path: str, decoded: str) -> RouteDecision:
        # The literal path must match, so that %2F cannot build a prefix; the decoded one must not be a control path.
        if self._is_named(path):
            return RouteDecision(admitted=True, route=decoded)
        if self.has_metrics and path == METRICS and method in ("GET", "HEAD"):
            return RouteDecision(admitted=True, route=decoded)
        control = self._why_control(method, decoded)
        if control is not None:
            return _refused(403, f"{decoded} {control}")
        if decoded in READ_ONLY_PATHS and method not in ("GET", "HEAD"):
            return _refused(
                403, f"{decoded} can be read only, with GET or HEAD; {SETTING} can allow it by that exact name"
            )
        if path in OPEN_PATHS or path in READ_ONLY_PATHS or path.startswith(INFERENCE_PREFIXES):
            return RouteDecision(admitted=True, route=decoded)
        return _refused(404, f"{decoded} is not on the proxy's allow list; {SETTING} can add it")

    def _why_control(self, method: str, decoded: str) -> str | None:
        if _is_control(decoded):
            because = _REASONS.get(_last_segment(decoded), "")
            return (
                f"is one of the engine's control paths{because and f' ({because})'}; "
                f"{SETTING} can allow it by that exact name"
            )
        if self.knows_root_path or not _may_be_control(method, decoded):
            return None
        return (
            "could be one of the engine's control paths, below a root path that is not known here; set "
            f"{ROOT_PATH_SETTING} to vLLM's --root-path, or to {NO_ROOT_PATH} where it has none"
        )


def _below(prefix: str | None, path: str) -> str | None:
    if prefix is None or not path.startswith(f"{prefix}/"):
        return None
    return path[len(prefix) :]


def extra_path_flaw(entry: str) -> str | None:
    """Return why an entry of ``extra_paths`` could never match, or may not be opened; None where neither is so."""
    flaw = read_path(entry.encode()).flaw or ("percent escapes cannot match" if "%" in entry else None)
    if flaw:
        return f"{flaw}; an entry is a plain path such as '/invocations'"
    return f"/{NEVER} is never proxied" if _is_never(entry) else None


def root_path_flaw(root_path: str) -> str | None:
    if root_path == NO_ROOT_PATH:
        return None
    if root_path.endswith("/"):
        return "must not end in '/': vLLM would serve nothing below it"
    if "%" in root_path or read_path(root_path.encode()).flaw:
        return "must be a plain path such as '/llm'"
    return None


def _is_never(decoded: str) -> bool:
    # Anywhere in the path, because of --root-path. In any case of letters: a proxy before the engine may ignore case.
    lowered = decoded.lower()
    return NEVER in lowered and NEVER in lowered.split("/")


def _is_control(decoded: str) -> bool:
    path = decoded.lower().rstrip("/")
    return path in CONTROL_PATHS or f"{path}/".startswith(CONTROL_PREFIX)


def _may_be_control(method: str, decoded: str) -> bool:
    """Return whether a path would be a control endpoint below some root path.

    Below one of a single segment (``--root-path /v1``) for every method. Safe methods are not checked for a longer one:
    further down it may be the name of a model.
    """
    if _is_control(decoded[decoded.find("/", 1) :]):
        return True
    ends_so = _last_segment(decoded) in CONTROL_PATHS or CONTROL_PREFIX in f"{decoded.lower().rstrip('/')}/"
    return ends_so and method not in SAFE_METHODS


def _last_segment(decoded: str) -> str:
    path = decoded.lower().rstrip("/")
    return path[path.rfind("/") :]
