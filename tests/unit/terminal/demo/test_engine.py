"""What can be said of the engine's starting and ending without starting vLLM."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from highwater.terminal.demo import keeper
from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment, EngineOptions, bind_threads, link_extension
from highwater.terminal.demo.process import DemoError, NotInTime, free_port, signs_of_life
from tests.engines import log_tail
from tests.patience import LIMIT_SECONDS, wait_until


@pytest.mark.parametrize(
    ("cpus", "ranks", "expected"),
    [([0, 1], 2, "0|1"), ([0, 1, 2, 3], 2, "0,1|2,3"), ([4, 6, 8], 2, "4|6"), ([5], 2, "5|5")],
)
def test_ranks_share_the_cpus(cpus: list[int], ranks: int, expected: str) -> None:
    assert bind_threads(cpus, ranks) == expected


def test_the_engine_sees_the_extension_and_nothing_else(tmp_path: Path) -> None:
    folder = link_extension(tmp_path / "extension")
    assert link_extension(folder) == folder  # a second start finds the first one's link
    (link,) = folder.iterdir()
    assert link.name == "highwater_worker"
    assert (link / "__init__.py").is_file()


def test_the_error_of_a_program_that_failed_tells_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    text = str(DemoError.with_log("it failed", log, lines=2))
    assert text == f"it failed\nThe log is {log}; its last lines are:\nline 98\nline 99"


def fake_environment(tmp_path: Path, script: str) -> EngineEnvironment:
    """Return an environment whose `python` is a shell script."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return EngineEnvironment("0.32.0", tmp_path / "environment")


def test_an_engine_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path, "echo out of luck; exit 3")
    with pytest.raises(DemoError, match=r"ended with status 3 while it started(.|\n)*out of luck"):
        DemoEngine(environment, EngineOptions(extension=False), folder=tmp_path / "run").start()


def test_an_engine_that_is_not_ready_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = fake_environment(tmp_path, "echo $$; exec sleep 600")
    options = EngineOptions(extension=False, start_seconds=0.3)
    engine = DemoEngine(environment, options, folder=tmp_path / "run")

    def asked_once_it_runs(_port: int, _path: str) -> bool:
        wait_until(lambda: log_tail(engine, 1))
        return False

    monkeypatch.setattr("highwater.terminal.demo.process.answers", asked_once_it_runs)
    with pytest.raises(NotInTime, match=r"not ready within 0\.3 s"):
        engine.start()
    assert not engine.is_running()
    assert not Path("/proc", log_tail(engine, 1)).exists()


def test_what_takes_long_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("highwater.terminal.demo.process.SIGN_SECONDS", 0.001)
    log, said = tmp_path / "log", []
    with signs_of_life("installing", log, said.append):
        wait_until(lambda: said)
        log.write_text("Collecting torch\nDownloading torch (180 MB)\n")
        wait_until(lambda: "180 MB" in said[-1])
    assert said[0] == "  installing for 0.0 s: nothing in its log yet"
    assert said[-1].endswith(" s: Downloading torch (180 MB)")


def test_nothing_is_left_when_the_pipe_to_the_keeper_closes() -> None:
    script = "trap '' TERM; (trap '' TERM; sleep 60 & echo $!; wait) & wait"
    command = [sys.executable, "-I", "-S", keeper.__file__, "0.1", "/bin/sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sleeper = int(process.stdout.readline())
        assert sleeper in keeper.session_pids(process.pid)
        process.stdin.close()
        process.wait(LIMIT_SECONDS)
    assert keeper.session_pids(process.pid) == []


def test_the_keeper_passes_the_status_on() -> None:
    command = [sys.executable, "-I", "-S", keeper.__file__, "0.1", "/bin/sh", "-c", "exit 7"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.wait(LIMIT_SECONDS) == 7


def test_any_free_port_is_one_that_the_system_gives_to_nobody():
    """Between the choice and the server's start another process would get it otherwise."""
    assert {20_000 <= free_port() < 32_000 for _ in range(20)} == {True}


def test_a_port_that_is_wanted_is_taken_or_refused():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        free_port(server.getsockname()[1])
