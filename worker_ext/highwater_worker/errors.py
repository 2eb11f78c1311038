"""The exceptions of this package; `answers` turns every one of them into data.

    RequestError             caused by the request; carries the code of the answer
      +- UnknownOpError      code "unknown_op"
      +- BadPayloadError     code "bad_payload"
      +- RefusedError        code "refused"
      +- UnavailableError    code "unavailable"
      +- NoSpaceError        code "no_space"
    UnreadableError          something is there that cannot be read; becomes a note, or code "failed"

Anything else that is raised becomes code "failed", but for SystemExit and KeyboardInterrupt, which pass.
"""

from __future__ import annotations


class RequestError(Exception):
    """The request cannot be served as it was put."""

    code = "failed"


class UnknownOpError(RequestError):
    """No operation has that name."""

    code = "unknown_op"


class BadPayloadError(RequestError):
    """The payload is not a JSON object, or a key or value of it is wrong."""

    code = "bad_payload"


class RefusedError(RequestError):
    """The request is valid, but serving it here and now would be dangerous, or would have no effect."""

    code = "refused"


class UnavailableError(RequestError):
    """The device, or this version of its torch, does not support it; another try changes nothing."""

    code = "unavailable"


class NoSpaceError(RequestError):
    """A file would not leave the disk the room that it should have."""

    code = "no_space"


class UnreadableError(Exception):
    """The engine keeps something in an unknown form."""


def describe(error: BaseException) -> str:
    """Return an error in one printable line, at most 300 characters."""
    try:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001 - an exception whose own __str__ raises must not cost us the answer
        text = type(error).__name__
    return printable(text, 300)


def printable(text: str, limit: int = 200) -> str:
    """Return text in one line of at most `limit` characters, without lone surrogates: strict readers refuse them."""
    line = " ".join(text[: 4 * limit].encode("utf-8", "replace").decode("utf-8").split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
