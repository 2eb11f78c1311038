"""The commands as such: their help, and what they load for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner

from highwater.process.admin_token import TOKEN_VARIABLE
from highwater.server.settings import load
from highwater.terminal.cli import DEFAULT_URL, URL_VARIABLE, main
from tests.unit.terminal.reports import as_json, report

# Those that the page describes with each of their options; others have pages of their own.
ALL = [main.commands[name] for name in ("top", "status", "reclaim", "mark", "check", "token", "completion")]
DOCS = Path(__file__).parents[3] / "docs" / "terminal.md"


def helped(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*arguments, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.name)
def test_every_command_has_examples(command):
    text = helped(command.name)
    examples = text.partition("Examples:\n")[2].splitlines()
    assert len(examples) > 1
    assert all(f"highwater {command.name}" in line or "highwater" in line for line in examples), examples


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.name)
def test_every_command_is_documented(command):
    text = DOCS.read_text(encoding="utf-8")
    assert f"`highwater {command.name}" in text or f"highwater {command.name}" in text
    flags = {flag for option in command.params for flag in option.opts if flag.startswith("--")}
    assert [flag for flag in flags if flag not in text] == []


def test_a_token_is_no_flag():
    """A command line can be read by every user of a machine."""
    assert not [param.name for command in ALL for param in command.params if "token" in str(param.name)]


def test_the_commands_own_variables_are_no_typos_to_the_sidecar():
    """It refuses variables that it does not know, and these may stand in the same environment."""
    assert load(environ={URL_VARIABLE: "http://h:1", TOKEN_VARIABLE: "x" * 8}).port == 8001
    assert DEFAULT_URL.endswith(":8001")


@pytest.fixture
def sidecar_url() -> Iterator[str]:
    answers = {
        "/memory": as_json(report()),
        "/memory/events": {"events": []},
        "/memory/findings": {"findings": [], "checks": []},
    }

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers.get(self.path.partition("?")[0], {})).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("command", "shows"), [(["status", "--why", "--ranks"], "GiB free"), (["check"], "failed")])
def test_a_command_that_asks_a_sidecar_loads_none(command, shows, sidecar_url):
    code = (
        "import sys; from highwater.terminal.cli import main\n"
        f"try: main([*{command!r}, '--url', {sidecar_url!r}])\n"
        "except SystemExit as ended: print('ended with', ended.code)\n"
        "server = {'fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'highwater.server.main'}\n"
        "sys.exit(' '.join(server & set(sys.modules)) or 0)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")
    assert shows in told.stdout
