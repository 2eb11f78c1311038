"""Where the admin token must not be: at the engine, in answers, files, logs, and command lines."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from highwater.process.errors import SidecarError
from highwater.terminal.client import SidecarClient
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.http.test_control_plane import CONTROL, OWN_PATHS, both_on_ports

TOKEN = "hunter2-hunter2-hunter2"
RIGHT, WRONG = {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": f"Bearer {TOKEN}-not"}


async def test_the_token_is_told_to_nobody(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    kept = {"state_file": tmp_path / "state.json", "incidents": {"folder": tmp_path}}
    async with both_on_ports(admin_token=TOKEN, **kept) as sidecar:
        for headers in (RIGHT, WRONG):
            for method, path, body in [
                *CONTROL,
                *(("GET", path, None) for path in OWN_PATHS if path != "/memory/events"),
            ]:
                answer = await sidecar.client.request(method, path, json=body, headers=headers)
                told.append(f"{answer.headers} {answer.text}")
        for target in ("/v1/x/../y", "/nowhere", "/collective_rpc"):
            answer = await sidecar.client.request("POST", target, headers=RIGHT)
            told.append(answer.text)
        told.append(str([call for call in sidecar.fake.calls if not call.path.startswith("/v1/")]))
        told += [repr(sidecar.app), repr(sidecar.app.services), str(vars(sidecar.app.services.control).keys())]
        told += [str(sidecar.app.services.history.events()), repr(sidecar.app.services.poller.current())]
    told += [path.read_text(encoding="utf-8") for path in tmp_path.iterdir() if path.is_file()]
    assert (tmp_path / "state.json").exists()
    assert TOKEN not in "\n".join([*told, caplog.text])


def test_the_process_shows_it_to_nobody(tmp_path):
    settings = {"HIGHWATER_ADMIN_TOKEN": TOKEN, "HIGHWATER_LOG_LEVEL": "debug"}
    with DemoSidecar("http://127.0.0.1:1", folder=tmp_path, settings=settings) as sidecar:
        for token in (TOKEN, f"{TOKEN}-not"):
            with SidecarClient(sidecar.url, token=token) as client, pytest.raises(SidecarError) as caught:
                client.get("/nowhere")
            assert TOKEN not in str(caught.value)
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in sidecar.pids()]
    assert lines
    assert TOKEN.encode() not in b"".join(lines)
    assert TOKEN not in sidecar.log_path.read_text(encoding="utf-8")


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/", "http://127.0.0.1:{port}/x"])
async def test_a_redirect_does_not_take_the_token_away(url):
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 307 x\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    base = url.format(port=server.sockets[0].getsockname()[1])
    async with server:
        with SidecarClient(base, token=TOKEN) as client, pytest.raises(SidecarError) as caught:
            await asyncio.to_thread(client.post, "/memory/reclaim")
    assert (len(seen), TOKEN in str(caught.value)) == (1, False)
