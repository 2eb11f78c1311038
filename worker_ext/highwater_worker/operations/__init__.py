"""The operations of `highwater_rpc`, and the keys of their payloads: one JSON object, checked key by key.

Nothing is ignored and nothing is converted: an invalid key or value is refused, naming key, value and what is accepted.
To add one: a function in this folder, and a row of `OPERATIONS`.
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
from highwater_worker.operations import encoder_cache, memory
from highwater_worker.recorder import MAX_RATE, MAX_SECONDS, MIN_RATE, MIN_SECONDS, RATE, SECONDS


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


_DIRECTORY = text(r"/[^\0]{0,999}", "an absolute path")
_INSTANCE = text("[0-9a-f]{16}", "16 hexadecimal digits, in small letters")
_MAX_SECONDS = number(0, 60, default=0.2)
"""The time that a call may move entries: the engine waits meanwhile, and goes on between two calls."""

OPERATIONS: Mapping[str, Operation] = {
    "budget": Operation(memory.budget, is_timed=False),
    "memory": Operation(memory.memory),
    "encoder_cache": Operation(
        encoder_cache.encoder_cache,
        {"limit": integer(0, encoder_cache.MAX_ENTRIES, default=100), "sort": choice("bytes", "age")},
        is_timed=False,
    ),
    "release": Operation(memory.release),
    "trim": Operation(
        encoder_cache.trim,
        {
            "free_bytes": integer(0).or_null(),
            "keep_bytes": integer(0).or_null(),
            "idle_seconds": number(0).or_null(),
            "host_budget_bytes": integer(0).or_null(),
            "max_seconds": _MAX_SECONDS,
        },
    ),
    "restore": Operation(encoder_cache.restore, {"max_seconds": _MAX_SECONDS}),
    "recorder_start": Operation(
        memory.recorder_start,
        {
            "directory": _DIRECTORY,
            "instance": _INSTANCE,
            "rate": number(MIN_RATE, MAX_RATE, default=RATE),
            "seconds": number(MIN_SECONDS, MAX_SECONDS, default=SECONDS),
        },
    ),
    "recorder_stop": Operation(memory.recorder_stop, {"instance": _INSTANCE}, is_timed=False),
    "snapshot": Operation(
        memory.snapshot,
        {
            "directory": _DIRECTORY.or_null(),
            "name": text("[0-9A-Za-z_]{1,64}", "1 to 64 letters, digits and underscores").or_null(),
            "dry_run": boolean(default=False),
        },
    ),
    "record_stacks": Operation(
        memory.record_stacks, {"minutes": number(0, 60, default=10), "entries": integer(1, 200_000, default=50_000)}
    ),
}
