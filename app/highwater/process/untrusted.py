"""Untrusted input: text stripped of control characters, strict JSON, validation errors in words.

No sentence about a flaw shows a secret: neither a field that is `MayHoldSecret`, nor the password in a URL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

MAX_LENGTH = 500
MAX_DEPTH = 8

# Colours and cursor movements; what is left of any other escape is harmless once the escape character is gone.
_TERMINAL = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_Value = TypeVar("_Value")


def printable(text: str, *, instead: str = "", keep: str = "") -> str:
    """Return the text with each control character and half of a character replaced, except those to ``keep``."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else instead for letter in text)


def plain(text: str, most: int = MAX_LENGTH) -> str:
    """Return the text as one line of printable characters, cut to ``most`` characters."""
    # Four times as much is read: enough to fill the line, and a bound to the work.
    shown = printable(_TERMINAL.sub("", text[: most * 4]), instead=" ").strip()
    return shown if len(shown) <= most and len(text) <= most * 4 else shown[: most - 1] + "…"


def cleaned(value: _Value, depth: int = MAX_DEPTH, *, most: int = MAX_LENGTH) -> _Value:
    """Return the value with every text in it plain, cut to ``most`` characters: dataclasses, mappings, sequences."""
    result: Any = value
    if isinstance(value, str):
        result = plain(value, most)
    elif depth == 0 or value is None or isinstance(value, int | float):
        return value
    elif is_dataclass(value) and not isinstance(value, type):
        result = replace(
            value, **{part.name: cleaned(getattr(value, part.name), depth - 1, most=most) for part in fields(value)}
        )
    elif isinstance(value, Mapping):
        result = {
            cleaned(key, depth - 1, most=most): cleaned(item, depth - 1, most=most) for key, item in value.items()
        }
    elif isinstance(value, list | tuple):
        result = tuple(cleaned(item, depth - 1, most=most) for item in value)
    cleaned_value: _Value = result
    return cleaned_value


def parse_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value. Raises ValueError where it is not JSON, or nested too deeply for the parser."""
    try:
        return _DECODER.decode(text)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = whole.get(name)
    return value if isinstance(value, dict) else {}


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


# --- invalid values in words: pydantic's lists of errors, and the part of a value that may be shown ---

_SHOWN_LENGTH = 120
# A URL that was encoded as a whole, or twice, writes them as %3A and %40; full-width ones are the same to those who
# normalize them. Both patterns, and what uses them, take time in proportion to a text's length: anybody may send one.
_COLON = re.compile("[:\uff1a]|%(?:25)*3a", re.IGNORECASE)
_AT = re.compile("[@\uff20\ufe6b]|%(?:25)*40")
# Where pydantic names a Python type or its own parser, and not what an operator writes; of the others see `_wrong`.
_PLAIN = {
    "missing": "is missing",
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    "finite_number": "must be a finite number",
    **dict.fromkeys(("tuple_type", "list_type", "set_type"), "must be a JSON list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "dataclass_type"), "must be a JSON object"),
    "string_type": "must be text",
    "path_type": "must be a path",
}
_SAID_OF_IT = re.compile(
    r"^(?:Value error|Assertion failed), |^[A-Z][\w ]*? should (?=be|have|match|only)| after validation(?=,)"
)
_SIZE = re.compile(r"[\d.]+ ?[kKMGT](?:i|i?B)")


def flaw(errors: Iterable[Mapping[str, Any]]) -> str:
    """Return the first of a pydantic error list, of a value from outside: where, and what is wrong, never the value."""
    first = next(iter(errors))
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {_wrong(first)}".removeprefix(": ")


def _wrong(error: Mapping[str, Any]) -> str:
    """Return what is wrong in our words: ``must be less than or equal to 65535``."""
    said: str = error["msg"]
    own = _SAID_OF_IT.sub(lambda found: "must " if found[0].endswith("should ") else "", said)
    return _PLAIN.get(error["type"], own)


def without_credentials(url: object) -> object:
    """Return what may be shown of a URL, with ``***`` for what may hold a password: user, query and fragment.

    Nothing is shown of a list or a section, nor of a URL in which a query and a password cannot be told apart.
    """
    if not isinstance(url, str):
        return url if url is None or isinstance(url, int | float) else "***"
    *before, rest = _AT.split(url)
    if any(mark in part for part in before for mark in "?#"):
        return "***"
    shown = re.sub("([?#]).*", r"\1***", rest, flags=re.DOTALL)
    return f"***@{shown}" if before else shown


@dataclass(frozen=True, slots=True)
class MayHoldSecret:
    """Marks a type whose value may hold a secret; ``shown`` returns what of it an error may show (else nothing)."""

    shown: Callable[[object], object] | None = None


def sentences(
    errors: Iterable[Mapping[str, Any]],
    nearest: Callable[[str], str | None] = lambda _: None,
    *,
    fields: Mapping[str, FieldInfo] = MappingProxyType({}),
) -> Iterator[str]:
    """Return a pydantic error list as one sentence a problem: key, value, and what would be right. Shows no secret.

    ``nearest`` returns the known key that is most like an unknown one. ``fields`` are those of the model by dotted key:
    what is `MayHoldSecret` among them is shown as that says.
    """
    for error in errors:
        key = ".".join(masked(str(part)) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            near = nearest(key)
            yield f"{key}: there is no such key" + (f"; did you mean {near}?" if near else "")
            continue
        given, metadata = error["input"], fields[key].metadata if key in fields else ()
        mark = next((mark for mark in metadata if isinstance(mark, MayHoldSecret)), None)
        if error["type"] == "missing" or not key or (mark is not None and mark.shown is None):
            shown = ""
        elif mark is not None and mark.shown is not None:
            shown = f"{mark.shown(given)!r} "
        elif isinstance(given, str):
            shown = f"{masked(given)!r} "
        else:
            shown = "" if _may_hold_credentials(repr(given)) else f"{given!r} "
        message = _wrong(error)
        if shown and error["type"] == "tuple_type" and str(error["input"]).startswith("/"):
            message += f", such as {json.dumps([error['input']])}"
        if isinstance(given, str) and error["type"] in {"int_parsing", "float_parsing"} and _SIZE.fullmatch(given):
            message += " of bytes"
        yield f"{key}: {shown if len(shown) <= _SHOWN_LENGTH else ''}{message}".removeprefix(": ")


def masked(text: str) -> str:
    """Return a refused text without the credentials of its URL: one may be given where none belongs, also as a key."""
    return str(without_credentials(text)) if _may_hold_credentials(text) else text


def _may_hold_credentials(text: str) -> bool:
    colon = _COLON.search(text)
    return colon is not None and ("://" in text or _AT.search(text, colon.end()) is not None)
