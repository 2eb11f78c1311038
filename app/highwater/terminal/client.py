"""A sidecar's responses as the values of ``model``, with nothing in them that a terminal would obey."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

import httpx
import httpx_sse
from pydantic import TypeAdapter, ValidationError

from highwater.diagnose.verdict import JudgedReport
from highwater.model.rank import RankReading
from highwater.model.remedies import RemedyResult, reasons_of
from highwater.model.report import SCHEMA, Event
from highwater.model.units import MIB
from highwater.process.errors import EXIT_STATUS_HEADER, SidecarError, SidecarRefused, SidecarUnreachable
from highwater.process.untrusted import cleaned, plain, without_credentials

_REPORT = TypeAdapter(JudgedReport)
_EVENT = TypeAdapter(Event)
_RANKS = TypeAdapter(tuple[RankReading, ...])
_REMEDY = TypeAdapter(RemedyResult)
_YEAR_10000 = 253_402_300_800.0  # no calendar goes on from there


def not_a_sidecar(path: str) -> SidecarUnreachable:
    return SidecarUnreachable(
        f"what answers {path} there is no Highwater sidecar; --url or HIGHWATER_URL names another"
    )


def report_of(data: object) -> JudgedReport:
    """Return the response of ``GET /memory``. Raises SidecarUnreachable where this version cannot read it."""
    if not isinstance(data, dict) or "engine" not in data:
        raise not_a_sidecar("/memory")
    if data.get("schema") != SCHEMA:
        raise SidecarUnreachable(
            f"the sidecar's report is of schema {data.get('schema')!r} and this command reads {SCHEMA}; "
            "use the same version of both"
        )
    try:
        return _REPORT.validate_python(cleaned(data))
    except ValidationError as exc:
        where = ".".join(str(part) for part in exc.errors()[0]["loc"])
        raise SidecarUnreachable(
            f"the sidecar's report has something unknown in {where}; use the same version of both"
        ) from exc


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Map invalid and missing values in a response to one line for people; raises SidecarUnreachable with it."""
    try:
        yield
    except (ValidationError, KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as exc:
        raise SidecarUnreachable(
            f"{what} is not what a sidecar of this version answers; upgrade the older one"
        ) from exc


def ranks_of(data: object) -> tuple[RankReading, ...]:
    with understood("a reading of the ranks"):
        return _RANKS.validate_python(cleaned(data))


def remedy_of(data: Any) -> RemedyResult:  # noqa: ANN401 - JSON
    with understood("/memory/reclaim"):
        freed, credited = data["freed_bytes"], data["credited_bytes"]
        flat = {
            "freed_bytes": freed["total"],
            "freed_components": freed["components"],
            "credited_bytes": credited["total"],
            "credited_components": credited["components"],
        }
        return _REMEDY.validate_python(cleaned({**data, **flat}))


def events_of(data: object) -> list[Event]:
    return [event for one in (data if isinstance(data, list) else ()) if (event := event_of(one)) is not None]


def event_of(data: object) -> Event | None:
    try:
        event = _EVENT.validate_python(cleaned(data))
    except ValidationError:
        return None
    return event if 0 <= event.at < _YEAR_10000 else None


CONNECT_SECONDS = 5.0
# The sidecar sends a comment after 15 seconds without a report.
SILENCE_SECONDS = 20.0
MAX_ANSWER_BYTES = 256 * MIB
_SHOWN_LENGTH = 400
# Of a sidecar's own refusal: it may list every name that it knows.
_REFUSAL_LENGTH = 8000
# A sidecar's answer to an unknown path below its own paths contains this (http/problems.py).
_NO_OWN_PATH = "The sidecar's own"
_ANOTHER = "--url or HIGHWATER_URL names the sidecar, by default on port 8001"
# What a port that serves the engine's API alone says of a path of the sidecar's (gated_proxy/routes.py).
_DATA_PORT = "own paths are on its control port"


FIRST_PAUSE_SECONDS: Final = 0.5
_OWN_NAMES: Final = frozenset({"past", "lost"})


class Answer(NamedTuple):
    media_type: str
    content: bytes
    exit_status: int | None  # what a command that shows it ends with; None where the sidecar does not say it


class SidecarClient:
    """One sidecar, by its base URL; without a scheme ``http://``. A context manager.

    ``token_source`` says where the token was found, or why none was. ``timeout_seconds`` is for one whole response; to
    connect takes five at most. Every call raises SidecarUnreachable without a response, or for one that no sidecar
    sends (the constructor, where URL or token cannot be used), and SidecarRefused for an error.
    """

    def __init__(
        self, url: str, *, token: str | None = None, token_source: str = "", timeout_seconds: float = 30.0
    ) -> None:
        full = url.strip() if "://" in url else f"http://{url.strip()}"
        try:
            parts = urlsplit(full)
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise _unreachable(
                f"{without_credentials(url)!r} is not the URL of a sidecar; an example is http://127.0.0.1:8001"
            )
        if "@" in full.partition("?")[0]:  # also within the path: of a password with a slash, say
            raise SidecarUnreachable("the URL carries a user name; the token belongs in HIGHWATER_ADMIN_TOKEN")
        self.url = full.partition("?")[0].partition("#")[0].rstrip("/")
        self._seconds = timeout_seconds
        self._has_token = bool(token)
        self._token_source = token_source or "HIGHWATER_ADMIN_TOKEN"
        if token and not token.isprintable():  # no header can carry it, and the library's complaint would show it
            raise SidecarUnreachable(
                f"{self._token_source} holds a line break or another control character; take it out"
            )
        self._client = httpx.Client(
            # The system's authorities, and those that SSL_CERT_FILE names.
            verify=ssl.create_default_context(),
            trust_env=False,
            timeout=httpx.Timeout(timeout_seconds, connect=min(CONNECT_SECONDS, timeout_seconds)),
            headers={b"Authorization": f"Bearer {token}".encode()} if token else None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:  # noqa: ANN401 - JSON
        return self.call("GET", path, params=params)

    def post(self, path: str, body: Any = None) -> Any:  # noqa: ANN401 - JSON
        return self.call("POST", path, body=body)

    def call(self, method: str, path: str, **given: Any) -> Any:  # noqa: ANN401 - JSON
        headers, content = self._call(method, path, **given)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as exc:
            shown = "a web page" if "html" in headers.get("content-type", "") else "what is no JSON"
            raise self._no_sidecar(shown, headers) from exc

    def ask(self, method: str, path: str, **given: Any) -> Answer:  # noqa: ANN401 - as `_call` takes it
        """Return the answer of any path as it is, also another server's web page."""
        headers, content = self._call(method, path, is_shown=True, **given)
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        status = headers.get(EXIT_STATUS_HEADER, "")
        return Answer(media_type, content, int(status) if len(status) == 1 and status.isdecimal() else None)

    def events(self) -> Iterator[tuple[str, Any]]:
        """Return event names and parsed data of ``GET /memory/events``, live, the present report first.

        Ends when the sidecar closes the stream: because it stops, or because too little was read. Raises
        SidecarUnreachable also when it breaks, or has been silent for 20 seconds.
        """
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        with (
            self._mapped(),
            httpx_sse.connect_sse(self._client, "GET", f"{self.url}/memory/events", timeout=timeout) as source,
        ):
            response = source.response
            if not response.is_success:
                self._refuse(response, self._read(response))
            for event in source.iter_sse():
                try:
                    data = json.loads(event.data)
                except (ValueError, RecursionError) as exc:
                    raise self._no_sidecar("events that are no JSON", response.headers) from exc
                yield event.event, data

    def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,  # noqa: ANN401 - JSON
        accept: str = "*/*",
        is_shown: bool = False,
    ) -> tuple[httpx.Headers, bytes]:
        given: dict[str, Any] = {"headers": {"Accept": accept}} | ({} if body is None else {"json": body})
        with self._mapped(), self._client.stream(method, f"{self.url}{path}", params=params, **given) as response:
            content = self._read(response)
            # A reclaim of which all was refused is no success, and its text says why of each remedy.
            if not response.is_success and not (is_shown and EXIT_STATUS_HEADER in response.headers):
                self._refuse(response, content)
            return response.headers, content

    def _read(self, response: httpx.Response) -> bytes:
        """Return the body, within the time of one response: httpx's own limit is for each piece."""
        deadline, content = time.monotonic() + self._seconds, bytearray()
        for piece in response.iter_bytes():
            content += piece
            if time.monotonic() > deadline or len(content) > MAX_ANSWER_BYTES:
                raise self._no_sidecar("without an end", response.headers)
        return bytes(content)

    def _refuse(self, response: httpx.Response, content: bytes) -> None:
        status = response.status_code
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = None
        fields = body if isinstance(body, dict) else {}
        parts, text = urlsplit(self.url), content.decode(errors="replace")
        if status == HTTPStatus.NOT_FOUND and parts.path and _NO_OWN_PATH in text:
            raise _unreachable(
                f"the sidecar serves nothing below {self.url}; give its URL without the path {parts.path}, such as "
                f"{parts.scheme}://{parts.netloc}"
            )
        if _DATA_PORT in text:
            raise _unreachable(
                f"{self.url} is the port for requests to the model; the sidecar's own paths are on its control "
                "port (control_port): name that with --url or HIGHWATER_URL"
            )
        error, results = fields.get("error"), fields.get("results")
        if isinstance(error, dict) and isinstance(error.get("code"), str):  # vLLM's is a number
            is_foreign = "The sidecar's own:" in str(error.get("message"))
            version = "; is that a sidecar of this version?" if is_foreign else ""
            code, message = error["code"], f"{error.get('message')}{version}"
        elif isinstance(results, list):
            refused = ((str(one.get("remedy")), str(one.get("reason"))) for one in results if isinstance(one, dict))
            code, message = "refused", "; ".join(reasons_of(refused))
        elif "reason" in fields or "remedy" in fields:
            code, message = "", str(fields.get("reason"))
        else:  # another server's
            raise self._no_sidecar(f"{status} {response.reason_phrase}".rstrip(), response.headers)
        advice = ""
        if status == HTTPStatus.UNAUTHORIZED and self._has_token:
            advice = f". The token from {self._token_source} is not this sidecar's."
        elif status == HTTPStatus.UNAUTHORIZED:
            advice = f". This command found no token: {self._token_source}."
        shown = plain(f"{message}{advice}", _REFUSAL_LENGTH)
        raise SidecarRefused(shown, status=status, code=code, message=plain(message, _REFUSAL_LENGTH), body=body)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except httpx_sse.SSEError as exc:
            shown = "a web page" if "text/html" in str(exc) else "what is no stream of events"
            raise _unreachable(f"{self.url} answers with {shown}; is that a sidecar?") from exc
        except httpx.TimeoutException as exc:
            when = "accepts no connection" if isinstance(exc, httpx.ConnectTimeout) else "does not answer"
            raise _unreachable(f"{self.url} {when} in time; is a sidecar there? {_ANOTHER}") from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            reason = str(exc) or type(exc).__name__
            text = f"no sidecar answers at {self.url} ({reason}); start one with `highwater serve`; {_ANOTHER}"
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                text = f"the certificate of {self.url} is not trusted; SSL_CERT_FILE names its authority ({reason})"
            elif "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER_FAILURE" in reason:
                text = f"{self.url} speaks no TLS; try http://"
            elif isinstance(exc, httpx.RemoteProtocolError):
                hint = "; does it want https://?" if self.url.startswith("http:") else ""
                text = f"what answers at {self.url} is no sidecar{hint} ({reason}); {_ANOTHER}"
            raise _unreachable(text) from exc

    def _no_sidecar(self, shown: str, headers: httpx.Headers) -> SidecarUnreachable:
        server = f" from {headers['server']}" if headers.get("server") else ""
        return _unreachable(
            f"{self.url} answered with {shown}{server}: that is no Highwater sidecar (vLLM itself, or another "
            f"server?); {_ANOTHER}"
        )


class StreamEnded(SidecarUnreachable):
    """The sidecar ended a stream that had opened; it may be restarting."""


def follow(
    connect: Callable[[], SidecarClient],
    past: Callable[[SidecarClient], Any],
    pause: Callable[[float], bool | None],
    *,
    max_pause_seconds: float,
) -> Iterator[tuple[str, Any]]:
    """Yield ``past`` with what came before, then each message of the stream, as `SidecarClient.events` does.

    Where the stream ends, or cannot be opened, it yields ``lost`` with the ``SidecarError``, and tries again: after
    half a second, and after twice as long each time until a stream opens. (tenacity's attempts end with a success, and
    a stream that opened can still end.) ``past`` is called once the stream is open, so that no message is missed
    between both; where ``pause`` returns true it ends.
    """
    seconds = FIRST_PAUSE_SECONDS
    while True:
        try:
            with connect() as sidecar:
                is_open = False
                for name, data in sidecar.events():
                    if not is_open:
                        is_open = True
                        yield "past", past(sidecar)
                    seconds = FIRST_PAUSE_SECONDS
                    if name not in _OWN_NAMES:
                        yield name, data
            problem: SidecarError = StreamEnded("the sidecar has ended the stream")
        except SidecarError as exc:
            problem = exc
        yield "lost", problem
        if pause(seconds):
            return
        seconds = min(seconds * 2, max_pause_seconds)


def _unreachable(text: str) -> SidecarUnreachable:
    return SidecarUnreachable(plain(text, _SHOWN_LENGTH))
