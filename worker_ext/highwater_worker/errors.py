"""The exceptions of this package, which `extension` turns into data, and notes on values that could not be read.

    RequestError             caused by the request; carries the code of the response
      +- UnknownOpError      code "unknown_op"
      +- BadPayloadError     code "bad_payload"
      +- RefusedError        code "refused"
      +- UnavailableError    code "unavailable"
      +- NoSpaceError        code "no_space"
    UnreadableError          something is there that cannot be read; becomes a note, or code "failed"

Anything else that is raised becomes code "failed", but for SystemExit and KeyboardInterrupt, which pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class RequestError(Exception):
    code = "failed"

    def __init_subclass__(cls, *, code: str) -> None:
        cls.code = code


class UnknownOpError(RequestError, code="unknown_op"):
    """No operation has that name."""


class BadPayloadError(RequestError, code="bad_payload"):
    """The payload is not a JSON object, or a key or value of it is invalid."""


class RefusedError(RequestError, code="refused"):
    """The request is valid, but serving it here and now would be dangerous, or would have no effect."""


class UnavailableError(RequestError, code="unavailable"):
    """The device, or this version of its torch, does not support it; another try changes nothing."""


class NoSpaceError(RequestError, code="no_space"):
    """A file would not leave the disk the room that it should have."""


class UnreadableError(Exception):
    """The engine keeps something in an unknown form."""


def describe(error: BaseException) -> str:
    """Return an error in one printable line, at most 300 characters."""
    try:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001 - an exception whose own __str__ raises must not cost the response
        text = type(error).__name__
    return printable(text, 300)


def printable(text: str, limit: int = 200) -> str:
    """Return text in one line of at most `limit` characters, without lone surrogates: strict readers refuse them."""
    line = " ".join(text[: 4 * limit].encode("utf-8", "replace").decode("utf-8").split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


class Notes:
    """The values that one operation could not read, and why: a note beside every null but a plain absence."""

    def __init__(self) -> None:
        self._notes: list[dict[str, str]] = []

    def add(self, name: str, reason: str) -> None:
        self._notes.append({"name": name, "reason": printable(reason, 300)})

    def attempt(self, name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - one unreadable value must cost only itself; it is noted by name
            self.add(name, describe(error))
            return None

    def missing(self, name: str, value: T | None, reason: str) -> T | None:
        if value is None:
            self.add(name, reason)
        return value

    def as_list(self) -> list[dict[str, str]]:
        return list(self._notes)
