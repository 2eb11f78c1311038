"""The data plane: every request that is not the sidecar's own, passed to the engine and back byte for byte.

A plain ASGI class over one pooled aiohttp session. Bodies stream both ways as they arrive and are never parsed, decoded
or buffered whole. It refuses to judge (that is the allow list's, before it), to follow redirects, to keep cookies, and
to send a request again that the engine may have begun: aiohttp alone repeats idempotent methods, once, when the
connection broke before any byte of the answer and nothing of a streamed body was read. A POST is never repeated.

How a conversation ends: the client leaves and the engine's connection closes at once; the engine fails before its
answer and the client gets 502 or 504; it fails within its answer and the client gets a stream cut short, never a clean
end.
"""

import asyncio
import json
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from app.gate import Gate, Shed
from app.proxy_websocket import relay

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

log = logging.getLogger(__name__)

# RFC 9110 7.6.1, and what old clients still send. Whatever `Connection` names joins them, request by request.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The engine gets its own host: vLLM up to 0.21 derives the path it guards with --api-key from the Host header.
# Expect is settled by our own server, which says 100 Continue when we first read the body.
_NOT_FOR_THE_ENGINE = HOP_BY_HOP | {b"host", b"expect", b"x-request-id"}

_NOT_WHEN_CHUNKED = _NOT_FOR_THE_ENGINE | {b"content-length"}
# 204 and 304 have no body, and uvicorn would wait for the bytes that a length promises.
_NOT_WHEN_EMPTY = HOP_BY_HOP | {b"content-length"}

_QUICK_SECONDS = 0.01
_SANE_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_SERVER_ERRORS = range(500, 600)
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

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
    "/health": "health",
    "/ping": "health",
}
_PATH_CLASS_PREFIXES = (
    ("/v1/models/", "models"),
    ("/v1/responses/", "responses"),
    ("/v1/audio/", "audio"),
    ("/v1/", "other_v1"),
    ("/v2/", "other_v2"),
)


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """What one request may take."""

    max_body_bytes: int = 256 * 1024 * 1024
    """A larger request body gets 413."""
    max_message_bytes: int = 16 * 1024 * 1024
    """A larger WebSocket message from the engine closes with 1009; the server bounds the client's."""
    connect_seconds: float = 5.0
    first_byte_seconds: float | None = 600.0
    """From the request's last byte to the answer's head: prefill behind a queue takes minutes. None waits for ever."""
    idle_seconds: float = 600.0
    """Between two pieces of the answer, and for the engine to take one piece of an upload."""
    keepalive_seconds: float = 4.0
    """Idle pooled connections are dropped before uvicorn, the engine's server, drops them after 5 s."""


class ProxyObserver(Protocol):
    """Who counts. Every label it is given comes from a small fixed set."""

    def request_started(self, path_class: str) -> None:
        """A request arrived."""

    def request_ended(self, path_class: str, method: str, code: int, first_byte_seconds: float | None) -> None:
        """It is over; the code is what the client saw, 499 if it left before an answer began."""

    def client_disconnected(self) -> None:
        """The client left before its answer was complete."""

    def upstream_error(self, reason: str) -> None:
        """The engine failed this request."""

    def request_shed(self, reason: str) -> None:
        """This request was not let through: the gate was closed for a cache reset."""


class Unobserved(ProxyObserver):
    """The observer that counts nothing."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a request cannot go on: the status for the client, a label for the observer, a sentence for both logs."""

    status: int
    reason: str
    message: str
    retry_after: int | None = None
    """Seconds; with it the fault is not the engine's."""


_CLIENT_LEFT = _Failure(499, "client_left", "the client left")
_NO_ANSWER = _Failure(504, "first_byte_timeout", "no answer from the engine in time (proxy.first_byte_seconds)")
_UPLOAD_STALLED = _Failure(504, "upload_stalled", "the engine stopped taking the request body (proxy.idle_seconds)")
_ANSWER_STALLED = _Failure(504, "idle_timeout", "the engine's answer stood still (proxy.idle_seconds)")
_BROKEN_OFF = _Failure(502, "truncated", "the engine broke off within its answer")
# What aiohttp raises before an answer, the narrow before the wide.
_FAILURES: tuple[tuple[type[Exception], _Failure], ...] = (
    (aiohttp.ConnectionTimeoutError, _Failure(504, "connect_timeout", "no connection to the engine in time")),
    (aiohttp.ClientConnectorError, _Failure(502, "connect", "the engine does not accept connections")),
    (aiohttp.ClientResponseError, _Failure(502, "malformed", "the engine's answer is not HTTP")),
    (ValueError, _Failure(400, "bad_request", "the request target or a header cannot be passed on")),
    (Exception, _Failure(502, "disconnected", "the engine closed the connection without an answer")),
)


class _Stopped(Exception):
    """Carries the failure from where it is noticed to where it is answered."""

    def __init__(self, failure: _Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Proxy:
    """The ASGI application that is the engine, as far as its clients can tell.

    Args:
        upstream: the engine: ``http://host:port``, ``https://host:port`` or ``unix:/path``.
        observer: who counts requests, times and failures.
        limits: sizes and times.
        gate: lets requests through that can reach the model, and holds them while a reset needs stillness.
    """

    def __init__(
        self, upstream: str, *, observer: ProxyObserver, limits: ProxyLimits | None = None, gate: Gate | None = None
    ) -> None:
        self.socket_path = upstream.removeprefix("unix:") if upstream.startswith("unix:") else None
        # Over a Unix socket the host is only a name for the Host header.
        self.base = "http://localhost" if self.socket_path else upstream.rstrip("/")
        if not self.socket_path and not self.base.startswith(("http://", "https://")):
            raise ValueError(f"upstream {upstream!r}: must be http://host:port, https://host:port or unix:/path")
        self.observer = observer
        self.limits = limits or ProxyLimits()
        self.gate = gate or Gate()
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The pooled session; there is one between ``start`` and ``aclose``."""
        if self._session is None:
            raise RuntimeError("the proxy has not been started")
        return self._session

    async def start(self) -> None:
        """Open the connection pool; nothing is sent yet."""
        keepalive = self.limits.keepalive_seconds
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(self.socket_path, limit=0, keepalive_timeout=keepalive)
            if self.socket_path
            else aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),  # a jar would hand one caller's cookies to the next
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(total=None, connect=self.limits.connect_seconds),
            read_bufsize=64 * 1024,  # twice this may wait for a slow client; then the engine's socket is left unread
            max_line_size=64 * 1024,
            max_field_size=64 * 1024,
        )

    async def aclose(self) -> None:
        """Close the pool and every connection in it."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request or WebSocket to the engine."""
        exchange = _WebSocketExchange if scope["type"] == "websocket" else _HttpExchange
        await exchange(self, scope, receive, send).run()


async def refuse(
    scope: Scope,
    send: Send,
    status: int,
    message: str,
    *,
    request_id: bytes | None = None,
    retry_after: int | None = None,
) -> None:
    """Answer with an error in the OpenAI API's shape; a WebSocket handshake is answered with the same HTTP response."""
    kinds = {
        400: "invalid_request_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        503: "service_unavailable_error",
    }
    kind = kinds.get(status, "upstream_error" if status in _SERVER_ERRORS else "request_error")
    error = {"message": message, "type": kind, "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if request_id:
        headers.append((b"x-request-id", request_id))
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % retry_after))
    prefix = "http.response"
    if scope["type"] == "websocket":
        prefix = "websocket.http.response"
        if prefix not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": message[:100]})
            return
    await send({"type": f"{prefix}.start", "status": status, "headers": headers})
    await send({"type": f"{prefix}.body", "body": body, "more_body": False})


def path_class(path: str) -> str:
    """Name a decoded path with one of a few words, as a metric's label."""
    known = _PATH_CLASSES.get(path)
    return known or next((name for prefix, name in _PATH_CLASS_PREFIXES if path.startswith(prefix)), "other")


def end_to_end(headers: Headers, *, less: frozenset[bytes] = HOP_BY_HOP) -> Headers:
    """Keep the headers that are meant for the far end, order and repetitions as they came.

    Args:
        headers: names in lower case.
        less: names to leave out; ``HOP_BY_HOP`` should be among them. Those that ``Connection`` names go too.
    """
    for name, value in headers:
        if name == b"connection":
            less = less.union(token.strip().lower() for token in value.split(b","))
    return [header for header in headers if header[0] not in less]


class _Patience:
    """A deadline that can be moved at every chunk, for the price of a store rather than a timer."""

    def __init__(self, give_up: Callable[[_Failure], None]) -> None:
        self._give_up: Callable[[_Failure], None] | None = give_up
        self._loop = asyncio.get_running_loop()
        self._deadline = math.inf
        self._failure = _NO_ANSWER
        self._timer: asyncio.TimerHandle | None = None

    def expect_within(self, seconds: float | None, failure: _Failure) -> None:
        """From now on, give up with this failure after so many seconds; None waits for ever."""
        if seconds is None:
            return self.rest()
        self._deadline, self._failure = self._loop.time() + seconds, failure
        if self._timer is None or self._timer.when() > self._deadline:
            self._arm()
        return None

    def rest(self) -> None:
        """Expect nothing for now."""
        self._deadline = math.inf

    def end(self) -> None:
        """Expect nothing ever."""
        self.rest()
        self._give_up = None  # its owner holds us: a cycle per request would be the garbage collector's work
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() >= self._deadline and self._give_up is not None:
            self._give_up(self._failure)
        elif self._deadline < math.inf:
            self._arm()


class _Exchange:
    """One request on its way, and all that is known of it while it lasts."""

    def __init__(self, proxy: Proxy, scope: Scope, receive: Receive, send: Send) -> None:
        self.proxy = proxy
        self.scope = scope
        self.receive = receive
        self.send = send
        self.request_id = self._identify()
        self.code: int | None = None  # of the answer the client has been shown
        self.first_byte_seconds: float | None = None
        self.started = time.perf_counter()
        self._task = asyncio.current_task()
        self._patience = _Patience(self._interrupt)
        self._lookout: asyncio.Handle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._interruption: _Failure | None = None
        self._over = False

    async def run(self) -> None:
        """Converse, and answer for whatever goes wrong."""
        observer = self.proxy.observer
        kind, method = path_class(self.scope["path"]), self.scope.get("method", "GET")
        observer.request_started(kind)
        try:
            failure = await self._attempt()
            if failure is not None:
                await self._answer_for(failure)
        finally:
            observer.request_ended(
                kind, method if method in _METHODS else "other", self.code or 499, self.first_byte_seconds
            )

    async def _attempt(self) -> _Failure | None:
        # What cannot reach the model passes the gate uncounted: liveness must not wait for a reset.
        gate = None if self.scope.get("method") in _READING else self.proxy.gate
        if gate is None:
            return await self._attempt_through()
        try:
            await gate.enter()
        except Shed as shed:
            return _Failure(503, shed.reason, str(shed), shed.retry_after)
        try:
            return await self._attempt_through()
        finally:
            gate.leave()

    async def _attempt_through(self) -> _Failure | None:
        try:
            await self._converse()
        except asyncio.CancelledError:
            # Ours when _interrupt() said why; anyone else's, such as the server's at its end, passes on.
            if self._interruption is None or (self._task is not None and self._task.uncancel() > 0):
                raise
            return self._interruption
        except _Stopped as stopped:
            return stopped.failure
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return self._explain(error)
        finally:
            self._let_go()
        return None

    async def _converse(self) -> None:
        raise NotImplementedError

    def _let_go(self) -> None:
        """Stop watching the client and let the engine's connection go; unless its answer is complete, it closes."""
        self._over = True
        self._patience.end()
        self._stop_watching()

    async def _answer_for(self, failure: _Failure) -> None:
        observer = self.proxy.observer
        if failure is _CLIENT_LEFT:
            observer.client_disconnected()
            return
        if failure.retry_after is not None:
            observer.request_shed(failure.reason)
        elif failure.status in _SERVER_ERRORS:
            observer.upstream_error(failure.reason)
        method, path = self.scope.get("method", "WEBSOCKET"), self.scope["raw_path"].decode("latin-1")
        log.warning("%s %s: %s, request_id=%s", method, path, failure.message, self.request_id.decode())
        # Once the answer has begun, returning without its end is what makes an ASGI server cut the connection: no final
        # chunk, no full Content-Length, and no traceback in the log as raising would leave.
        if self.code is None:
            self.code = failure.status
            await refuse(
                self.scope,
                self.send,
                failure.status,
                failure.message,
                request_id=self.request_id,
                retry_after=failure.retry_after,
            )

    def _explain(self, error: Exception) -> _Failure:
        if self.code is not None:
            return _BROKEN_OFF
        return next(failure for kind, failure in _FAILURES if isinstance(error, kind))

    def _watch(self) -> None:
        """Look out for the client's departure, if the engine takes a while; a task is dear beside a quick answer.

        Only from where on nobody else calls ``receive``: two calls would race.
        """
        if not self._over:
            self._lookout = asyncio.get_running_loop().call_later(_QUICK_SECONDS, self._start_watching)

    def _start_watching(self) -> None:
        self._lookout = None
        self._watcher = asyncio.create_task(self._await_departure())

    async def _await_departure(self) -> None:
        while not (await self.receive())["type"].endswith(".disconnect"):
            pass  # the rest of a body that the engine no longer wants
        self._interrupt(_CLIENT_LEFT)

    def _stop_watching(self) -> None:
        if self._lookout is not None:
            self._lookout.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    def _interrupt(self, failure: _Failure) -> None:
        """End the conversation from outside, wherever it waits; as asyncio.timeout() does it."""
        if not self._over and self._interruption is None and self._task is not None:
            self._interruption = failure
            self._task.cancel()

    def _expect_answer(self) -> None:
        if self.code is None:
            self._patience.expect_within(self.proxy.limits.first_byte_seconds, _NO_ANSWER)

    def _identify(self) -> bytes:
        """Keep the client's request id if it is fit for a log line, else make one."""
        theirs = next((value for name, value in self.scope["headers"] if name == b"x-request-id"), b"")
        return theirs if _SANE_REQUEST_ID.fullmatch(theirs) else secrets.token_hex(16).encode()

    def _url(self) -> URL:
        raw_path: bytes = self.scope["raw_path"]
        # Without the slash, what follows would join the host's name.
        if not raw_path.startswith(b"/"):
            raise ValueError("the request target is not a path")
        query: bytes = self.scope["query_string"]
        target = raw_path + b"?" + query if query else raw_path
        return URL(self.proxy.base + target.decode(), encoded=True)

    def _headers(self, *, less: frozenset[bytes] = _NOT_FOR_THE_ENGINE) -> CIMultiDict[str]:
        kept = end_to_end(self.scope["headers"], less=less)
        headers = CIMultiDict([(name.decode("ascii"), _text(value)) for name, value in kept])
        headers.add("x-request-id", self.request_id.decode())
        return headers


class _HttpExchange(_Exchange):
    """A request with its body, and the engine's answer."""

    def __init__(self, proxy: Proxy, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(proxy, scope, receive, send)
        fields = dict(scope["headers"])
        self.chunked = b"transfer-encoding" in fields
        self.declared_bytes = 0 if self.chunked else int(fields.get(b"content-length", b"0"))
        self.received_bytes = 0
        self.response: aiohttp.ClientResponse | None = None

    async def _converse(self) -> None:
        body = await self._body()
        self.response = await self.proxy.session.request(
            self.scope["method"],
            self._url(),
            # aiohttp writes the framing; a counted body keeps its count. A POST that declares no body gets
            # Content-Length: 0, as RFC 9110 8.6 asks: the one header that can be added.
            headers=self._headers(less=_NOT_WHEN_CHUNKED if self.chunked else _NOT_FOR_THE_ENGINE),
            data=body,
            chunked=True if self.chunked else None,
            allow_redirects=False,
        )
        await self._deliver(self.response)

    def _let_go(self) -> None:
        super()._let_go()
        # A complete answer has closed itself, and its connection is back in the pool.
        if self.response is not None and not self.response.closed:
            self.response.close()

    async def _body(self) -> bytes | AsyncIterator[bytes] | None:
        """Take what has arrived. A body that is complete goes up in one piece, the rest as it comes."""
        if self.declared_bytes > self.proxy.limits.max_body_bytes:
            raise _Stopped(self._too_large())
        message = await self._next_message()
        if message.get("more_body", False):
            return self._upload(message)
        body = self._counted(message)
        self._watch()
        self._expect_answer()
        return body if body or self.chunked else None

    async def _next_message(self) -> Message:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise _Stopped(_CLIENT_LEFT)
        return message

    async def _upload(self, message: Message) -> AsyncIterator[bytes]:
        """Hand the body on piece by piece; aiohttp runs this beside the wait for the answer, which may come early."""
        # A clock of its own: the answer may come, and be timed, while this goes on. Without one, nobody would see the
        # client leave while the engine takes no bytes, for then nobody reads the client.
        patience = _Patience(self._interrupt)
        try:
            while True:
                if chunk := self._counted(message):
                    patience.expect_within(self.proxy.limits.idle_seconds, _UPLOAD_STALLED)
                    yield chunk
                    patience.rest()
                if not message.get("more_body", False):
                    self._expect_answer()
                    return
                message = await self._next_message()
        except _Stopped as stopped:
            # Raised on as well: a plain return would end the body cleanly, and the engine would take it for whole.
            self._interrupt(stopped.failure)
            raise
        finally:
            patience.end()
            self._watch()

    def _counted(self, message: Message) -> bytes:
        chunk: bytes = message.get("body", b"")
        self.received_bytes += len(chunk)
        if self.received_bytes > self.proxy.limits.max_body_bytes:
            raise _Stopped(self._too_large())
        return chunk

    def _too_large(self) -> _Failure:
        limit = self.proxy.limits.max_body_bytes
        return _Failure(413, "too_large", f"the request body is larger than {limit} bytes (proxy.max_body_bytes)")

    async def _deliver(self, response: aiohttp.ClientResponse) -> None:
        self.code = response.status
        self._patience.rest()
        await self.send(
            {"type": "http.response.start", "status": response.status, "headers": self._answer_headers(response)}
        )
        content, ended = response.content, False
        while not ended:
            # Ours to measure: aiohttp's own clock stops, without waking the reader, where the framing breaks (3.14.5).
            self._patience.expect_within(self.proxy.limits.idle_seconds, _ANSWER_STALLED)
            chunk = await content.readany()
            self._patience.rest()
            ended = not chunk or content.at_eof()
            if self.first_byte_seconds is None:
                self.first_byte_seconds = time.perf_counter() - self.started
            # Awaiting is the brake: the server holds us here while the client's socket is full.
            await self.send({"type": "http.response.body", "body": chunk, "more_body": not ended})

    def _answer_headers(self, response: aiohttp.ClientResponse) -> Headers:
        lowered = [(name.lower(), value) for name, value in response.raw_headers]
        headers = end_to_end(lowered, less=_NOT_WHEN_EMPTY if response.status in (204, 304) else HOP_BY_HOP)
        if all(name != b"x-request-id" for name, _ in headers):
            headers.append((b"x-request-id", self.request_id))
        return headers


class _WebSocketExchange(_Exchange):
    """A WebSocket: a handshake passed on, then frames both ways."""

    async def _converse(self) -> None:
        await self.receive()  # websocket.connect
        self._watch()
        self._expect_answer()
        upstream = await self._shake_hands()
        self._patience.rest()
        self._stop_watching()  # before the relay, which reads the client itself
        self.code = 101
        headers = [(b"x-request-id", self.request_id)]
        accept = {"type": "websocket.accept", "subprotocol": upstream.protocol, "headers": headers}
        await relay(upstream, self.receive, self.send, accept)

    async def _shake_hands(self) -> aiohttp.ClientWebSocketResponse:
        # Key, version and extensions are each connection's own; subprotocols the client offers and the engine chooses.
        own = (name for name, _ in self.scope["headers"] if name.startswith(b"sec-websocket-"))
        try:
            return await self.proxy.session.ws_connect(
                self._url(),
                protocols=self.scope["subprotocols"],
                headers=self._headers(less=_NOT_FOR_THE_ENGINE.union(own)),
                max_msg_size=self.proxy.limits.max_message_bytes,
            )
        except aiohttp.WSServerHandshakeError as error:
            status = error.status if error.status in range(400, 600) else 502
            raise _Stopped(_Failure(status, "refused", f"the engine refused the WebSocket: {error.status}")) from error


def _text(value: bytes) -> str:
    """Decode a header value so that aiohttp, which writes UTF-8, puts the same bytes on the wire."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")  # the one value that changes its bytes: neither ASCII nor UTF-8
