"""Certificates in files: what is refused at start, and what happens when the files change. Handshakes in memory."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from highwater.process.errors import SettingsError
from highwater.process.tls import ReloadedContext, TlsFiles, TlsWatch, engine_context, listening_context, trouble
from highwater.server.settings import load
from tests.patience import patience

NAME = "engine.test"
RSA, ECDSA = trustme.KeyType.RSA, trustme.KeyType.ECDSA


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@dataclass
class Folder:
    """Where the files of one side lie, as PEM."""

    path: Path
    ca: trustme.CA

    @property
    def cert_file(self) -> Path:
        return self.path / "tls.crt"

    @property
    def key_file(self) -> Path:
        return self.path / "tls.key"

    @property
    def ca_file(self) -> Path:
        return self.path / "ca.crt"

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(cert_file=self.cert_file, key_file=self.key_file)

    def issue(self, name: str = NAME, *, key_type: trustme.KeyType = ECDSA) -> trustme.LeafCert:
        """A new certificate in the files."""
        leaf = self.ca.issue_cert(name, key_type=key_type)
        self.cert_file.write_bytes(leaf.cert_chain_pems[0].bytes())
        self.key_file.write_bytes(leaf.private_key_pem.bytes())
        return leaf

    def client(self) -> ssl.SSLContext:
        """A client that believes our authority."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        return context


@pytest.fixture
def folder(tmp_path, ca) -> Folder:
    made = Folder(tmp_path, ca)
    ca.cert_pem.write_to_path(str(made.ca_file))
    made.issue()
    return made


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str = NAME) -> ssl.SSLObject:
    """The client's end of a connection; both sides have said all that a handshake has to say."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done: set[int] = set()
    for _ in range(10):
        for number, end in enumerate(ends):
            try:
                # A client learns in TLS 1.3 only with its first read that its certificate is not accepted.
                end.read(1) if number in done else end.do_handshake()
                done.add(number)
            except ssl.SSLWantReadError:
                if number == 0 and end.version() and not to_server.pending and not to_client.pending:
                    done.add(number)
            except ssl.SSLError:
                if number == 0:
                    raise  # the server's is its alert for the client
                done.discard(number)
    return ends[0]


def serial(folder: Folder, server: ssl.SSLContext) -> int:
    """Of the certificate that a new connection is shown."""
    return int(shake_hands(folder.client(), server).getpeercert()["serialNumber"], 16)


def number(leaf: trustme.LeafCert) -> int:
    return x509.load_pem_x509_certificate(leaf.cert_chain_pems[0].bytes()).serial_number


# --- settings ---


def problems(**flags: object) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load({key.replace("__", "."): str(value) for key, value in flags.items()}, environ={})
    return caught.value.problems


def test_without_settings_there_is_no_tls():
    settings = load(environ={})
    assert listening_context(settings.tls.files) is None
    assert engine_context(settings.engine_url, settings.engine_tls.files) is None


def test_an_https_engine_needs_no_setting():
    settings = load({"engine_url": "https://engine"}, environ={})
    assert engine_context(settings.engine_url, settings.engine_tls.files) is not None


def test_good_files_are_taken(folder):
    flags = {
        f"{side}.{kind}_file": str(folder.path / f"tls.{end}")
        for side in ("tls", "engine_tls")
        for kind, end in (("cert", "crt"), ("key", "key"))
    }
    settings = load(flags | {"engine_url": "https://engine", "engine_tls.ca_file": str(folder.ca_file)}, environ={})
    assert settings.tls.files == folder.files
    assert settings.engine_tls.files == TlsFiles(folder.ca_file, folder.cert_file, folder.key_file)


def test_a_certificate_needs_its_key(folder):
    (problem,) = problems(tls__cert_file=folder.cert_file)
    assert problem == f"tls.key_file: None must be given too: the key of cert_file ({folder.cert_file})"
    (problem,) = problems(tls__key_file=folder.key_file)
    assert problem == f"tls.key_file: '{folder.key_file}' is a key without a certificate: cert_file must be given too"


def test_a_file_that_is_not_there_is_fatal(folder):
    (problem,) = problems(tls__cert_file="/nowhere/tls.crt", tls__key_file=folder.key_file)
    assert problem == "tls.cert_file: '/nowhere/tls.crt' cannot be read: No such file or directory"
    (problem,) = problems(tls__cert_file=folder.cert_file, tls__key_file="/nowhere/tls.key")
    assert problem.startswith("tls.key_file: '/nowhere/tls.key' does not serve: ")
    assert "No such file or directory" in problem


def test_a_file_of_another_kind_is_fatal(folder):
    told = problems(tls__cert_file=folder.key_file, engine_tls__ca_file=folder.key_file, engine_url="https://engine")
    assert told == (
        f"tls.cert_file: '{folder.key_file}' holds no certificate in PEM",
        f"engine_tls.ca_file: '{folder.key_file}' holds no certificate in PEM",
    )
    (problem,) = problems(tls__cert_file=folder.cert_file, tls__key_file=folder.cert_file)
    assert "are not a certificate and its key in PEM" in problem


def test_a_key_of_another_certificate_is_fatal(folder):
    stranger = folder.path / "other.key"
    stranger.write_bytes(folder.ca.issue_cert(NAME).private_key_pem.bytes())
    (problem,) = problems(tls__cert_file=folder.cert_file, tls__key_file=stranger)
    assert problem.endswith(f"the key in {stranger} is not that of the certificate in {folder.cert_file}")


def test_an_encrypted_key_is_fatal(folder):
    key = serialization.load_pem_private_key(folder.key_file.read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    folder.key_file.write_bytes(encrypted)
    (problem,) = problems(tls__cert_file=folder.cert_file, tls__key_file=folder.key_file)
    assert "the key is encrypted" in problem


@pytest.mark.parametrize("url", ["http://engine:8000", "unix:/run/vllm.sock"])
def test_engine_tls_is_for_an_https_engine(folder, url):
    """It would be ignored, and nothing ever is."""
    (problem,) = problems(engine_url=url, engine_tls__ca_file=folder.ca_file)
    assert problem.startswith("engine_tls: ")
    assert problem.endswith(f"is for an https engine_url, and engine_url is '{url}'")


# --- what is spoken ---


def test_nothing_older_than_tls_1_2_is_spoken(folder):
    old = folder.client()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        shake_hands(old, listening_context(folder.files))


def test_http_1_1_is_what_is_negotiated(folder):
    """A client that would rather speak HTTP/2 is told at the handshake."""
    client = folder.client()
    client.set_alpn_protocols(["h2", "http/1.1"])
    assert shake_hands(client, listening_context(folder.files)).selected_alpn_protocol() == "http/1.1"


# --- files that change ---


def test_files_that_did_not_change_are_not_loaded(folder):
    context = listening_context(folder.files)
    assert [context.look(), context.look()] == [False, False]


@pytest.mark.parametrize("key_type", [RSA, ECDSA])
def test_a_new_pair_is_shown_to_new_connections(folder, key_type):
    folder.issue(key_type=RSA)
    context = listening_context(folder.files)
    renewed = folder.issue(key_type=key_type)
    assert context.look() is True
    assert {serial(folder, context) for _ in range(3)} == {number(renewed)}


def test_a_pair_behind_links_is_followed(folder, tmp_path):
    """A secret mounted by Kubernetes: the files are links through a folder that is itself a link, swapped as one."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
    first = Folder(tmp_path / "v1", folder.ca).issue()
    second = Folder(tmp_path / "v2", folder.ca).issue()
    (tmp_path / "..data").symlink_to("v1")
    mounted = Folder(tmp_path / "mounted", folder.ca)
    mounted.path.mkdir()
    for file in (mounted.cert_file, mounted.key_file):
        file.symlink_to(Path("..") / "..data" / file.name)
    context = listening_context(mounted.files)
    assert serial(folder, context) == number(first)
    (tmp_path / "..new").symlink_to("v2")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    assert context.look() is True
    assert serial(folder, context) == number(second)


def test_a_pair_that_does_not_match_changes_nothing(folder, caplog):
    context = listening_context(folder.files)
    before = serial(folder, context)
    renewed = folder.ca.issue_cert(NAME)
    folder.cert_file.write_bytes(renewed.cert_chain_pems[0].bytes())
    with caplog.at_level(logging.INFO, "highwater.tls"):
        assert [context.look(), context.look()] == [False, False]
        assert serial(folder, context) == before
        folder.key_file.write_bytes(renewed.private_key_pem.bytes())
        assert context.look() is True
    assert serial(folder, context) == number(renewed)
    warning, news = caplog.records
    assert (warning.levelname, news.levelname) == ("WARNING", "INFO")
    assert "is not that of the certificate" in warning.message
    assert str(folder.cert_file) in news.message


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("half a certif")])
def test_a_file_that_is_gone_or_broken_changes_nothing(folder, caplog, damage):
    context = listening_context(folder.files)
    before = serial(folder, context)
    damage(folder.cert_file)
    assert [context.look(), context.look()] == [False, False]
    assert serial(folder, context) == before
    assert len(caplog.records) == 1


def test_an_authority_that_is_replaced_is_believed_no_more(folder):
    context = engine_context("https://engine", TlsFiles(ca_file=folder.ca_file))
    server = listening_context(folder.files)
    assert shake_hands(context, server).version()
    trustme.CA().cert_pem.write_to_path(str(folder.ca_file))
    assert context.look() is True
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(context, server)


async def test_the_watch_looks_at_both_sides_until_it_is_cancelled(folder):
    ours = listening_context(folder.files)
    engines = engine_context("https://engine", TlsFiles(ca_file=folder.ca_file))
    watch = asyncio.create_task(TlsWatch(ours, None, engines, every_seconds=0.0).run())
    renewed = folder.issue()
    folder.ca.cert_pem.write_to_path(str(folder.ca_file))
    async with patience():
        while number(renewed) != serial(folder, ours):  # noqa: ASYNC110 - the files are all there is to watch
            await asyncio.sleep(0)
    watch.cancel()
    await asyncio.wait({watch})
    assert watch.cancelled()
    assert engines.look() is False  # it has been looked at


# --- what went wrong ---


def failing(client: ssl.SSLContext, server: ssl.SSLContext, name: str = NAME) -> BaseException:
    """What a client raises, as a library wraps it."""
    with pytest.raises(ssl.SSLError) as caught:
        shake_hands(client, server, name)
    wrapped = RuntimeError()
    wrapped.__cause__ = caught.value
    return wrapped


def believing(folder: Folder, **ours: Path) -> ReloadedContext:
    return engine_context("https://engine", TlsFiles(ca_file=folder.ca_file, **ours))


def test_an_engine_that_nobody_vouches_for_is_told_as_such(folder, tmp_path):
    stranger = Folder(tmp_path / "stranger", trustme.CA())
    stranger.path.mkdir()
    stranger.issue()
    said = trouble(failing(believing(folder), listening_context(stranger.files)))
    assert said.startswith("the engine's certificate is not accepted: ")
    assert said.endswith("; engine_tls.ca_file names the authorities to trust")


def test_an_engine_of_another_name_is_told_as_such(folder):
    said = trouble(failing(believing(folder), listening_context(folder.files), "other.test"))
    assert "not valid for 'other.test'; engine_url must name a host that it was made for" in said


@pytest.mark.parametrize("ours", ["none", "strange"])
def test_an_engine_that_does_not_accept_us_is_told_as_such(folder, tmp_path, ours):
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder.ca_file)
    server.load_cert_chain(folder.cert_file, folder.key_file)
    server.verify_mode = ssl.CERT_REQUIRED
    pair: dict[str, Path] = {}
    if ours == "strange":
        stranger = Folder(tmp_path / "stranger", trustme.CA())
        stranger.path.mkdir()
        stranger.issue()
        pair = {"cert_file": stranger.cert_file, "key_file": stranger.key_file}
    said = trouble(failing(believing(folder, **pair), server))
    assert said.startswith("the engine does not accept our certificate (")
    assert "engine_tls.cert_file" in said


def test_an_engine_without_tls_is_told_as_such(folder):
    to_client = ssl.MemoryBIO()
    client = believing(folder).wrap_bio(to_client, ssl.MemoryBIO(), server_hostname=NAME)
    to_client.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ssl.SSLError) as caught:
        client.do_handshake()
    assert trouble(caught.value) == "the engine does not speak TLS, and engine_url says https"


@pytest.mark.parametrize("exc", [ConnectionRefusedError(), ssl.SSLEOFError(), ssl.SSLZeroReturnError()])
def test_an_engine_that_is_gone_is_no_matter_of_certificates(exc):
    exc.__context__ = ssl.SSLWantReadError()
    assert trouble(exc) is None
