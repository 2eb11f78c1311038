"""Errors as HTTP responses, of the data plane's shape (``gated_proxy.failures.error_body``), and never a traceback."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from functools import partial
from http import HTTPMethod, HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from gated_proxy.failures import RETRY_AFTER_SECONDS, error_body
from gated_proxy.logs import LimitedLog
from highwater.http.keys import MAX_PROBLEMS, known_keys, nearest
from highwater.process.errors import NotAvailable, RequestError, TooManyWaiting
from highwater.process.untrusted import sentences

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
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        return _problem(422, "invalid", "; ".join([*problems[:MAX_PROBLEMS], *more]))

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


def _nearest_key(request: Request, key: str) -> str | None:
    *where, last = key.split(".")
    return nearest(last, known_keys(request, where))


def _problem(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse(error_body(status, code, message), status)
