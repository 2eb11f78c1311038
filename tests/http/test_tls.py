"""TLS on real ports: the server's loop, the engine client, and `highwater serve` as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme

from gated_proxy.transports import HANDSHAKE_SECONDS
from highwater.engine.client import Engine
from highwater.process.errors import EngineUnreachable, EngineUntrusted
from highwater.process.tls import TlsFiles, engine_context, listening_context
from highwater.terminal.demo.process import free_port
from tests.fakes.upstream import Upstream
from tests.http.conftest import serving
from tests.patience import LIMIT_SECONDS, until

TOKEN = "correct-horse-battery"


class Certificates:
    """A folder with an authority, and pairs that it vouches for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ca = trustme.CA()
        self.ca_file = path / "ca.crt"
        self.ca.cert_pem.write_to_path(str(self.ca_file))

    def issue(self, name: str) -> TlsFiles:
        """A new pair of that name, in place of the one from before."""
        leaf = self.ca.issue_cert("127.0.0.1", common_name=name)
        files = TlsFiles(None, self.path / f"{name}.crt", self.path / f"{name}.key")
        leaf.cert_chain_pems[0].write_to_path(str(files.cert_file))
        leaf.private_key_pem.write_to_path(str(files.key_file))
        return files

    def believing(self, files: TlsFiles | None = None) -> TlsFiles:
        """The same, and our authority believed."""
        return TlsFiles(self.ca_file, files and files.cert_file, files and files.key_file)

    def client(self) -> ssl.SSLContext:
        """A client that believes our authority."""
        return ssl.create_default_context(cafile=self.ca_file)

    def engine(self, *, asks: bool) -> ssl.SSLContext:
        """An engine's side, that may ask its clients for a certificate."""
        files = self.issue("engine")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca_file)
        context.load_cert_chain(files.cert_file, files.key_file)
        context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE
        return context


@pytest.fixture
def certificates(tmp_path) -> Certificates:
    return Certificates(tmp_path)


async def serial(port: int, client: ssl.SSLContext) -> str:
    """Of the certificate that a new connection is shown."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
    try:
        return writer.get_extra_info("peercert")["serialNumber"]
    finally:
        del reader
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


# --- the listening side ---


async def test_a_new_certificate_is_for_new_connections(certificates):
    go_on = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    context = listening_context(certificates.issue("sidecar"))
    async with serving(app, ssl_context_factory=lambda *_: context) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=certificates.client())
        old = writer.get_extra_info("peercert")["serialNumber"]
        writer.write(b"GET / HTTP/1.1\r\nhost: sidecar\r\nconnection: close\r\n\r\n")
        await reader.readuntil(b"first ")
        certificates.issue("sidecar")
        assert await serial(port, certificates.client()) == old
        assert context.look() is True
        assert await serial(port, certificates.client()) != old
        go_on.set()
        assert b"https" in await reader.read()
        writer.close()


# --- the engine's side ---


@contextlib.asynccontextmanager
async def tls_engine(upstream: Upstream, context: ssl.SSLContext) -> AsyncIterator[str]:
    server = await upstream.listen_with_tls(context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_an_engine_is_believed_by_the_authority_of_the_settings(certificates, upstream):
    files = certificates.believing()
    async with tls_engine(upstream, certificates.engine(asks=False)) as url:
        context = engine_context(url, files)
        async with Engine(url, ssl_context=context, request_seconds=LIMIT_SECONDS) as engine:
            assert await engine.exists("/health")
        trustme.CA().cert_pem.write_to_path(str(files.ca_file))
        assert context.look() is True
        async with Engine(url, ssl_context=context, request_seconds=LIMIT_SECONDS) as engine:
            with pytest.raises(EngineUntrusted, match=r"is not accepted: .*engine_tls\.ca_file names"):
                await engine.exists("/health")


async def test_an_engine_that_asks_for_a_certificate_gets_ours(certificates, upstream):
    ours = certificates.believing(certificates.issue("sidecar"))
    async with tls_engine(upstream, certificates.engine(asks=True)) as url:
        async with Engine(url, ssl_context=engine_context(url, ours), request_seconds=LIMIT_SECONDS) as engine:
            assert await engine.exists("/health")
        async with Engine(
            url, ssl_context=engine_context(url, certificates.believing()), request_seconds=LIMIT_SECONDS
        ) as engine:
            with pytest.raises(EngineUnreachable, match=r"set engine_tls\.cert_file"):
                await engine.exists("/health")


async def test_an_engine_without_tls_is_told_as_such(certificates):
    async def refuse(reader, writer) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with (
        server,
        Engine(url, ssl_context=engine_context(url, certificates.believing()), request_seconds=LIMIT_SECONDS) as engine,
    ):
        with pytest.raises(EngineUntrusted, match="does not speak TLS"):
            await engine.exists("/health")


async def test_an_https_engine_is_not_believed_without_a_context(certificates, upstream):
    async with (
        tls_engine(upstream, certificates.engine(asks=False)) as url,
        Engine(url, request_seconds=LIMIT_SECONDS) as engine,
    ):
        with pytest.raises(EngineUntrusted):
            await engine.exists("/health")


# --- the whole ---


@contextlib.asynccontextmanager
async def highwater(
    folder: Path, ca_file: Path | None = None, port: int | None = None, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    """`highwater serve` as a process, and a client of its control plane."""
    port = port or free_port()
    variables = {f"HIGHWATER_{key.upper()}": str(value) for key, value in settings.items()}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HIGHWATER_")}
    log_path = folder / "sidecar.log"
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "highwater", "serve", "--port", str(port)),
            env=kept | variables,
            stdout=log,
            stderr=log,
        )
    verify = ssl.create_default_context(cafile=ca_file)
    base = f"{'https' if ca_file else 'http'}://127.0.0.1:{settings.get('control_port', port)}"
    try:
        async with httpx.AsyncClient(base_url=base, verify=verify, trust_env=False, timeout=LIMIT_SECONDS) as client:
            await until(lambda: answers(client), pause_seconds=0.05)
            yield client
    finally:
        process.terminate()
        await process.wait()
        sys.stdout.write(log_path.read_text())  # shown where the test fails


async def answers(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.ConnectError):
        return (await client.get("/livez")).status_code == 200
    return False


@pytest.mark.slow("`highwater serve` as a process")
async def test_serve_speaks_tls_on_both_sides(certificates, upstream, tmp_path):
    ours, clients = certificates.issue("sidecar"), certificates.issue("listening")
    body = os.urandom(3_000_000)
    async with (
        tls_engine(upstream, certificates.engine(asks=True)) as url,
        highwater(
            tmp_path,
            certificates.ca_file,
            engine_url=url,
            engine_tls__ca_file=certificates.ca_file,
            engine_tls__cert_file=ours.cert_file,
            engine_tls__key_file=ours.key_file,
            tls__cert_file=clients.cert_file,
            tls__key_file=clients.key_file,
            admin_token=TOKEN,
        ) as client,
    ):
        echo = await client.post("/v1/anything", content=body)
        assert (echo.status_code, echo.content) == (200, body)
        assert (await client.get("/memory")).json()["engine"]["url"] == url
        assert (await client.post("/memory/marks", json={"name": "a"})).status_code == 401
        token = {"authorization": f"Bearer {TOKEN}"}
        assert (await client.post("/memory/marks", json={"name": "a"}, headers=token)).status_code == 201
        port = client.base_url.port
        old = await serial(port, certificates.client())
        certificates.issue("listening")

        async def renewed() -> bool:
            return await serial(port, certificates.client()) != old

        await until(renewed, pause_seconds=0.05)
        assert (await client.get("/livez")).status_code == 200  # on the connection from before


@pytest.mark.slow("`highwater serve` as a process")
async def test_both_ports_speak_tls_with_one_certificate_and_leave_who_begins_none(certificates, tmp_path):
    clients = certificates.issue("listening")
    files = {"tls__cert_file": clients.cert_file, "tls__key_file": clients.key_file}
    data, control = free_port(), free_port()
    settings = {"engine_url": "http://127.0.0.1:9", "control_port": control, **files}
    async with highwater(tmp_path, certificates.ca_file, data, **settings) as client:
        assert (await client.get("/memory")).status_code == 200
        assert (await client.get(f"https://127.0.0.1:{data}/v1/models")).status_code == 502
        assert await serial(data, certificates.client()) == await serial(control, certificates.client())
        silent = [await asyncio.open_connection("127.0.0.1", port) for port in [data] * 64 + [control]]
        async with asyncio.timeout(6 * HANDSHAKE_SECONDS):  # noqa: TID251 - uvicorn's own would wait for a minute
            ends = await asyncio.gather(*(reader.read() for reader, _ in silent), return_exceptions=True)
        for _, writer in silent:
            writer.close()
    assert all(end == b"" or isinstance(end, ConnectionError) for end in ends)


@pytest.mark.slow("`highwater serve` as a process")
async def test_an_engine_that_is_not_believed_is_told_by_the_report_and_the_answer(certificates, upstream, tmp_path):
    trustme.CA().cert_pem.write_to_path(str(stranger := tmp_path / "stranger.crt"))
    async with (
        tls_engine(upstream, certificates.engine(asks=False)) as url,
        highwater(tmp_path, engine_url=url, engine_tls__ca_file=stranger) as client,
    ):

        async def told() -> bool:
            hint = (await client.get("/memory")).json()["engine"]["hint"]
            return "engine_tls.ca_file names the authorities to trust" in hint

        await until(told, pause_seconds=0.05)
        report = (await client.get("/memory")).json()
        assert report["engine"]["state"] == "starting"
        assert "nothing answers" not in report["engine"]["hint"]
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.post("/v1/anything", content=b"secret")).status_code == 502
    assert upstream.calls == []
