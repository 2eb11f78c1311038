"""The admin token: given as a setting, or kept in a file that only its owner can read.

::

    admin_token         the token itself
    admin_token_file    the file's content; made where it is missing, and read again when it changes
    neither             made at start in $XDG_STATE_HOME/highwater/PORT.token, and removed at an orderly end by the
                        sidecar that made it; one that a crash left is used again

The sidecar and the commands find the token by the same rules, so that on the sidecar's machine nobody has to copy it.
It is never logged and is in no ``repr``.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from highwater.process.errors import os_reason
from highwater.process.regular import NotPrivate, read_private, replace_private, signature

TOKEN_VARIABLE = "HIGHWATER_ADMIN_TOKEN"  # noqa: S105 - the variable's name
TOKEN_FILE_VARIABLE = "HIGHWATER_ADMIN_TOKEN_FILE"  # noqa: S105 - the variable's name
MIN_LENGTH = 8
MAX_FILE_BYTES = 4096
# Between two checks of the file, however often callers need the token.
LOOK_SECONDS = 1.0

_READ_ONLY = os_reason(OSError(errno.EROFS, os.strerror(errno.EROFS)))
# A volume of a Secret can only be read.
_UPGRADE = (
    "In Kubernetes the file is a Secret's, and the Secret is missing or lacks it: `helm upgrade` makes the chart's own"
    " again"
)
_SET_ANOTHER = "Set admin_token_file (HIGHWATER_ADMIN_TOKEN_FILE) to a file that this user can write, or admin_token"

log = logging.getLogger("highwater.access")


class TokenUnusable(Exception):
    """A token file cannot be used. The message names the file and the reason, and never its content."""


def is_strong_enough(token: str) -> bool:
    """Return whether a text may be a token: 8 or more printable ASCII characters without spaces."""
    return len(token) >= MIN_LENGTH and token.isascii() and token.isprintable() and " " not in token


def default_token_file(port: int, environ: Mapping[str, str]) -> Path | None:
    state = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the XDG specification has others ignored
        return Path(state) / "highwater" / f"{port}.token"
    try:
        return Path.home() / ".local" / "state" / "highwater" / f"{port}.token"
    except RuntimeError:
        return None


def read_token(path: Path) -> str:
    """Read the token in a file; line ends and blanks around it do not count.

    Raises FileNotFoundError, or TokenUnusable: it cannot be read, others can read it, or its content is not a token.
    """
    try:
        content = read_private(path, max_bytes=MAX_FILE_BYTES)
    except NotPrivate as exc:
        raise TokenUnusable(f"{path} {exc}") from exc
    except OSError as exc:
        if isinstance(exc, FileNotFoundError):
            raise
        raise TokenUnusable(f"{path} cannot be read: {os_reason(exc)}") from exc
    # Without decode's own exception, which would show the content.
    token = content.decode("ascii", errors="replace").strip()
    if not is_strong_enough(token):
        raise TokenUnusable(f"{path} holds no token: at least {MIN_LENGTH} printable ASCII characters without spaces")
    return token


@dataclass(frozen=True, slots=True)
class FoundToken:
    """The admin token, or ``None``; and for messages its place, or the places searched and why each failed."""

    value: str | None = field(repr=False)
    source: str


def find_token(url: str, environ: Mapping[str, str]) -> FoundToken:
    """Find the admin token of the sidecar at ``url``.

    It is searched in the environment, then in the file that the environment names, then, for a sidecar on this machine,
    in the file that a sidecar on this port makes. That file's token is sent to loopback addresses only.
    """
    if value := environ.get(TOKEN_VARIABLE):
        return FoundToken(value, TOKEN_VARIABLE)
    if named := environ.get(TOKEN_FILE_VARIABLE):
        return _token_in(Path(named))
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname or "", parts.port or 80
    except ValueError:  # the client reports what is wrong with it
        host, port = "", 0
    if not is_loopback(host):
        return FoundToken(None, f"{TOKEN_VARIABLE} is not set, and the URL is not one of this machine")
    path = default_token_file(port, environ)
    if path is None:
        return FoundToken(None, f"{TOKEN_VARIABLE} is not set, and this user has no home folder")
    found = _token_in(path)
    return found if found.value else FoundToken(None, f"{TOKEN_VARIABLE} is not set, and {found.source}")


def _token_in(path: Path) -> FoundToken:
    try:
        return FoundToken(read_token(path), str(path))
    except FileNotFoundError:
        return FoundToken(None, f"{path} does not exist (the sidecar may run as another user, or elsewhere)")
    except TokenUnusable as exc:
        return FoundToken(None, str(exc))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AdminToken:
    """The token in force: the one given, or that of a file, which may be made for this run alone (``is_temporary``).

    ``path`` is ``None`` where no place for a file is known; ``clock`` is monotonic seconds. ``problem`` is why no token
    is in force, in one sentence.
    """

    def __init__(
        self,
        given: str | None,
        path: Path | None,
        *,
        is_temporary: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem: str | None = None
        self._token = given
        self._path = None if given is not None else path
        self._has_file = given is None
        self._is_temporary = is_temporary
        self._was_made_here = False
        self._clock = clock
        self._signature: tuple[int, ...] | None = None
        self._next_look = 0.0

    def start(self) -> None:
        self.current()
        if not self._has_file:
            log.info("control calls need the admin token that was set (admin_token)")
        elif self._token is not None:
            log.info("control calls need the admin token in %s", self._path)

    def current(self) -> str | None:
        if self._has_file and (now := self._clock()) >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look()
        return self._token

    def source(self, port: int) -> str:
        """Return the token as part of a shell command, without its value."""
        if not self._has_file:
            return "ADMIN_TOKEN"  # the setting's value, which only the operator knows
        return f"$(highwater token --port {port})" if self._is_temporary else f"$(cat {self._path})"

    def close(self) -> None:
        """Remove the file that was made for this run: a token does not outlive its sidecar."""
        if self._path is None or not (self._is_temporary and self._was_made_here):
            return
        # Another sidecar of this user may have replaced it; a foreign token is left alone.
        with suppress(OSError, TokenUnusable):
            if read_token(self._path) == self._token:
                self._path.unlink()

    def _look(self) -> None:
        if self._path is None:
            self._shut("this user has no home folder, and XDG_STATE_HOME is not set")
            return
        try:
            found = _signature(self._path)
            if found is None:
                self._make_at(self._path)
            elif found != self._signature:
                self._token, self._signature = read_token(self._path), found
            elif self._token is None:
                return
        except FileNotFoundError:  # removed between the two looks
            self._next_look = 0.0
        except TokenUnusable as exc:
            self._signature = found
            self._shut(str(exc))
        except OSError as exc:
            self._signature = None  # the same file is read again once it can be
            self._shut(_cannot_be_made(self._path, exc))
        else:
            if self.problem is not None:
                log.info("control calls are served again: the admin token is in %s", self._path)
            self.problem = None

    def _make_at(self, path: Path) -> None:
        token = secrets.token_urlsafe(32)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_private(path, f"{token}\n".encode())
        except FileNotFoundError as exc:  # raised about its folder, in which no file can be made
            raise TokenUnusable(_cannot_be_made(path, exc)) from exc
        self._token, self._signature, self._was_made_here = token, _signature(path), True

    def _shut(self, problem: str) -> None:
        self._token = None
        if problem != self.problem:
            log.error(
                "control calls are refused, because there is no admin token: %s. %s",
                problem,
                _UPGRADE if problem.endswith(_READ_ONLY) else _SET_ANOTHER,
            )
        self.problem = problem


def _cannot_be_made(path: Path, exc: OSError) -> str:
    return f"{path} cannot be made: {os_reason(exc)}"


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        return signature(path)
    except FileNotFoundError:
        return None
