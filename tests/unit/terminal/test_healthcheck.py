"""``highwater healthcheck``: an exit status, and one line where it is not 0."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner, Result

from highwater.terminal.cli import main, own_url

STATUSES = {"/livez": 200, "/readyz": 503, "/health/deep": 200}


class _Sidecar(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(STATUSES.get(self.path, 404))
        self.end_headers()
        self.wfile.write(b'{"reason": "the engine \x1b[31mstarts"}\n')

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sidecar) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def check(*words: str, **environ: str) -> Result:
    clean: dict[str, str | None] = dict.fromkeys(
        ("HIGHWATER_URL", "HIGHWATER_HOST", "HIGHWATER_PORT", "HIGHWATER_CONTROL_PORT", "HIGHWATER_TLS__CERT_FILE")
    )
    return CliRunner().invoke(main, ["healthcheck", *words], env=clean | environ)


def test_a_sidecar_that_is_well_is_0(url):
    for told in (check("--url", url), check("deep", "--url", url), check(HIGHWATER_PORT=url.rpartition(":")[2])):
        assert (told.exit_code, told.output) == (0, "")


def test_one_that_is_not_is_1_and_a_line(url):
    told = check("ready", "--url", url)
    assert (told.exit_code, told.output.count("\n")) == (1, 1)
    assert "/readyz answered 503" in told.output
    assert "\x1b" not in told.output


@pytest.mark.parametrize("template", ["http://ann:pa55w@{}", "http://ann:pa55w@{}:99999", "{}/?password=pa55w"])
def test_a_password_in_the_url_is_not_shown(url, template):
    """Docker keeps the line, even when nothing answers there."""
    told = check("ready", "--url", template.format(url.removeprefix("http://")))
    assert told.exit_code == 1
    assert "pa55w" not in told.output
    assert "***" in told.output


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1", "ftp://x", "nonsense", "http://[::1"])
def test_nobody_there_is_1_too(url):
    """Docker knows no other status."""
    told = check("--url", url)
    assert (told.exit_code, "no sidecar answers" in told.output) == (1, True)
    is_url = url in ("http://127.0.0.1:1", "https://127.0.0.1:1")
    assert ("it is not a URL such as" in told.output) is not is_url


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://127.0.0.1:8001"),
        ({"HIGHWATER_HOST": "0.0.0.0", "HIGHWATER_PORT": "9"}, "http://127.0.0.1:9"),
        ({"HIGHWATER_PORT": "9", "HIGHWATER_CONTROL_PORT": "10"}, "http://127.0.0.1:10"),
        ({"HIGHWATER_CONTROL_PORT": "tcp://10.0.0.1:9", "HIGHWATER_PORT": "10"}, "http://127.0.0.1:10"),
        ({"HIGHWATER_HOST": "::"}, "http://127.0.0.1:8001"),
        ({"HIGHWATER_HOST": "10.0.0.7"}, "http://10.0.0.7:8001"),
        ({"HIGHWATER_HOST": "fd00::7", "HIGHWATER_TLS__CERT_FILE": "/x"}, "https://[fd00::7]:8001"),
    ],
)
def test_it_asks_where_the_sidecar_listens(environ, url):
    assert own_url(environ) == url
