"""TLS on both sides, from files that are checked regularly, because certificates are renewed while the sidecar runs.

::

    clients ──TLS──► sidecar ──TLS──► engine
            cert_file            ca_file: the authorities trusted
            key_file             cert_file, key_file: for an engine that asks for a client certificate

A context is never changed in place. ``load_cert_chain`` on one in use would leave it without a key between two calls,
would keep a certificate of the old kind (RSA) beside a new one of another (ECDSA) and serve either, and a certificate
authority once loaded would be trusted until the end. So new files make a new context for connections from then on;
those that are open keep theirs. Files that do not load change nothing.

Verification cannot be turned off, and no passphrase is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from highwater.process.regular import signature

CHECK_SECONDS = 5.0
# X509_V_ERR_*_MISMATCH (openssl/x509_vfy.h): the certificate is good, and for another name or address.
_NAME_MISMATCHES = frozenset({62, 64})
# SSLErrors that say nothing about keys or certificates: data is waited for, or the peer left.
_NO_TROUBLE = (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError, ssl.SSLZeroReturnError)

log = logging.getLogger("highwater.tls")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of one side: authorities (None: the system's), the sidecar's certificate and chain, its key."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __iter__(self) -> Iterator[Path]:
        return iter(path for path in (self.ca_file, self.cert_file, self.key_file) if path is not None)


class ReloadedContext(ssl.SSLContext):
    """Wraps each connection by the context last made from some files.

    asyncio, uvloop and httpx use nothing of a context but ``wrap_bio``. This one itself has no certificate and trusts
    nobody, so that any other use fails instead of ignoring the files.

    ``make`` raises ``ValueError`` where the files do not serve; ``side`` is the name in the log.
    """

    def __new__(cls, *_: object) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, make: Callable[[TlsFiles], ssl.SSLContext], files: TlsFiles, side: str) -> None:
        self._make = make
        self._files = files
        self._side = side
        self._signatures = _signatures(files)
        self._current = make(files)

    def look(self) -> bool:
        """Load the files if they changed, and return whether connections from now on use new ones."""
        signatures = _signatures(self._files)
        if signatures == self._signatures:
            return False
        # Also when they do not load: a problem with these very files is logged once.
        self._signatures = signatures
        try:
            self._current = self._make(self._files)
        except ValueError as exc:
            log.warning("%s: changed files are not used, those from before stay in force: %s", self._side, exc)
            return False
        log.info("%s: loaded anew: %s", self._side, ", ".join(map(str, self._files)))
        return True

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return self._current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


class TlsWatch:
    """Checks the files of contexts every few seconds; None is a side without TLS.

    Kubernetes renews a mounted secret by pointing a link elsewhere: a check follows links, and needs no event.
    """

    def __init__(self, *contexts: ReloadedContext | None, every_seconds: float = CHECK_SECONDS) -> None:
        self._contexts = [context for context in contexts if context is not None]
        self._every_seconds = every_seconds

    def look(self) -> None:
        for context in self._contexts:
            context.look()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_seconds)
            self.look()


def listening_context(files: TlsFiles) -> ReloadedContext | None:
    """Return the context for clients; None is plain HTTP. Raises ValueError where the files do not load."""
    if files.cert_file is None:
        return None
    return ReloadedContext(lambda given: _configured(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), given), files, "tls")


def engine_context(url: str, files: TlsFiles) -> ReloadedContext | None:
    """Return the context for the engine, None where it is not https. Raises ValueError where files do not load."""
    return ReloadedContext(_client_context, files, "engine_tls") if url.startswith("https:") else None


def check_certificate(cert_file: Path) -> None:
    """Check that the file holds certificates. Raises ValueError where it does not, or cannot be read."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=cert_file)
    except ssl.SSLError as exc:
        raise ValueError("holds no certificate in PEM") from exc
    except OSError as exc:
        raise ValueError(f"cannot be read: {exc.strerror}") from exc


def check_pair(cert_file: Path, key_file: Path) -> None:
    """Check that certificate and key load and belong together. Raises ValueError where they do not."""
    _load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert_file, key_file)


def trouble(exc: BaseException) -> str | None:
    """Return why TLS with the engine fails, and the setting to change; None: the exception is about something else."""
    cause: BaseException | None = exc
    while cause is not None and (not isinstance(cause, ssl.SSLError) or isinstance(cause, _NO_TROUBLE)):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if isinstance(cause, ssl.SSLCertVerificationError):
        right = (
            "engine_url must name a host that it was made for"
            if cause.verify_code in _NAME_MISMATCHES
            else "engine_tls.ca_file names the authorities to trust"
        )
        return f"the engine's certificate is not accepted: {cause.verify_message.rstrip('.')}; {right}"
    reason = cause.reason or str(cause)
    if reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"}:
        return "the engine does not speak TLS, and engine_url says https"
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return (
            f"the engine does not accept our certificate ({reason.replace('_', ' ').lower()}); "
            "engine_tls.cert_file and engine_tls.key_file name it"
        )
    return f"no TLS with the engine: {reason.replace('_', ' ').lower()}"


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files.ca_file)
    except (OSError, ValueError) as exc:
        raise ValueError(f"{files.ca_file}: holds no certificate in PEM, or cannot be read ({exc})") from exc
    return _configured(context, files)


def _configured(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if files.cert_file is not None and files.key_file is not None:
        _load_pair(context, files.cert_file, files.key_file)
    return context


def _load_pair(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the key in {key_file} is not that of the certificate in {cert_file}") from exc
        raise ValueError(f"{cert_file} and {key_file} are not a certificate and its key in PEM ({exc})") from exc
    except OSError as exc:
        raise ValueError(f"{cert_file} and {key_file} cannot both be read: {exc.strerror}") from exc


def _no_passphrase() -> str:
    # OpenSSL would ask for it on the terminal, and wait.
    raise ValueError("the key is encrypted; give one that is not, readable for the sidecar alone")


def _signatures(files: TlsFiles) -> list[tuple[int, ...] | None]:
    found: list[tuple[int, ...] | None] = []
    for path in files:
        try:
            found.append(signature(path))
        except OSError:
            found.append(None)
    return found
