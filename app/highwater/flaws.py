"""Invalid values from outside in words: pydantic's lists of errors, and the part of a value that may be shown.

No sentence shows a secret: neither a field that is `MayHoldSecret`, nor the password in a URL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_SHOWN_LENGTH = 120
_LIKE_A_URL = re.compile("://|:.*(@|%40|%2540|\uff20)", re.DOTALL)
# Where pydantic names a Python type, and not what an operator writes.
_PLAIN = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "tuple_type": "must be a JSON list",
}


def flaw(errors: Iterable[Mapping[str, Any]]) -> str:
    """Return the first of a pydantic error list, of a value from outside: where, and what is wrong, never the value."""
    first = next(iter(errors))
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}".removeprefix(": ")


def without_credentials(url: object) -> object:
    """Return what may be shown of a URL, with ``***`` for what may hold a password: user, query and fragment.

    Nothing is shown of a list or a section, nor of a URL in which a query and a password cannot be told apart.
    """
    if not isinstance(url, str):
        return url if url is None or isinstance(url, int | float) else "***"
    # A URL that was encoded as a whole writes an @ as %40; a full-width one is an @ to those who normalize it.
    *before, rest = re.split("@|%40|%2540|\uff20", url)
    if any(mark in part for part in before for mark in "?#"):
        return "***"
    masked = re.sub("([?#]).*", r"\1***", rest, flags=re.DOTALL)
    return f"***@{masked}" if before else masked


@dataclass(frozen=True, slots=True)
class MayHoldSecret:
    """Marks the type of a field whose value may hold a secret: ``Annotated[str, MayHoldSecret(...)]``.

    ``shown`` returns what of an invalid value an error may show; without it nothing is shown.
    """

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
        key = ".".join(str(masked(part)) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            near = nearest(key)
            yield f"{key}: there is no such key" + (f"; did you mean {near}?" if near else "")
            continue
        shown = "" if error["type"] == "missing" or not key else _shown(error["input"], fields.get(key))
        message = _PLAIN.get(error["type"]) or error["msg"].removeprefix("Value error, ")
        if shown and error["type"] == "tuple_type" and str(error["input"]).startswith("/"):
            message += f", such as {json.dumps([error['input']])}"
        yield f"{key}: {shown if len(shown) <= _SHOWN_LENGTH else ''}{message}".removeprefix(": ")


def _shown(given: object, field: FieldInfo | None) -> str:
    for mark in () if field is None else field.metadata:
        if isinstance(mark, MayHoldSecret):
            return "" if mark.shown is None else f"{mark.shown(given)!r} "
    return f"{masked(given)!r} "


def masked(given: object) -> object:
    """Return a refused value without the credentials of its URLs: one may be given where none belongs, also as key."""
    if isinstance(given, str):
        return without_credentials(given) if _LIKE_A_URL.search(given) else given
    if isinstance(given, Mapping):
        return {masked(key): masked(value) for key, value in given.items()}
    if isinstance(given, list | tuple):
        parts = [masked(each) for each in given]
        return parts if isinstance(given, list) else tuple(parts)
    return given
