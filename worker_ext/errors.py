"""What can go wrong inside, as exceptions; `answers` turns every one of them into data.

    RequestError             the caller's doing; carries the code of the answer
      +- UnknownOpError      code "unknown_op"
      +- BadPayloadError     code "bad_payload"
      +- RefusedError        code "refused"
      +- UnavailableError    code "unavailable"
      +- NoSpaceError        code "no_space"
    UnreadableError          something is there that we cannot read; becomes a note, or code "failed"

Anything else that is raised becomes code "failed", but for SystemExit and KeyboardInterrupt, which pass.
"""

from __future__ import annotations


class RequestError(Exception):
    """The request cannot be served as it was put."""

    code = "failed"


class UnknownOpError(RequestError):
    """There is no operation of that name."""

    code = "unknown_op"


class BadPayloadError(RequestError):
    """The payload is not a JSON object, or a key or value of it is wrong."""

    code = "bad_payload"


class RefusedError(RequestError):
    """The request is in order, but to do it here and now would be dangerous, or would do nothing of what was meant."""

    code = "refused"


class UnavailableError(RequestError):
    """The device, or this version of its torch, has nothing of the kind; to ask again changes nothing."""

    code = "unavailable"


class NoSpaceError(RequestError):
    """A file would not leave the disk the room that it should have."""

    code = "no_space"


class UnreadableError(Exception):
    """The engine keeps something in a form that we do not know."""


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
