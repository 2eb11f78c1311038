"""An operation, and the keys of its payload: one JSON object, checked key by key.

Nothing is ignored and nothing is converted: an invalid key or value is refused, naming key, value and what is accepted.
"""

from __future__ import annotations

import gc
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from highwater_worker.errors import BadPayloadError, describe, printable


class Field(NamedTuple):
    default: object  # the value where the key is absent; a key whose default is not accepted is required
    expected: str  # the accepted values, in words
    accepts: Callable[[object], bool]

    def or_null(self) -> Field:
        """Return this field with null accepted, which means the same as no key."""
        return Field(None, f"{self.expected}, or null", lambda value: value is None or self.accepts(value))


class Operation(NamedTuple):
    run: Callable[[object, Mapping[str, Any]], dict[str, Any]]
    """Takes the worker and the checked arguments, and returns the response's body without the head."""
    fields: Mapping[str, Field] = {}
    is_timed: bool = True  # the response ends with `elapsed_ms`

    def respond(self, worker: object, payload: object) -> dict[str, Any]:
        """Check the payload, and return the response's body; a request that is refused raises RequestError.

        Python's garbage collector does not start by itself meanwhile. A thousand encoder entries make a few thousand
        short-lived objects, enough for a full collection now and then, about 100 ms in a process with torch in it, and
        the engine waits. No cycles are left behind.
        """
        arguments = parse_payload(payload, self.fields)
        started, was_enabled = time.perf_counter(), gc.isenabled()
        gc.disable()
        try:
            body = self.run(worker, arguments)
        finally:
            if was_enabled:
                gc.enable()
        elapsed = {"elapsed_ms": round((time.perf_counter() - started) * 1000, 3)} if self.is_timed else {}
        return {**body, **elapsed}


def integer(minimum: int, maximum: int | None = None, *, default: int | None = None) -> Field:
    """Return a field for whole numbers in a closed range; without a maximum there is no upper end."""
    return _ranged("an integer", int, minimum, maximum, default)


def number(minimum: float, maximum: float | None = None, *, default: float | None = None) -> Field:
    return _ranged("a number", (int, float), minimum, maximum, default)


def _ranged(what: str, kinds: Any, minimum: float, maximum: float | None, default: float | None) -> Field:  # noqa: ANN401 - as isinstance's
    def accepts(value: object) -> bool:
        # JSON's true is a bool, and Python's bool is an int. Integers may be beyond what a float can hold; NaN and
        # Infinity pass Python's JSON parser.
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        given = cast("float", value)
        return minimum <= given and (given != math.inf if maximum is None else given <= maximum)

    return Field(default, f"{what} from {minimum:g} {'on' if maximum is None else f'to {maximum:g}'}", accepts)


def text(pattern: str, expected: str) -> Field:
    """Return a field for text that a regular expression matches as a whole; it is required."""
    return Field(None, expected, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


def boolean(*, default: bool) -> Field:
    return Field(default, "true or false", lambda value: isinstance(value, bool))


def choice(*choices: str) -> Field:
    expected = "one of " + ", ".join(f'"{word}"' for word in choices)
    return Field(choices[0], expected, lambda value: isinstance(value, str) and value in choices)


def parse_payload(payload: object, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the arguments for every field, defaults included. Raises BadPayloadError for a wrong key or value."""
    if not isinstance(payload, str):
        raise BadPayloadError(f"payload is of type {type(payload).__name__}; it must be the text of one JSON object")
    try:
        given = json.loads(payload)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested too deep for the parser
        raise BadPayloadError(
            f"payload {_shown(payload)} is not JSON ({describe(error)}); it must be the text of one JSON object"
        ) from error
    if not isinstance(given, dict):
        raise BadPayloadError(f"payload is {_shown(given)}; it must be one JSON object")
    for key, value in given.items():
        if key not in fields:
            raise BadPayloadError(f"payload key {_shown(key)} is unknown; known keys: {', '.join(fields) or 'none'}")
        if not fields[key].accepts(value):
            raise BadPayloadError(f"payload key {_shown(key)} is {_shown(value)}; it must be {fields[key].expected}")
    for key, field in fields.items():
        if key not in given and not field.accepts(field.default):
            raise BadPayloadError(f"payload key {_shown(key)} is missing; it must be {field.expected}")
    return {key: given.get(key, field.default) for key, field in fields.items()}


def _shown(value: object) -> str:
    return printable(repr(value), 80)
