"""The doors of the control plane: who may act, HEAD as GET, and a cap on request bodies.

Control paths are for callers with the admin token, and for no others unless ``trust_loopback`` is set.
A path needs the token if its route takes an ``Admin``; of calls with a body ``ControlGuard`` knows it before that is
read.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from starlette.requests import HTTPConnection
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gated_proxy.allowlist import SAFE_METHODS
from gated_proxy.failures import error_body
from gated_proxy.heads import KEY_HEADERS
from gated_proxy.logs import LimitedLog, printable
from highwater.http.problems import CODES
from highwater.model.report import Caller, Credential
from highwater.process.admin_token import AdminToken

DenialReason: TypeAlias = Literal["no_token", "wrong_token", "closed"]
# It calls no worker and changes nothing: as open as a read. So is a dry run, where the query says that it is one.
_COMPUTES_ONLY: Final = frozenset({("POST", "/memory/plan")})
_HAS_DRY_RUN: Final = frozenset({("POST", "/memory/reclaim")})
_LOGGED_CHARACTERS: Final = 200
_CLOSED: Final = "control calls are refused: the sidecar has no usable admin token; its log says why and what to change"

# Headers that reverse proxies and service meshes add. A call through a proxy has the proxy's address.
_FORWARDED = re.compile(r"forwarded|via|x-real-ip|(?:x-forwarded|x-envoy|l5d)-.*", re.IGNORECASE)
# Istio's sidecar connects from here for every peer in the mesh, and to a plain TCP port without any such header.
_MESH = ipaddress.ip_address("127.0.0.6")
_CREDENTIALS = re.compile(rb"\r\n(?:%b):[^\r]*" % b"|".join(KEY_HEADERS), re.IGNORECASE)
_BASIC = re.compile(rb"\r\nauthorization: *basic +([A-Za-z0-9+/=]+)", re.IGNORECASE)

log = logging.getLogger("highwater.access")


@dataclass(frozen=True, slots=True)
class Denial:
    reason: DenialReason
    message: str

    @property
    def status(self) -> int:
        return 403 if self.reason == "closed" else 401

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.reason == "closed" else {"WWW-Authenticate": "Bearer"}


class Access:
    """Judges callers: who calls a control path, or the reason why the call is not let in.

    A request through a reverse proxy, or from a web page in the operator's own browser, does not count as a loopback
    peer, as far as that can be seen: a proxy on the same machine need not add a header. Hence the token. ``port`` is
    the sidecar's, for the command in messages.
    """

    def __init__(
        self,
        token: AdminToken,
        *,
        port: int,
        trust_loopback: bool = False,
        denied: Callable[[DenialReason], None] = lambda _: None,
    ) -> None:
        self._token = token
        self._trust_loopback = trust_loopback
        self._denied = denied
        self._log = LimitedLog(log)
        self._port = port

    def admitted(self, request: HTTPConnection) -> Caller:
        """Return the caller; raises HTTPException: 401 without the token or with a wrong one, 403 if none exists."""
        caller = self.judge(request)
        if isinstance(caller, Denial):
            self.report(request, caller)
            raise HTTPException(caller.status, caller.message, caller.headers)
        return caller

    def caller(self, request: HTTPConnection) -> Caller | None:
        judged = self._judge_open(request)
        return None if isinstance(judged, Denial) else judged

    def outcome(self, request: HTTPConnection) -> Credential | DenialReason:
        judged = self._judge_open(request)
        return judged.reason if isinstance(judged, Denial) else judged.by

    def _judge_open(self, request: HTTPConnection) -> Caller | Denial:
        """Judge the caller of an open path; a wrong token is reported here too: guesses must not go unseen."""
        judged = self.judge(request)
        if isinstance(judged, Denial) and judged.reason == "wrong_token":
            self.report(request, judged)
        return judged

    def judge(self, request: HTTPConnection) -> Caller | Denial:
        """Judge by the token, or else by the address where that is trusted. Reads no body."""
        token = self._token.current()
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # latin-1 is what headers are decoded with; compare_digest takes bytes of any content.
        matches = hmac.compare_digest(given.strip().encode("latin-1"), (token or "").encode())
        if token is not None and matches and scheme.lower() == "bearer":
            return Caller(peer_of(request), "token")
        if self._trust_loopback and _is_local(request):
            return Caller(peer_of(request), "loopback")
        if token is None:
            return Denial("closed", _CLOSED)
        source = self._token.source(self._port)
        path = printable(request.scope.get("raw_path") or request.url.path.encode())
        url = f"{request.url.scheme}://127.0.0.1:{self._port}{path}"
        method = "" if request.scope["method"] == "GET" else f"-X {request.scope['method']} "
        works = f"this works: curl {method}--oauth2-bearer {source} {url}"
        # The message comes as JSON, which would escape a command line's quotes; and the body of a refused call is never
        # read. Without its body a dry run would be a real one.
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        if has_body or request.url.query:
            works = (
                f"repeat the same call to {url} with the token: HIGHWATER_ADMIN_TOKEN={source} in the environment of a "
                f"highwater command, --oauth2-bearer {source} in a curl command"
            )
        problem = "this is not the admin token" if given else "this call needs the admin token"
        return Denial("wrong_token" if given else "no_token", f"{problem}. Where the sidecar runs, {works}")

    def report(self, request: HTTPConnection, denial: Denial) -> None:
        self._denied(denial.reason)
        method, path = request.scope["method"], ascii(request.scope["path"][:_LOGGED_CHARACTERS])
        peer = peer_of(request) or "an unknown peer"
        self._log.warning(denial.reason, "control call denied (%s): %s %s from %s", denial.reason, method, path, peer)

    def without_token(self, head: bytes) -> bytes:
        """Return a request's head without the admin token, which a client may send to the engine by mistake."""
        token = self._token.current()
        # Every proxied request comes here: to look for the bytes costs a tenth of a microsecond, to read lines more.
        if token is None or (token.encode() not in head and not _is_basic_credential(token, head)):
            return head
        self._log.warning(
            "misplaced_token", "a client sends the admin token with requests to the engine; it is not passed on"
        )

        def unless_it_holds(line: re.Match[bytes]) -> bytes:
            return b"" if token.encode() in line[0] or _is_basic_credential(token, line[0]) else line[0]

        without = _CREDENTIALS.sub(unless_it_holds, head)
        return without.replace(token.encode(), b"")  # in a query, a cookie or any other header


def _is_basic_credential(token: str, head: bytes) -> bool:
    if b"asic " not in head and b"ASIC " not in head:
        return False
    with suppress(ValueError):  # not base64
        return any(token.encode() in b64decode(line[1]) for line in _BASIC.finditer(head))
    return False


class HeadAsGet:
    """Passes each HEAD on as a GET, and ends the response after its headers (RFC 9110 9.1)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        has_ended = False

        async def send_head(message: Message) -> None:
            nonlocal has_ended
            if message["type"] != "http.response.body":
                await send(message)
            elif not has_ended:
                # A stream of events would not end by itself: after this the application sees a disconnect.
                has_ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)


class BodyLimit:
    """Responds with 413 once a body has grown over ``max_bytes``; nothing is parsed before it has been counted."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in {"GET", "HEAD"}:
            await self._app(scope, receive, send)
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_bytes:
                text = f"the body is over {self._max_bytes} bytes, which no control call needs"
                await JSONResponse(error_body(413, "too_large", text), 413)(scope, receive, send)
                return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)


class ControlGuard:
    """A plain ASGI class in front of all else: it refuses a call before its body is read or parsed.

    Every method but GET, HEAD and OPTIONS needs the token, except on paths that only compute and dry runs; which reads
    do, their routes know. What no route serves is a 404 or 405 of the application itself, with the token or without.
    """

    def __init__(self, app: FastAPI, access: Access, max_body_bytes: int) -> None:
        self._app = app
        self._limited = BodyLimit(app, max_body_bytes)
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = scope.get("method"), scope.get("path")
        is_dry_run = call in _HAS_DRY_RUN and scope["query_string"] == b"dry_run=true"
        is_open = scope["type"] != "http" or is_dry_run or call in _COMPUTES_ONLY
        if not is_open and call[0] not in SAFE_METHODS:
            request = HTTPConnection(scope)
            denial = self._access.judge(request)
            if isinstance(denial, Denial):
                if not any(route.matches(scope)[0] is Match.FULL for route in self._app.routes):
                    await self._app(scope, receive, send)
                    return
                self._access.report(request, denial)
                error = error_body(denial.status, CODES[denial.status], denial.message)
                await JSONResponse(error, denial.status, denial.headers)(scope, receive, send)
                return
        await self._limited(scope, receive, send)


def peer_of(request: HTTPConnection) -> str:
    return request.client.host if request.client is not None else ""


def _is_local(request: HTTPConnection) -> bool:
    peer = _address(peer_of(request))
    # An IPv4 peer on an IPv6 socket shows as ::ffff:127.0.0.1.
    peer = getattr(peer, "ipv4_mapped", None) or peer
    if peer is None or not peer.is_loopback or peer == _MESH or any(map(_FORWARDED.fullmatch, request.headers)):
        return False
    # A page on another site can make a browser on this machine send a POST here, or point its own name at 127.0.0.1.
    # Browsers then send an Origin, and a Host that is neither localhost nor an address.
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    try:
        if origin is not None and urlsplit(origin).netloc != host:
            return False
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets that do not match, or hold no address
        return False
    return name == "localhost" or _address(name) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
