"""The control plane's HTTP client of vLLM.

What it refuses to do, because each of these has taken a production engine down (docs/engine.md, "Worker calls"): call
the workers before our extension is known to be loaded, have two worker calls in flight, send ``timeout`` in a worker
call, or repeat a call that has not come back.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from highwater.model.rank import Process, rank_title
from highwater.process.clocks import SYSTEM, Clocks
from highwater.process.errors import (
    EngineGarbled,
    EngineNotListening,
    EngineRefused,
    EngineUnreachable,
    EngineUnresponsive,
    EngineUntrusted,
)
from highwater.process.tls import trouble

RPC_METHOD = "highwater_rpc"
# Under the 5 seconds after which vLLM's uvicorn closes an idle connection.
KEEPALIVE_SECONDS = 4.0
HTTP_ERROR = 400
# A connection ended before its response; failures to connect and timeouts do not count.
_BROKEN = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
# Larger responses of worker calls (thousands of cache entries) are parsed in a thread: that takes tens of milliseconds,
# which every stream of the proxy would wait for. For smaller ones a thread costs more than it saves.
_LARGE_BYTES = 256 * 1024

# Of any other response: a page of metrics has a few hundred kilobytes, /server_info less.
MAX_RESPONSE_BYTES = 16 * 1024**2

# Of the time for a GET, the part within which its connection must be there.
_CONNECT_SHARE = 0.9

# After half a minute of silence, three probes ten seconds apart.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


@dataclass(frozen=True, slots=True)
class EngineResponse:
    status: int
    content_type: str
    body: bytes

    def json_object(self) -> dict[str, Any]:
        """Return the body as a JSON object; empty where it is not one (vLLM answers most resets with an empty 200)."""
        try:
            value = json.loads(self.body or b"{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class WorkerAnswer(dict[str, Any]):
    """One worker's answer to a call, as it came: worker_ext/README.md is the contract."""

    @property
    def is_ok(self) -> bool:
        return bool(self.get("ok"))

    @property
    def code(self) -> str | None:
        code = self._error.get("code")
        return code if isinstance(code, str) else None

    @property
    def message(self) -> str:
        return str(self._error.get("message", "no reason given"))

    @property
    def process(self) -> Process:
        return Process(self.get("host"), self.get("pid"), self.get("pid_started"))

    @property
    def rank_name(self) -> str:
        return f"rank {rank_title(self.get('dp_rank'), self.get('rank'))}"

    @property
    def _error(self) -> dict[str, Any]:
        error = self.get("error")
        return error if isinstance(error, dict) else {}


class Engine:
    """The control plane's connections to the engine.

    All requests raise ``EngineUnreachable`` without a connection, and ``EngineUnresponsive`` without a response in
    time.

    Args:
        url: ``http://host:port``, ``https://host:port`` or ``unix:/path``.
        rpc_deadline_seconds: After this a worker call counts as late; it is awaited, never repeated.
        request_seconds: Deadline of every other request, by when its response must be whole.
        ssl_context: For an https ``url``.
        transport: Replaces the network in tests.

    Attributes:
        rpc_allowed: Worker calls are made, and not refused; ``Detection`` alone knows when they may be.
        has_rpc_failed: The engine itself failed at a worker call since it was forgotten last.
    """

    def __init__(
        self,
        url: str,
        *,
        rpc_deadline_seconds: float = 8.0,
        request_seconds: float = 5.0,
        ssl_context: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        clocks: Clocks = SYSTEM,
    ) -> None:
        self.url = url
        self._monotonic = clocks.monotonic
        self.rpc_allowed = False
        self.has_rpc_failed = False
        self._request_seconds = request_seconds
        self.rpc_deadline_seconds = rpc_deadline_seconds
        self._rpc_lock = asyncio.Lock()
        self._outstanding: asyncio.Task[httpx.Response] | None = None
        self._outstanding_op = ""
        self._outstanding_since = 0.0
        self._answered_at: float | None = None
        # A context without authorities: by default httpx would load 3 MB of them.
        verify = ssl_context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        limits = httpx.Limits(max_connections=8, max_keepalive_connections=4, keepalive_expiry=KEEPALIVE_SECONDS)
        base = url
        if url.startswith("unix:"):
            transport = transport or httpx.AsyncHTTPTransport(uds=url.removeprefix("unix:"), limits=limits)
            base = "http://localhost"
        # A worker call has no deadline: only keep-alive probes notice a peer that has vanished.
        transport = transport or httpx.AsyncHTTPTransport(verify=verify, limits=limits, socket_options=_KEEPALIVE)
        self._client = httpx.AsyncClient(
            base_url=base,
            timeout=request_seconds,
            limits=limits,
            transport=transport,
            verify=verify,
            # A proxy variable meant for the internet must not apply to calls to the engine beside us.
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. A running worker call is cancelled; vLLM discards its response harmlessly."""
        if self._outstanding is not None and not self._outstanding.done():
            self._outstanding.cancel()
            await asyncio.wait({self._outstanding})
        await self._client.aclose()

    # --- plain requests ---

    async def get_json(self, path: str, **query: str) -> object:
        response = await self._read(path, params=query)
        if response.status >= HTTP_ERROR:
            return None
        try:
            return json.loads(response.body)
        except ValueError:
            return None

    async def get_text(self, path: str) -> str:
        """Raises EngineRefused: the status is 400 or more."""
        response = await self._read(path)
        if response.status >= HTTP_ERROR:
            raise EngineRefused(f"GET {path} answered {response.status}", response.status)
        return response.body.decode(errors="replace")

    async def has_post(self, path: str) -> bool:
        """Return whether ``path`` is a POST-only route: a GET gets 405 there, 404 elsewhere, and changes nothing."""
        return (await self._read(path)).status == httpx.codes.METHOD_NOT_ALLOWED

    async def exists(self, path: str) -> bool:
        return (await self._read(path)).status < HTTP_ERROR

    async def get(self, path: str, query: str = "") -> EngineResponse:
        return await self._read(f"{path}?{query}" if query else path)

    async def get_within(self, path: str, *, seconds: float, max_bytes: int) -> EngineResponse:
        """GET a text, whole within these seconds, connection included; EngineGarbled over `max_bytes` or compressed."""
        headers = {"Accept": "text/plain;version=0.0.4"}
        return await self._read(path, seconds=seconds, max_bytes=max_bytes, headers=headers)

    async def _read(
        self,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        seconds: float | None = None,
        max_bytes: int = MAX_RESPONSE_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> EngineResponse:
        # /server_info's first call collects the machine's description: seconds (vLLM serve/dev/server_info).
        seconds = seconds or (60.0 if path == "/server_info" else self._request_seconds)
        # To compress it would cost the engine more than to send it over the loopback interface.
        plain = {"Accept-Encoding": "identity", **(headers or {})}
        # Connecting has an earlier deadline: unreachable is not unresponsive.
        connecting = httpx.Timeout(None, connect=_CONNECT_SHARE * seconds)
        with self._mapped(f"GET {path}"):
            # httpx's own limit is for each read: a response that trickles byte by byte would never end.
            async with asyncio.timeout(seconds):
                return await self._read_twice(path, max_bytes, params=params or None, headers=plain, timeout=connecting)

    # Sometimes the engine closes an idle connection just as it is used again: a harmless failure.
    @retry(retry=retry_if_exception_type(_BROKEN), stop=stop_after_attempt(2), reraise=True)
    async def _read_twice(self, path: str, max_bytes: int, **options: Any) -> EngineResponse:  # noqa: ANN401 - httpx's own
        body = bytearray()
        async with self._client.stream("GET", path, **options) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise EngineGarbled(f"GET {path}: compressed, though that was not requested")
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > max_bytes:
                    raise EngineGarbled(f"GET {path}: more than {max_bytes} bytes")
        if response.status_code == httpx.codes.LOOP_DETECTED:
            # The sidecar's proxy responds so where it is its own client (RFC 5842 7.2); vLLM never does.
            raise EngineUnreachable(
                f"engine_url ({self.url}) leads back to this sidecar itself; set engine_url to vLLM's own address"
            )
        return EngineResponse(response.status_code, response.headers.get("content-type", ""), bytes(body))

    async def post(self, path: str, query: str = "") -> EngineResponse:
        """POST without a body, the query string passed on as it is; a reset waits for the running step."""
        url = f"{path}?{query}" if query else path
        with self._mapped(f"POST {url}"):
            response = await self._client.post(url, timeout=self.rpc_deadline_seconds)
        return EngineResponse(response.status_code, response.headers.get("content-type", ""), response.content)

    @contextmanager
    def _mapped(self, call: str) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectTimeout as exc:
            raise EngineUnreachable(f"{call}: no connection in time") from exc
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise EngineUnresponsive(f"{call}: no answer in time") from exc
        except httpx.HTTPError as exc:
            if (problem := trouble(exc)) is not None:
                raise EngineUntrusted(f"{call}: {problem}") from exc
            message = f"{call}: {str(exc) or type(exc).__name__}"
            if self.url.startswith("https:") and isinstance(exc, httpx.ReadError | httpx.RemoteProtocolError):
                # TLS 1.3 lets a client go on before the server has judged its certificate, and uvicorn's server (vLLM
                # with --ssl-cert-reqs 2) then closes without the alert that would say so.
                message += "; if the server requires a client certificate, set engine_tls.cert_file"
            raise (EngineNotListening if _is_refused(exc) else EngineUnreachable)(message) from exc

    # --- worker calls ---

    def allow_rpc(self) -> None:
        self.rpc_allowed = True

    def forbid_rpc(self) -> None:
        """Refuse worker calls from now on; one that was sent goes on."""
        self.rpc_allowed = False

    def forget(self) -> None:
        self.forbid_rpc()
        self.has_rpc_failed = False
        if self._outstanding is not None:
            self._outstanding.cancel()
            self._outstanding = None

    @property
    def rpc_outstanding_seconds(self) -> float | None:
        if self._outstanding is None or self._outstanding.done():
            return None
        return self._monotonic() - self._outstanding_since

    @property
    def rpc_answer_age_seconds(self) -> float | None:
        return None if self._answered_at is None else self._monotonic() - self._answered_at

    async def rpc(self, op: str, payload: Mapping[str, Any] | None = None) -> list[WorkerAnswer]:
        """Call our worker extension on every worker that this API server can reach.

        Returns:
            The answer of each worker that responded, in rank order.

        Raises:
            EngineRefused: Not allowed (our extension is not known to be loaded), or the engine refused.
            EngineUnresponsive: This or an earlier call has not come back.
            EngineGarbled: A response that the contract does not allow.
        """
        if not self.rpc_allowed:
            raise EngineRefused("the worker extension is not known to be loaded", 409)
        async with self._rpc_lock:
            self._refuse_while_outstanding()
            body = {"method": RPC_METHOD, "args": [op, json.dumps(payload or {})]}
            call = asyncio.create_task(self._client.post("/collective_rpc", json=body, timeout=None))
            self._outstanding, self._outstanding_op, self._outstanding_since = call, op, self._monotonic()
            call.add_done_callback(_retrieve)
            done, _ = await asyncio.wait({call}, timeout=self.rpc_deadline_seconds)
            if not done:
                # Left running on purpose: the workers will run it, and a second one would queue behind it.
                self._refuse_while_outstanding()
        with self._mapped(f"worker call {op}"):
            response = call.result()
        self.has_rpc_failed = self.has_rpc_failed or response.is_server_error
        if len(response.content) > _LARGE_BYTES:
            results = await asyncio.to_thread(_worker_results, op, response)
        else:
            results = _worker_results(op, response)
        self._answered_at = self._monotonic()
        return results

    def _refuse_while_outstanding(self) -> None:
        if (waited := self.rpc_outstanding_seconds) is not None:
            raise EngineUnresponsive(f"worker call {self._outstanding_op} sent {waited:.0f} s ago has not come back")


def _retrieve(call: asyncio.Task[httpx.Response]) -> None:
    """Retrieve a call's end, so that asyncio does not report a late or abandoned call."""
    if not call.cancelled():
        call.exception()


def _is_refused(exc: BaseException | None) -> bool:
    """Return whether nothing listens at any of the addresses of a name."""
    while exc is not None and not isinstance(exc, ConnectionRefusedError | FileNotFoundError):
        if isinstance(exc, BaseExceptionGroup):
            return all(map(_is_refused, exc.exceptions))
        exc = exc.__cause__ or exc.__context__
    return exc is not None


def _worker_results(op: str, response: httpx.Response) -> list[WorkerAnswer]:
    if response.status_code >= HTTP_ERROR:
        raise EngineRefused(f"worker call {op} answered {response.status_code}", response.status_code)
    try:
        results = [json.loads(result) for result in response.json()["results"]]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise EngineGarbled(f"worker call {op}: not a list of JSON texts") from exc
    if not results or not all(isinstance(result, dict) for result in results):
        raise EngineGarbled(f"worker call {op}: {len(results)} answers, not every one an object")
    strays = {str(result.get("op")) for result in results} - {op}
    if strays:
        # One raising worker method shifts vLLM's per-rank queues by one until a restart (vLLM pull request 57846).
        raise EngineGarbled(f"worker call {op} was answered with {sorted(strays)}: its worker queues are out of step")
    return [WorkerAnswer(result) for result in results]
