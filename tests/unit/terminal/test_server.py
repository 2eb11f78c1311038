"""A port that cannot be listened on is one line that names the setting to change."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from highwater.process.errors import INVALID
from highwater.server.settings import load
from highwater.terminal.serve import listen, listening_problem


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("exc", "words"),
    [
        (error(errno.EACCES), "port: cannot listen on 127.0.0.1 port 80: permission denied; set port to 1024 or above"),
        (error(errno.EADDRNOTAVAIL), "host: '127.0.0.1' is no address of this machine"),
        (
            OSError(
                errno.EADDRNOTAVAIL, "Cannot assign requested address (while attempting to bind on address ('x', 80))"
            ),
            "host: '127.0.0.1' is no address of this machine (cannot assign requested address); set host to",
        ),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "(name or service not known); set host to"),
        (error(errno.EMFILE), "port: cannot listen on 127.0.0.1 port 80: too many open files"),
    ],
)
def test_the_setting_that_is_wrong_is_named(exc, words):
    assert words in listening_problem(exc, "port", "127.0.0.1", 80)


@pytest.mark.parametrize(("path", "words"), [("/livez", "as a sidecar does"), ("/health", "as vLLM does"), ("/x", "")])
def test_what_has_the_port_is_said_where_it_tells(path, words):
    class There(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == path else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), There) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        port = server.server_port
        problem = listening_problem(error(errno.EADDRINUSE), "control_port", "0.0.0.0", port)
        server.shutdown()
        thread.join()
    assert problem.startswith(f"control_port: cannot listen on 0.0.0.0 port {port}: address already in use")
    assert problem.endswith("; stop it, or set control_port to a port that is free")
    assert words in problem
    assert ("what has it" in problem) is bool(words)


def test_each_port_is_listened_on_at_every_address_of_the_host(monkeypatch):
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = {1: [(*here, ("127.0.0.1", 0)), (*here, ("127.0.0.2", 0))], 2: [(*here, other.getsockname())]}
        monkeypatch.setattr(socket, "getaddrinfo", lambda _, port, *__, **___: found[port])
        listening = listen(load({"port": "1"}, environ={}))
        assert [sock.getsockname()[0] for sock in listening["port"]] == ["127.0.0.1", "127.0.0.2"]
        for sock in listening["port"]:
            sock.close()
        with pytest.raises(SystemExit) as ended:
            listen(load({"port": "1", "control_port": "2"}, environ={}))
    assert ended.value.code == INVALID


def lacks_ipv6(monkeypatch, fails, *hosts):
    """A kernel whose sockets of IPv6 cannot be made, or not bound, and a name of such addresses."""
    families = [(socket.AF_INET6, (host, 0, 0, 0)) if ":" in host else (socket.AF_INET, (host, 0)) for host in hosts]
    found = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in families]
    create = socket.create_server

    def created(address, *, family, **options):
        if family == socket.AF_INET6:
            raise OSError(fails, os.strerror(fails))
        return create(address, family=family, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_server", created)


@pytest.mark.parametrize("fails", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL], ids=["no IPv6", "switched off"])
@pytest.mark.parametrize("hosts", [("::1", "127.0.0.1"), ("127.0.0.1", "::1")], ids=["first", "last"])
def test_an_address_of_a_family_that_the_kernel_lacks_is_left_out(monkeypatch, fails, hosts):
    """`localhost` is ::1 as well in /etc/hosts, whatever the kernel has."""
    lacks_ipv6(monkeypatch, fails, *hosts)
    (sock,) = listen(load({"host": "localhost"}, environ={}))["port"]
    with sock:
        assert sock.getsockname()[0] == "127.0.0.1"


def test_a_host_without_any_address_that_the_kernel_has_ends_the_start(monkeypatch, caplog):
    lacks_ipv6(monkeypatch, errno.EAFNOSUPPORT, "::1")
    with pytest.raises(SystemExit) as ended:
        listen(load({"host": "::1"}, environ={}))
    assert ended.value.code == INVALID
    assert "host: '::1' is no address of this machine" in caplog.text


@pytest.mark.slow("`highwater serve` as a process")
def test_an_address_that_is_none_ends_the_start():
    command = [sys.executable, "-m", "highwater", "serve", "--host", "256.1.1.1", "--log-format", "json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HIGHWATER_")}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == INVALID
    assert "host: '256.1.1.1' is no address of this machine" in ended.stderr
    assert all(line.startswith('{"time": ') for line in ended.stderr.splitlines())
