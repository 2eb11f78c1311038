"""The keys that a route takes, in its query and in its body, as its schema lists them.

A key that is ignored would make a real call of one that was meant to be harmless: `?dry_run=true` where no dry run is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

from fastapi import Depends, Request

from highwater.process.errors import UnknownKey
from highwater.process.untrusted import masked, plain

MAX_PROBLEMS: Final = 20
_SHOWN_LENGTH: Final = 120


async def _refuse_unknown(request: Request) -> None:
    given = request.query_params.multi_items()
    if not given:
        return
    operation = _operation(request)
    taken = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
    of_body = known_keys(request, ())
    problems = (_problem(key, value, taken, of_body) for key, value in given if key not in taken)
    if listed := list(islice(problems, MAX_PROBLEMS)):
        raise UnknownKey("; ".join(listed))


# For the routers of all that is no probe and no page: to a probe's URL a load balancer may add a key.
NO_UNKNOWN_QUERY: Final = Depends(_refuse_unknown)


def _problem(key: str, value: str, taken: Sequence[str], of_body: Iterable[str]) -> str:
    if key in of_body:
        advice = "it belongs in the body"
    elif near := nearest(key, taken):
        advice = f"did you mean {near}?"
    else:
        advice = f"known: {', '.join(taken)}" if taken else "this path takes none"
    shown, given = plain(masked(key), _SHOWN_LENGTH), plain(masked(value), _SHOWN_LENGTH)
    return f"{shown}: {given!r}: the query has no such key; {advice}"


def nearest(key: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(key[:_SHOWN_LENGTH], list(known), n=1)), None)


def known_keys(request: Request, where: Sequence[str | int]) -> list[str]:
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
