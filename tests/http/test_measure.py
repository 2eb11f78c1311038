"""`highwater measure` as a process, beside a sidecar on a real port with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.engine import FakeEngine
from tests.http.test_control_plane import TOKEN, Running, both_on_ports, sidecar_before
from tests.patience import patiently

pytestmark = pytest.mark.slow("`highwater measure` as a process")

ROOT = Path(__file__).parents[2]
# Loads: each says when it is up, and then does as told.
WAITS = "print('up', flush=True); input()"
SAYS_BYE = (
    "import signal, time\n"
    "def bye(*_):\n    print('bye', flush=True)\n    raise SystemExit(0)\n"
    "signal.signal(signal.SIGINT, bye)\nprint('up', flush=True)\ntime.sleep(600)"
)
COUNTS = (
    "import signal, time\nheard = []\nsignal.signal(signal.SIGINT, lambda *_: heard.append(1))\n"
    "print('up', flush=True)\nwhile not heard: time.sleep(0.01)\n"
    "time.sleep(0.7)\nprint('heard', len(heard), flush=True)"
)
GOES_ON = (
    "import signal, time\nsignal.signal(signal.SIGINT, lambda *_: print('heard', flush=True))\n"
    "print('up', flush=True)\ntime.sleep(600)"
)
SELF_KILL = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"

shares = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Record:
    """The command under way."""

    process: asyncio.subprocess.Process
    folder: Path

    async def up(self) -> None:
        """The load runs."""
        await self.says(b"up")

    async def says(self, line: bytes) -> None:
        """The load has written this line."""
        assert (await patiently(self.process.stdout.readline())).strip() == line

    async def end(self, typed: bytes = b"") -> tuple[int, str, str]:
        """Exit status, and what it wrote to stdout and stderr."""
        told = await patiently(self.process.communicate(typed))
        return self.process.returncode, *(text.decode() for text in told)

    @property
    def markdown(self) -> str:
        return (self.folder / "report.md").read_text()

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text()


@contextlib.asynccontextmanager
async def recording(url: str, folder: Path, *arguments: str, token: str = TOKEN) -> AsyncIterator[Record]:
    """Run `highwater measure` with these arguments; the reports are `report.*` unless they say otherwise."""
    environ = os.environ | {"HIGHWATER_URL": url, "HIGHWATER_ADMIN_TOKEN": token, "PYTHONPATH": str(ROOT)}
    out = [] if "--out" in arguments else ["--out", "report"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "highwater", "measure", "--settle", "0", *out, *arguments),
        cwd=folder,
        env=environ,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Record(process, folder)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _guarded():
    async with both_on_ports(admin_token=TOKEN) as sidecar:
        yield sidecar


@pytest.fixture
def sidecar(_guarded):
    """With an admin token and no rules; nothing is cached."""
    for worker in _guarded.fake.workers:
        worker.forget_entries()
        worker.cached = 5_787 * 1024 * 1024
    return _guarded


def url_of(sidecar: Running) -> str:
    return f"http://127.0.0.1:{sidecar.port}"


def row(text: str, name: str, nth: int = 0) -> list[str]:
    """The cells of the nth row of that name."""
    found = re.findall(rf"^\| (?:\*\*)?{re.escape(name)}(?:\*\*)? *\|(.*)\|$", text, re.MULTILINE)
    return [cell.strip().strip("*") for cell in found[nth].split("|")]


# --- a load to its end ---


@shares
async def test_the_story_is_told_in_full(sidecar, tmp_path):
    await sidecar.poll()
    async with recording(url_of(sidecar), tmp_path, "--remedies", "all", "--", sys.executable, "-c", WAITS) as record:
        await record.up()
        sidecar.fake.serve_images()
        await sidecar.poll()
        code, out, err = await record.end(b"\n")
    assert (code, out) == (0, "")
    assert "highwater: wrote" in err
    text = record.markdown
    heads = row(text, "MiB")
    encoder = dict(zip(heads, row(text, "encoder cache"), strict=True))
    assert [encoder[name] for name in ("before load", "peak under load", "after load")] == ["0.0", "3,782.0", "3,782.0"]
    freed = dict(zip(row(text, "MiB", 1), row(text, "used", 1), strict=True))
    assert [freed[f"{name} freed"] for name in ("reset_mm_cache", "trim_encoder_cache")] == ["0.0", "3,782.0"]
    assert "100% encoder cache, which reset_mm_cache does not touch" in text
    assert record.page.count("<svg") == 1


@shares
async def test_start_and_end_are_marked(sidecar, tmp_path):
    async with recording(url_of(sidecar), tmp_path, "--name", "nightly", "--", "true") as record:
        assert (await record.end())[0] == 0
    events = (await sidecar.client.get("/memory/events")).json()["events"]
    marks = [event["summary"].partition("' at")[0] for event in events if event["kind"] == "mark"]
    assert marks[:3] == ["mark 'nightly: settled", "mark 'nightly: load ended", "mark 'nightly: load starts"]


@shares
async def test_a_refused_remedy_is_told_with_its_reason(sidecar, tmp_path):
    sidecar.fake.workers_refuse = "an encoder cache connector owns them"
    try:
        names = "trim_encoder_cache,release"
        async with recording(url_of(sidecar), tmp_path, "--remedies", names, "--", "true") as record:
            code, _, err = await record.end()
        assert code == 0, err
    finally:
        sidecar.fake.workers_refuse = None
    assert row(record.markdown, "release")[0] == "done"
    assert row(record.markdown, "trim_encoder_cache")[0] in {"refused", "failed"}
    assert "an encoder cache connector owns them" in record.markdown


@shares
@pytest.mark.parametrize(("load", "code"), [("raise SystemExit(7)", 7), (SELF_KILL, 143)], ids=["code", "signal"])
async def test_a_load_that_fails_is_reported_and_its_code_is_ours(sidecar, tmp_path, load, code):
    async with recording(url_of(sidecar), tmp_path, "--", sys.executable, "-c", load) as record:
        assert (await record.end())[0] == code
    assert f"load failed with exit code {code}" in record.page


# --- told to stop ---


@shares
async def test_ctrl_c_ends_the_load_and_writes_the_report(sidecar, tmp_path):
    command = ("--remedies", "release", "--", sys.executable, "-c", SAYS_BYE)
    async with recording(url_of(sidecar), tmp_path, *command) as record:
        await record.up()
        record.process.send_signal(signal.SIGINT)
        code, out, _ = await record.end()
    assert (code, out) == (130, "bye\n")
    assert "It was interrupted after" in record.page
    assert row(record.markdown, "release")[0] == "interrupted"


@shares
async def test_ctrl_c_after_the_load_leaves_out_what_should_follow(sidecar, tmp_path):
    command = ("--remedies", "release", "--settle", "600", "--", "true")
    async with recording(url_of(sidecar), tmp_path, *command) as record:
        while b"waiting 600 s" not in await patiently(record.process.stderr.readline()):
            pass
        record.process.send_signal(signal.SIGINT)
        code, _, _ = await record.end()
    assert code == 130
    assert "It ended after" in record.page
    assert row(record.markdown, "release")[0] == "interrupted"


@shares
async def test_a_second_ctrl_c_ends_it_at_once(sidecar, tmp_path):
    async with recording(url_of(sidecar), tmp_path, "--", sys.executable, "-c", GOES_ON) as record:
        await record.up()
        record.process.send_signal(signal.SIGINT)
        await record.says(b"heard")  # a stopped process receives two signals as one
        record.process.send_signal(signal.SIGINT)
        code, _, _ = await record.end()
    assert code == 128 + signal.SIGKILL
    assert "Stopped by Ctrl-C" in record.page


@shares
async def test_at_a_terminal_the_load_hears_ctrl_c_once(sidecar, tmp_path):
    """The terminal tells it; a second one from us would mean: at once."""
    inner = [sys.executable, "-m", "highwater", "measure", "--settle", "0", "--out", "report", "--"]
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", spawn, *inner, sys.executable, "-c", COUNTS),
        cwd=tmp_path,
        env=os.environ
        | {"HIGHWATER_URL": url_of(sidecar), "HIGHWATER_ADMIN_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    shown = b""
    while b"up" not in shown.splitlines():
        shown += await patiently(process.stdout.readline())
    process.stdin.write(b"\x03")
    await process.stdin.drain()
    shown += await patiently(process.stdout.read())
    assert await patiently(process.wait()) == 130
    assert b"heard 1" in shown
    assert (tmp_path / "report.md").exists()


async def test_a_sidecar_that_goes_away_ends_no_load(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        sidecar = await stack.enter_async_context(both_on_ports(admin_token=TOKEN))
        async with recording(url_of(sidecar), tmp_path, "--", sys.executable, "-c", WAITS) as record:
            await record.up()
            await stack.aclose()
            code, _, err = await record.end(b"\n")
    assert code == 1
    assert "no sidecar answers" in err
    assert "The sidecar was lost" in record.page
    assert dict(zip(row(record.markdown, "MiB", 1), row(record.markdown, "used", 1), strict=True))["growth"] == "-"


# --- bad input ---


async def refused(url: str, folder: Path, *arguments: str, token: str = TOKEN) -> tuple[int, str]:
    """Exit status and the one line; the load was not started."""
    touch = (sys.executable, "-c", "open('started', 'w')") if "--" not in arguments else ()
    dashes = ("--",) if touch else ()
    async with recording(url, folder, *arguments, *dashes, *touch, token=token) as record:
        code, out, err = await record.end()
    assert not (folder / "started").exists()
    assert out == ""
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("highwater: ") and "load starts" not in line]
    assert len(errors) == 1, err
    return code, errors[0]


@shares
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--out", "nowhere/report"], 1, "the report cannot be written into"),
        (["--out", "there.html"], 1, "there.html is there already; --force replaces it"),
        (["--out", "there.html/report"], 1, "--out names another"),
        (["--remedies", "reset_all"], 2, "'reset_all' is no remedy; there are: release, trim_encoder_cache"),
        (["--remedies", "release,release"], 2, "each remedy once"),
        (["--name", "a\nb"], 2, "printable characters"),
        (["--", "no-such-program-at-all"], 127, "'no-such-program-at-all' is not found"),
        (["--", "./plain"], 126, "'./plain' is not executable"),
        (["--", "./broken"], 126, "'./broken' cannot be run"),
        (["--url", "http://127.0.0.1:1"], 3, "no sidecar answers at http://127.0.0.1:1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
async def test_bad_input_is_told_before_the_load_starts(sidecar, tmp_path, arguments, code, told):
    (tmp_path / "there.html").write_text("somebody's")
    (tmp_path / "plain").write_text("")
    (tmp_path / "broken").write_text("no program")
    (tmp_path / "broken").chmod(0o755)
    ended, line = await refused(url_of(sidecar), tmp_path, *arguments)
    assert (ended, told in line) == (code, True), line
    assert (tmp_path / "there.html").read_text() == "somebody's"


@shares
@pytest.mark.parametrize(("token", "told"), [("wrong", "is not this sidecar's"), ("", "found no token")])
async def test_a_wrong_token_is_told_before_the_load_starts(sidecar, tmp_path, token, told):
    code, line = await refused(url_of(sidecar), tmp_path, token=token)
    assert (code, told in line, "HIGHWATER_ADMIN_TOKEN" in line) == (1, True, True), line


@pytest.mark.parametrize(
    ("is_down", "told"), [(True, "has no engine that is ready"), (False, "has no reading")], ids=["down", "bare"]
)
async def test_a_sidecar_without_engine_is_told(tmp_path, is_down, told):
    fake = FakeEngine(extension=None)
    fake.down = is_down
    async with sidecar_before(fake) as sidecar:
        code, line = await refused(url_of(sidecar), tmp_path, token="")
    assert (code, told in line) == (1, True), line


async def test_what_is_no_sidecar_is_told(tmp_path, upstream):
    code, line = await refused(upstream.url, tmp_path)
    assert (code, "that is no" in line) == (3, True), line
