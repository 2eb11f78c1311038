"""Which requests may travel on to the engine, decided from method and raw path alone.

The engine's control endpoints share a port with its inference API, and ``--api-key`` covers only some path prefixes
(vLLM ``serve/middleware/authenticate.py``), so this list is what stands between a client and ``/collective_rpc``. It
is pure: no I/O, no logging, no knowledge of who asks. It refuses to repair a path; what is not plainly fine is turned
away, because the engine sees the path exactly as the client wrote it.
"""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote_to_bytes

Kind = Literal["http", "websocket"]

SETTING = "proxy.extra_paths"

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
    }
)

READ_ONLY_PATHS = frozenset({"/is_sleeping", "/is_paused"})

# Endpoints of vLLM 0.11 to 0.33 that steer the engine, load its weights, show its configuration with the tokens in it
# (/server_info, which the sidecar serves itself), or run inference outside every guarded prefix (/invocations). An
# operator may open one by its exact name; a prefix never opens them.
CONTROL_PATHS = frozenset(
    {
        "/abort_requests",
        "/finish_weight_update",
        "/get_world_size",
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
        "/sleep",
        "/start_profile",
        "/start_weight_update",
        "/stop_profile",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
        "/weight_info",
    }
)
CONTROL_PREFIX = "/fault_tolerance/"

_READING = frozenset({"GET", "HEAD", "OPTIONS"})

# Runs any method of the workers, and one that raises breaks the engine's RPC queues for good: no setting opens it.
NEVER = "collective_rpc"

# What RFC 3986 lets a path hold (pchar and "/"), less ";": some routers strip path parameters, others keep them.
_PATH = re.compile(rb"/(?:[A-Za-z0-9._~!$&'()*+,=:@/-]|%[0-9A-Fa-f]{2})*")
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\\;]")
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Admitted, or refused with the HTTP status and the sentence that tells the client why."""

    admitted: bool
    status: int = 200
    reason: str = ""


_ADMITTED = Verdict(admitted=True)


def _refused(status: int, reason: str) -> Verdict:
    return Verdict(admitted=False, status=status, reason=reason)


@dataclass(frozen=True, slots=True)
class AllowList:
    """The table of admitted paths.

    Args:
        extra_prefixes: what the operator adds. An entry that ends in ``/`` admits everything under it, any other entry
            exactly itself. Control endpoints open only by an exact entry, ``/collective_rpc`` by none.

    Raises:
        ValueError: an entry could never match, or asks for what no entry may open.
    """

    extra_prefixes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for entry in self.extra_prefixes:
            flaw = _flaw(entry.encode()) or ("percent escapes cannot match" if "%" in entry else None)
            if flaw:
                raise ValueError(f"{SETTING}: {entry!r}: {flaw}; an entry is a plain path such as '/invocations'")
            if _is_never(entry):
                raise ValueError(f"{SETTING}: {entry!r}: /{NEVER} is never proxied")

    def judge(self, method: str, raw_path: bytes, kind: Kind) -> Verdict:
        """Judge one request.

        Args:
            method: as sent, in capitals.
            raw_path: the path as sent, percent escapes kept, without the query.
            kind: a WebSocket handshake counts as a GET.
        """
        flaw = _flaw(raw_path)
        if flaw:
            return _refused(400, f"the request path is malformed: {flaw}")
        decoded = unquote_to_bytes(raw_path).decode()
        if _is_never(decoded):
            return _refused(403, f"/{NEVER} is never proxied, and {SETTING} cannot allow it")
        if method in ("CONNECT", "TRACE"):
            return _refused(403, f"method {method} is never proxied, and {SETTING} cannot allow it")
        return self._look_up("GET" if kind == "websocket" else method, raw_path.decode("ascii"), decoded)

    def _look_up(self, method: str, path: str, decoded: str) -> Verdict:
        # The literal path must match, so that %2F cannot build a prefix; the decoded one must not be a control path.
        if path in self.extra_prefixes:
            return _ADMITTED
        if _is_control(decoded) or (method not in _READING and _ends_as_control(decoded)):
            return _refused(
                403, f"{decoded} is one of the engine's control paths; {SETTING} can allow it by that exact name"
            )
        if decoded in READ_ONLY_PATHS and method not in ("GET", "HEAD"):
            return _refused(
                403, f"{decoded} can be read only, with GET or HEAD; {SETTING} can allow it by that exact name"
            )
        if path in OPEN_PATHS or path in READ_ONLY_PATHS or path.startswith(INFERENCE_PREFIXES):
            return _ADMITTED
        if any(path.startswith(entry) for entry in self.extra_prefixes if entry.endswith("/")):
            return _ADMITTED
        return _refused(404, f"{decoded} is not on the proxy's allow list; {SETTING} can add it")


def _flaw(raw_path: bytes) -> str | None:
    """Say what is wrong with the path's form, or None."""
    if not _PATH.fullmatch(raw_path):
        return "it must start with '/' and hold only the characters of an RFC 3986 path, without ';'"
    try:
        path = unquote_to_bytes(raw_path).decode()
    except UnicodeDecodeError:
        return "its percent escapes are not UTF-8"
    # The engine decodes once. Whatever stands behind it must not find a second meaning: hence no double encoding.
    flaws = (
        (_HIDDEN.search(path), "a percent escape hides a backslash, a semicolon or a control character"),
        ("//" in path, "it has an empty segment"),
        ("." in path and not {".", ".."}.isdisjoint(path.split("/")), "it has a '.' or '..' segment"),
        ("%" in path and _ESCAPE.search(path), "it is percent-encoded twice"),
    )
    return next((flaw for found, flaw in flaws if found), None)


def _is_never(decoded: str) -> bool:
    # Wherever it stands: an engine started with --root-path also answers below that prefix. In any case of letters:
    # the engine tells them apart, and what stands before it may not.
    lowered = decoded.lower()
    return NEVER in lowered and NEVER in lowered.split("/")


def _is_control(decoded: str) -> bool:
    """Tell whether a decoded path is a control endpoint, also one level down, as ``--root-path /v1`` would have it."""
    path = decoded.lower().rstrip("/")
    below = path[path.find("/", 1) :]
    return (
        path in CONTROL_PATHS
        or below in CONTROL_PATHS
        or decoded.lower().startswith(CONTROL_PREFIX)
        or below.startswith(CONTROL_PREFIX)
        or path == CONTROL_PREFIX[:-1]
    )


def _ends_as_control(decoded: str) -> bool:
    """Tell whether a control endpoint stands at the path's end, as a longer ``--root-path`` would have it.

    What only reads may be called so further down: there it is the name of a model.
    """
    path = decoded.lower().rstrip("/")
    return path[path.rfind("/") :] in CONTROL_PATHS or CONTROL_PREFIX in f"{path}/"
