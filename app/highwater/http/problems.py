"""Errors as HTTP responses: what is wrong with a request, and never a traceback.

The body has the data plane's shape (``gated_proxy.failures.error_body``).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from http import HTTPMethod, HTTPStatus
from typing import Any, Final

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from gated_proxy.failures import RETRY_AFTER_SECONDS, error_body
from gated_proxy.logs import LimitedLog
from highwater.process.errors import NotAvailable, RequestError, TooManyWaiting, UnknownKey
from highwater.process.untrusted import masked, plain, sentences

MAX_PROBLEMS: Final = 20
_SHOWN_LENGTH: Final = 120

CODES: Final = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed"}

SIDECAR_PATHS_HINT = ". The sidecar's own: /memory, /dashboard, /metrics, /policy, /readyz, /docs/runbooks/"

log = logging.getLogger("highwater.http")
limited = LimitedLog(log)


class Problem(BaseModel):
    """A sentence for people, and a word for programs; ``type`` and ``param`` as OpenAI's clients know them."""

    message: str
    type: str
    param: None = None
    code: str


class ProblemAnswer(BaseModel):
    """The body of every error."""

    error: Problem


# For the OpenAPI page, in place of FastAPI's own shape.
PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ProblemAnswer, "description": "What is wrong with the request, and what would be right"},
    503: {"model": ProblemAnswer, "description": "The engine cannot be called, or too many calls wait"},
}


def answer_problems(app: FastAPI, internal_error: Callable[[], None] = lambda: None) -> None:
    """Let ``app`` respond to every error in this shape; ``internal_error`` counts a fault of our own."""

    @app.exception_handler(RequestError)
    async def request_error(_: Request, exc: RequestError) -> JSONResponse:
        answer = _problem(exc.status, exc.code, str(exc))
        if isinstance(exc, NotAvailable | TooManyWaiting):
            answer.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, exc: RequestValidationError) -> JSONResponse:
        is_of_body = any(error["loc"] == ("body",) and error["type"] != "missing" for error in exc.errors())
        sent = request.headers.get("content-type", "none")
        if is_of_body and "json" not in sent.lower():
            return _problem(
                415, "not_json", f"the body's Content-Type is {sent!r}; send Content-Type: application/json"
            )
        if any(error["type"] == "json_invalid" for error in exc.errors()):
            return _problem(400, "bad_json", "the body is not valid JSON")
        # A caller knows where it wrote a key: in the body, or behind the path.
        errors = (error | {"loc": error["loc"][1:] or error["loc"]} for error in exc.errors())
        problems = list(sentences(errors, partial(_nearest_key, request)))
        return _problem(422, "invalid", _listed(problems[:MAX_PROBLEMS], len(problems)))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, exc: HTTPException) -> JSONResponse:
        message, path, headers = str(exc.detail), request.scope["path"], dict(exc.headers or {})
        if exc.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            # Starlette names those of the first route that has this path, and another may have it with other methods.
            scopes = [{**request.scope, "method": str(method)} for method in HTTPMethod]
            served = (one for one in scopes if any(route.matches(one)[0] is Match.FULL for route in app.routes))
            headers["Allow"] = ", ".join(scope["method"] for scope in served)
            message = f"{path} does not take {request.method}; it takes {headers['Allow']}"
        elif message == HTTPStatus.NOT_FOUND.phrase:
            message = f"the sidecar has no {path}{SIDECAR_PATHS_HINT}; GET /memory/openapi.json lists them all"
        answer = _problem(exc.status_code, CODES.get(exc.status_code, "error"), message)
        answer.headers.update(headers)
        return answer

    @app.exception_handler(Exception)
    async def unexpected(request: Request, exc: Exception) -> JSONResponse:
        internal_error()
        trace = "".join(traceback.format_exception(exc))
        limited.warning("unexpected", "%s %s failed unexpectedly: %s", request.method, request.url.path, trace)
        return _problem(500, "internal", "unexpected; the sidecar's log has the details")


def _listed(problems: Sequence[str], count: int) -> str:
    """``problems`` are the first of ``count``."""
    more = [f"and {count - len(problems)} more"] if count > len(problems) else []
    return "; ".join([*problems, *more])


def _nearest_key(request: Request, key: str) -> str | None:
    *where, last = key.split(".")
    return _nearest(last, _known_keys(request, where))


def _problem(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse(error_body(status, code, message), status)


# --- keys that a route does not take, by its schema ---
#
# One that is ignored would make a real call of one that was meant to be harmless: `?dry_run=true` where no dry run is.


async def _refuse_unknown(request: Request) -> None:
    given = request.query_params.multi_items()
    if not given:
        return
    operation = _operation(request)
    taken = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
    of_body = _known_keys(request, ())
    unknown = [(key, value) for key, value in given if key not in taken]
    if unknown:
        listed = [_unknown_key(key, value, taken, of_body) for key, value in unknown[:MAX_PROBLEMS]]
        raise UnknownKey(_listed(listed, len(unknown)))


# For the routers of all that is no probe and no page: to a probe's URL a load balancer may add a key.
NO_UNKNOWN_QUERY: Final = Depends(_refuse_unknown)


def _unknown_key(key: str, value: str, taken: Sequence[str], of_body: Iterable[str]) -> str:
    if key in of_body:
        advice = "it belongs in the body"
    elif near := _nearest(key, taken):
        advice = f"did you mean {near}?"
    else:
        advice = f"known: {', '.join(taken)}" if taken else "this path takes none"
    shown, given = plain(masked(key), _SHOWN_LENGTH), plain(masked(value), _SHOWN_LENGTH)
    return f"{shown}: {given!r}: the query has no such key; {advice}"


def _nearest(key: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(key[:_SHOWN_LENGTH], list(known), n=1)), None)


def _known_keys(request: Request, where: Sequence[str | int]) -> list[str]:
    """Return the keys that the body may have, at its top or within the value at ``where``."""
    content = _operation(request).get("requestBody", {}).get("content", {})
    parts = [one["schema"] for one in content.values()]
    components = request.app.openapi().get("components", {}).get("schemas", {})
    for name in where:  # an index says nothing: a list's items are one schema
        parts = [inner for part in parts for key, inner in _keys(part, components) if key == name] or parts
    return [key for part in parts for key, _ in _keys(part, components)]


def _keys(part: Mapping[str, Any], components: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the keys of an object, or of a list's objects, in every form that it may have, and the schema of each."""
    part = components.get(part.get("$ref", "").rpartition("/")[2], part)
    yield from part.get("properties", {}).items()
    for inner in (*part.get("anyOf", ()), *part.get("oneOf", ()), *([part["items"]] if "items" in part else ())):
        yield from _keys(inner, components)


def _operation(request: Request) -> Mapping[str, Any]:
    path = request.app.openapi()["paths"].get(request.scope["route"].path_format, {})
    operation: Mapping[str, Any] = path.get(request.method.lower(), {})
    return operation
