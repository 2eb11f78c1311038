"""The terminal's commands against real ports: a sidecar with a fake engine, one without any, and what is no sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import pty
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import trustme
from click.testing import CliRunner, Result

from highwater.act.rules import PolicySettings
from highwater.terminal.cli import main
from highwater.terminal.client import SidecarClient
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.top.feed import follow_memory
from tests.fakes.engine import IMAGE_BYTES, FakeEngine
from tests.http.conftest import serving
from tests.http.test_control_plane import TOKEN, both_on_ports
from tests.unit.terminal.reports import as_json, report

pytestmark = pytest.mark.slow("commands as processes")

PATIENCE = 60.0
ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    ["top"], ["top", "--json"], ["status"], ["check"], ["reclaim"], ["incidents"], ["policy", "get"], ["events"],
    ["events", "-f"], ["get", "/memory"],
)  # fmt: skip


def ran(*arguments: str, url: str, text: str | None = None, **environ: str) -> Result:
    """One command in this process; what it raises but to exit is a failure."""
    return CliRunner().invoke(
        main, arguments, env={"HIGHWATER_URL": url, "HIGHWATER_ADMIN_TOKEN": "", "COLUMNS": "100", **environ},
        input=text, catch_exceptions=False,
    )  # fmt: skip


async def run(*arguments: str, url: str, **environ: str) -> Result:
    """The same beside a sidecar that lives on this loop."""
    return await asyncio.to_thread(ran, *arguments, url=url, **environ)


shares = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _guarded():
    async with both_on_ports(admin_token=TOKEN, policy=PolicySettings(), poll_seconds=0.5) as sidecar:
        sidecar.fake.model = "Qwen/模型"
        sidecar.fake.start_again()  # another engine, which is asked anew
        for _ in range(2):
            await sidecar.poll()
        yield sidecar


@pytest.fixture
def sidecar(_guarded):
    """With an admin token, and the default rules."""
    _guarded.fake.workers[0].entries.clear()
    return _guarded


@pytest.fixture
def url(sidecar):
    return f"http://127.0.0.1:{sidecar.port}"


# --- a sidecar with an engine ---


@shares
async def test_top_prints_once_where_nobody_could_see_it_move(sidecar, url):
    result = await run("top", url=url)
    assert result.exit_code == 0
    assert "ranks 2 of 2" in result.output
    assert "\x1b" not in result.output
    assert max(map(len, result.output.splitlines())) <= 100


@shares
async def test_top_as_json_is_the_report(sidecar, url):
    result = await run("top", "--once", "--json", url=url)
    (line,) = result.output.splitlines()
    told = (await sidecar.client.get("/memory")).json()
    assert json.loads(line)["ranks"][0]["total_bytes"] == told["ranks"][0]["total_bytes"]


@shares
async def test_letters_that_the_terminal_has_not_are_no_end(url):
    """A terminal may know ASCII only; a model may be called anything."""
    told = [sys.executable, "-m", "highwater", "top", "--url", url]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "100"}
    done = await asyncio.to_thread(subprocess.run, told, env=env, capture_output=True, check=True)
    assert done.stdout.isascii()
    assert b"Qwen/??" in done.stdout


@shares
async def test_status_tells_scripts_and_people(sidecar, url):
    await sidecar.poll()
    people, scripts = await run("status", url=url), await run("status", "--json", url=url)
    assert people.exit_code == scripts.exit_code == 0, people.output
    assert people.output.startswith("FINE: ")
    assert json.loads(scripts.output)["status"] == "ok"


@shares
async def test_a_reset_is_told_with_what_it_freed(sidecar, url):
    assert (await run("mark", "before bench", url=url, HIGHWATER_ADMIN_TOKEN=TOKEN)).exit_code == 0
    sidecar.fake.serve_images()
    await sidecar.poll()
    since = await run("status", "--since", "before bench", "--json", url=url)
    assert since.exit_code in (0, 1)
    result = await run("reclaim", "reset_encoder_cache", url=url, HIGHWATER_ADMIN_TOKEN=TOKEN)
    assert result.exit_code == 0, result.output
    assert "encoder cache" in result.output
    assert re.search(r"encoder cache +3\.69 GiB +3\.69 GiB", result.output)
    assert "reset_encoder_cache done" in " ".join((await run("status", url=url)).output.split())


@shares
async def test_a_trim_frees_as_much_as_was_asked_for(sidecar, url):
    for worker in sidecar.fake.workers:
        worker.entries = {f"t{number}": IMAGE_BYTES for number in range(10)}
    result = await run("reclaim", "--free", "200MiB", "--json", url=url, HIGHWATER_ADMIN_TOKEN=TOKEN)
    assert result.exit_code == 0, result.output
    (trim,) = json.loads(result.output)["results"]
    assert trim["remedy"] == "trim_encoder_cache"
    assert sum(sidecar.fake.workers[0].spilled.values()) >= 200 * 2**20


@shares
async def test_what_is_refused_is_no_success(sidecar, url):
    sidecar.fake.workers_refuse = "the cache is a connector's"
    try:
        result = await run("reclaim", "trim_encoder_cache", url=url, HIGHWATER_ADMIN_TOKEN=TOKEN)
    finally:
        sidecar.fake.workers_refuse = None
    assert result.exit_code == 1
    assert "the cache is a connector's" in result.output


@shares
async def test_a_remedy_that_does_not_exist_is_said_with_those_that_do(sidecar, url):
    result = await run("reclaim", "magic", url=url, HIGHWATER_ADMIN_TOKEN=TOKEN)
    assert result.exit_code == 1
    assert "'magic' is not known; allowed: release" in result.stderr


@shares
@pytest.mark.parametrize(("token", "words"), [("", "found no token"), ("wrong-wrong", "is not this sidecar's")])
@pytest.mark.parametrize("command", [["reclaim"], ["mark", "x"]])
async def test_a_wrong_token_is_one_line(sidecar, url, command, token, words):
    sidecar.fake.calls.clear()
    result = await run(*command, url=url, HIGHWATER_ADMIN_TOKEN=token)
    assert result.exit_code == 1
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert sidecar.fake.resets() == []


def denials(sidecar) -> float:
    """How many control calls were denied, for whatever reason."""
    page = sidecar.app.services.exporter.page().decode()
    return sum(map(float, re.findall(r"^highwater_control_denied_total\{.*\} (.*)$", page, re.MULTILINE)))


@shares
@pytest.mark.parametrize(("token", "level"), [("", "warn"), ("wrong-wrong", "fail"), (TOKEN, "ok")])
async def test_check_knows_whether_we_may_act(sidecar, url, token, level):
    sidecar.fake.calls.clear()
    before = denials(sidecar)
    result = await run("check", "--json", url=url, HIGHWATER_ADMIN_TOKEN=token)
    assert denials(sidecar) - before == (1 if level == "fail" else 0)
    found = {finding["name"]: finding for finding in json.loads(result.output)["findings"]}
    assert found["control"]["level"] == level
    assert result.exit_code == {"ok": 0, "warn": 1, "fail": 2}[level]
    # The engine was another one a moment ago: an incident, which is over, and no fault of the set-up.
    assert {name for name, finding in found.items() if finding["level"] == "warn"} - {"control"} == set()
    assert {name for name, finding in found.items() if finding["level"] == "note"} == {"incidents", "recorder", "start"}
    assert sidecar.fake.resets() == []


@shares
async def test_check_knows_a_sidecar_that_trusts_loopback():
    async with both_on_ports() as open_one:
        result = await run("check", url=f"http://127.0.0.1:{open_one.port}")
    assert "trust_loopback is set" in result.output
    assert "the policy has no rules" in result.output


# --- an engine without a sidecar ---


@shares
async def test_status_and_check_ask_an_engine_that_has_no_sidecar(tmp_path):
    fake = FakeEngine()
    state = {"XDG_STATE_HOME": str(tmp_path)}
    async with serving(fake) as port:
        at = f"http://127.0.0.1:{port}"
        status, check = [
            await run(command, "--engine-url", at, url="http://127.0.0.1:9", **state) for command in ("status", "check")
        ]
        told = await run("status", "--engine-url", at, "--json", url="http://127.0.0.1:9", **state)
    answer = json.loads(told.output)
    first = answer["verdict"]["sentence"]
    # Of a policy that nobody runs.
    assert [answer["verdict"][key] for key in ("next", "do")] == [None, None]
    assert [answer["report"]["verdict"][key] for key in ("next", "do")] == [None, None]
    assert status.output.startswith(f"FINE: {first}"[:60])
    assert f"highwater serve --engine-url {at}" in status.output
    assert check.output.startswith("FINE: ")
    assert "2 of 2 report" in check.output
    for line in ("policy      needs a sidecar", "incidents   needs a sidecar", "control     needs a sidecar"):
        assert line in check.output
    assert (status.exit_code, fake.resets(), list(tmp_path.iterdir())) == (0, [], [])


def test_an_engine_that_is_not_there_is_said():
    result = ran("status", "--engine-url", "http://127.0.0.1:9", url="")
    assert result.exit_code == 1
    assert "http://127.0.0.1:9" in result.output
    refused = ran("check", "--engine-url", "gpu-7", url="")
    assert (refused.exit_code, refused.stderr.startswith("highwater: engine_url: 'gpu-7' must be ")) == (2, True)


# --- the start of a sidecar ---


def test_a_start_is_three_lines_and_a_taken_port_is_one(lonely):
    lines = lonely.log_path.read_text().splitlines()
    serving_at = next(number for number, line in enumerate(lines) if "serving " in line)
    assert serving_at == 2, lines
    command = [sys.executable, "-m", "highwater", "serve", "--port", str(lonely.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert f"port {lonely.port}: address already in use (what has it answers /livez, as a sidecar does)" in line


# --- a sidecar without an engine ---


@pytest.fixture(scope="module")
def lonely(tmp_path_factory) -> Iterator[DemoSidecar]:
    """`highwater serve` beside nothing."""
    with DemoSidecar("http://127.0.0.1:9", folder=tmp_path_factory.mktemp("lonely")) as started:
        yield started


@pytest.mark.parametrize(
    ("command", "status"), [(["top"], 0), (["status"], 1), (["check"], 1), (["reclaim"], 1), (["mark", "x"], 0)]
)
def test_a_sidecar_without_an_engine_says_so(lonely, command, status):
    result = ran(*command, url=lonely.url)
    assert result.exit_code == status, result.output
    assert any(words in result.output for words in ("http://127.0.0.1:9", "no rank could be read")), result.output


# --- what is no sidecar ---


class Page(http.server.BaseHTTPRequestHandler):
    """A web server that knows nothing of us, and answers everything alike."""

    status, kind, body = 200, "text/html", b"<html>Welcome to nginx!</html>"

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Type", self.kind)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_PUT = do_GET  # noqa: N815 - the library's names

    def log_message(self, *_):
        pass


class NotFound(Page):
    status, body = 404, b"<html>404 Not Found</html>"


@contextlib.contextmanager
def page_server(handler) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def _listener() -> Iterator[str]:
    """It takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _nothing() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("there", "words"),
    [
        (_nothing, "no sidecar answers at"),
        (lambda: page_server(Page), "a web page"),
        (lambda: page_server(NotFound), "404 Not Found"),
        (lambda: contextlib.nullcontext("nonsense:x"), "is not the URL"),
    ],
    ids=["nothing", "nginx", "not found", "no URL"],
)
def test_what_is_no_sidecar_is_one_line(command, there, words):
    with there() as url:
        result = ran(*command, url=url)
    assert (result.exit_code, result.stdout) == (3, "")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr


def test_a_host_that_does_not_exist_is_one_line():
    """Once only: a resolver takes its time to say so."""
    result = ran("status", url="https://name.invalid")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (3, "", 1)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
async def test_the_engine_itself_is_no_sidecar(command):
    fake = FakeEngine()
    async with serving(fake) as port:
        result = await run(*command, url=f"http://127.0.0.1:{port}")
    assert result.exit_code == 3
    assert "no Highwater sidecar (vLLM itself" in result.stderr
    assert fake.resets() == []


def test_who_never_answers_is_not_waited_for_long(monkeypatch):
    """Also where the call itself may take minutes: first it is asked who it is."""
    monkeypatch.setattr("highwater.terminal.asking.ASK_SECONDS", 0.3)
    with _listener() as url:
        started = time.monotonic()
        result = ran("reclaim", url=url)
    assert result.exit_code == 3
    assert "does not answer in time" in result.stderr
    assert time.monotonic() - started < PATIENCE  # by the clock: the call itself would wait for 600 s


# --- TLS ---


async def _told(scope, receive, send, findings=None):
    """As little of a sidecar as `status` asks for."""
    del receive
    body = {"/memory/events": {"events": []}, "/memory/findings": findings}.get(scope["path"]) or as_json(report())
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@pytest.mark.parametrize("command", [["status", "--why"], ["status", "--why", "--json"], ["check"]], ids=" ".join)
async def test_findings_that_no_sidecar_sends_are_one_line(command):
    telling = partial(_told, findings={"findings": [7], "checks": [7]})
    async with serving(telling, interface="asgi3") as port:
        result = await run(*command, url=f"http://127.0.0.1:{port}")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (3, "", 1)
    assert "/memory/findings is not what a sidecar of this version answers" in result.stderr


async def test_a_sidecar_that_speaks_tls(tmp_path):
    authority, leaf = trustme.CA(), tmp_path / "leaf.pem"
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(leaf))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(leaf)
    ours = {"SSL_CERT_FILE": str(tmp_path / "ca.pem")}
    async with serving(_told, ssl_context_factory=lambda *_: context) as port, serving(_told) as plain:
        assert (await run("status", url=f"https://127.0.0.1:{port}", **ours)).exit_code == 0
        stranger = await run("status", url=f"https://127.0.0.1:{port}")
        assert (stranger.exit_code, "SSL_CERT_FILE names" in stranger.stderr) == (3, True)
        unencrypted = await run("status", url=f"http://127.0.0.1:{port}", **ours)
        assert (unencrypted.exit_code, "https://" in unencrypted.stderr) == (3, True)
        too_much = await run("status", url=f"https://127.0.0.1:{plain}", **ours)
        assert (too_much.exit_code, "try http://" in too_much.stderr) == (3, True)


# --- a terminal ---


class Terminal:
    """A command on a terminal of its own, and what it has written so far."""

    def __init__(self, *arguments: str, lines: int = 24, columns: int = 80, **environ: str) -> None:
        self._primary, self.secondary = pty.openpty()
        termios.tcsetwinsize(self.secondary, (lines, columns))
        self.before = termios.tcgetattr(self.secondary)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "highwater", *arguments],
            stdin=self.secondary, stdout=self.secondary, stderr=self.secondary, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **environ},
        )  # fmt: skip

    def wait_for(self, *words: str) -> None:
        """Until all of it has been written from now on."""
        seen, deadline = b"", time.monotonic() + PATIENCE
        while not all(word.encode() in seen for word in words):
            assert time.monotonic() < deadline, (words, seen[-4000:])
            if select.select([self._primary], [], [], 0.1)[0]:
                seen += os.read(self._primary, 65536)
        self.seen += seen

    def type(self, keys: bytes) -> None:
        os.write(self._primary, keys)

    def end(self) -> int:
        """Its exit status; what it wrote until then is read."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen[-4000:]
            if select.select([self._primary], [], [], 0.1)[0]:
                self.seen += os.read(self._primary, 65536)
        while select.select([self._primary], [], [], 0)[0]:
            self.seen += os.read(self._primary, 65536)
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._primary)
        os.close(self.secondary)

    def is_as_before(self) -> bool:
        """Whether the terminal was given back: its modes, its cursor, its screen."""
        restored = termios.tcgetattr(self.secondary) == self.before
        return restored and self.seen.rindex(b"\x1b[?1049l") > self.seen.rindex(b"\x1b[?1049h")


@pytest.mark.parametrize(
    ("leave", "status"),
    [
        (lambda t: t.type(b"q"), 0),
        (lambda t: os.killpg(t.process.pid, signal.SIGINT), 130),
        (lambda t: t.process.terminate(), 143),
    ],
    ids=["q", "interrupt", "terminate"],
)
def test_top_gives_the_terminal_back(lonely, leave, status):
    with Terminal("top", "--url", lonely.url) as terminal:
        terminal.wait_for("\x1b[?1049h", "no reading of any worker yet")
        leave(terminal)
        assert terminal.end() == status
        assert terminal.is_as_before()
        assert b"Traceback" not in terminal.seen


def test_top_obeys_its_keys(lonely):
    """On a screen of its own, where rich passes no height on: a key changes what is shown, as the last line says."""
    with Terminal("top", "--url", lonely.url, NO_COLOR="1") as terminal:
        terminal.wait_for("no reading of any worker yet", "q quit  ? help", "s sort: worst off")
        terminal.type(b"?")
        terminal.wait_for("the worst off first, equal ones in one row")
        terminal.type(b"4")
        terminal.wait_for("action", "policy: ")
        terminal.type(b"2")
        terminal.wait_for("no reading of any worker yet")
        terminal.type(b"s")
        terminal.wait_for("s sort: by number")
        terminal.type(b"q")
        assert terminal.end() == 0


def test_top_steps_aside_for_the_shell(lonely):
    with Terminal("top", "--url", lonely.url) as terminal:
        terminal.wait_for("\x1b[?1049h", "no reading of any worker yet")
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.wait_for("\x1b[?1049l")
        _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert terminal.is_as_before()
        terminal.process.send_signal(signal.SIGCONT)
        terminal.wait_for("\x1b[?1049h", "no reading of any worker yet")
        terminal.type(b"q")
        assert terminal.end() == 0


def test_top_outlives_the_sidecar(tmp_path):
    with (
        DemoSidecar("http://127.0.0.1:9", folder=tmp_path) as first,
        Terminal("top", "--url", first.url) as terminal,
    ):
        terminal.wait_for("● starting")
        first.stop()
        terminal.wait_for("NO SIDECAR", "no news for")
        with DemoSidecar("http://127.0.0.1:9", folder=tmp_path, port=first.port):
            terminal.wait_for("● starting")
            terminal.type(b"q")
            assert terminal.end() == 0


def test_without_colour_there_is_none(lonely):
    """https://no-color.org: letters tell the parts apart."""
    with Terminal("top", "--once", "--url", lonely.url, NO_COLOR="1") as terminal:
        assert terminal.end() == 0
        assert b"\x1b[3" not in terminal.seen


@pytest.mark.parametrize("arguments", [("top", "--json"), ("top",)], ids=" ".join)
def test_who_reads_no_further_ends_it(lonely, arguments):
    """`| head -1`: no traceback, and no process that stays."""
    command = [sys.executable, "-m", "highwater", *arguments, "--url", lonely.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(PATIENCE)
    assert b"Traceback" not in errors
    assert b"Broken" not in errors


def test_reports_come_a_line_each(lonely):
    command = [sys.executable, "-m", "highwater", "top", "--json", "--url", lonely.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        states = [json.loads(process.stdout.readline())["engine"]["state"] for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert states == ["starting", "starting"]


# --- what a shell and a person with a question get ---


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_script(shell):
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert f"_HIGHWATER_COMPLETE={shell}_complete" in result.output


def test_bash_completes_commands_and_remedies():
    script = (
        'eval "$(highwater completion bash)"; COMP_WORDS=(highwater {words}); COMP_CWORD={at}; '
        '_highwater_completion highwater; echo "${{COMPREPLY[*]}}"'
    )
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def completed(words: str, at: int) -> list[str]:
        command = ["bash", "-c", script.format(words=words, at=at)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()

    assert {"top", "status", "reclaim", "mark", "check", "incidents"} <= set(completed("''", 1))
    assert completed("reclaim reset", 2) == ["reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache"]


# --- following ---


@shares
async def test_who_follows_is_told_of_what_was_and_what_comes(sidecar, url):
    followed = follow_memory(lambda: SidecarClient(url), lambda _: True)

    def first(count: int) -> list[str]:
        return [next(followed)[0] for _ in range(count)]

    assert await asyncio.to_thread(first, 2) == ["past", "report"]
    await asyncio.to_thread(followed.close)


# --- the token of a sidecar on this machine ---


@pytest.fixture
def at_home(tmp_path, monkeypatch) -> Iterator[DemoSidecar]:
    """`highwater serve` with the settings that it has of itself, and a home of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with DemoSidecar("http://127.0.0.1:9", folder=tmp_path) as started:
        yield started


async def test_commands_find_the_token_of_a_sidecar_on_this_machine(at_home, tmp_path):
    path = tmp_path / "state" / "highwater" / f"{at_home.port}.token"
    printed = await run("token", "--port", str(at_home.port), url="")
    assert (printed.exit_code, printed.stdout) == (0, path.read_text())
    assert (await run("token", url=at_home.url)).stdout == printed.stdout  # HIGHWATER_URL names it too
    log = at_home.log_path.read_text()
    assert (str(path) in log, printed.stdout.strip() in log) == (True, False)
    marked = await run("mark", "x", url=at_home.url)
    assert (marked.exit_code, "marked 'x'" in marked.output) == (0, True), marked.output
    at_home.stop()
    assert not path.exists()
    gone = await run("token", "--port", str(at_home.port), url="")
    assert (gone.exit_code, f"{path} does not exist" in gone.stderr, "--port" in gone.stderr) == (1, True, True)


async def test_the_command_that_a_refusal_prints_works(at_home, tmp_path):
    refused = await asyncio.to_thread(httpx.get, f"{at_home.url}/memory/snapshots")
    (command,) = re.findall(r"curl .*$", refused.json()["error"]["message"])
    assert command in refused.text
    (tmp_path / "highwater").write_text(f'#!/bin/sh\nexec {sys.executable} -m highwater "$@"\n')
    (tmp_path / "highwater").chmod(0o755)
    typed = f"{command} -s -o /dev/null -w '%{{http_code}}'"
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = await asyncio.to_thread(
        subprocess.run, ["sh", "-c", typed], capture_output=True, text=True, check=False, env=environ, cwd=ROOT
    )
    assert told.stdout == "200", told


async def test_on_a_terminal_it_says_where_the_token_is(tmp_path, monkeypatch):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    script = (
        f"import os, pty; os.environ['HIGHWATER_ADMIN_TOKEN_FILE'] = {str(tmp_path / 'token')!r}; "
        f"pty.spawn([{sys.executable!r}, '-m', 'highwater', 'token'])"
    )
    told = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert told.stdout.split() == ["from", f"{tmp_path / 'token'}:", TOKEN]
