"""The commands that the demonstration prints work when they are pasted."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest

from highwater.terminal.cli import main
from highwater.terminal.demo import sidecar
from highwater.terminal.demo.sidecar import commands_to_try, own_command, usual_port

URL = "http://127.0.0.1:8017"


def installed(folder: Path) -> Path:
    program = folder / "highwater"
    folder.mkdir(parents=True)
    program.touch()
    return program


def test_the_program_is_named_for_any_working_folder(tmp_path: Path):
    program = installed(tmp_path / "a tree" / ".venv" / "bin")
    assert own_command(str(program)) == shlex.quote(str(program))


def test_run_as_a_module_it_is_the_program_beside_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = installed(tmp_path / "bin")
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    assert own_command("/x/highwater/__main__.py") == str(program)
    program.unlink()
    assert own_command("/x/highwater/__main__.py") == f"{tmp_path}/bin/python -m highwater"


@pytest.mark.parametrize("line", commands_to_try(".venv/bin/highwater", URL, 8017))
def test_each_line_can_be_pasted(line: str):
    words = shlex.split(line)
    assert words[0] in {"curl", ".venv/bin/highwater"}
    assert words[0] == "curl" or words[1] in main.commands
    assert "8017" in line
    assert not any("?" in word for word in shlex.split(line, posix=False) if not word.startswith("'"))
    assert "$(highwater" not in line


def test_the_pages_port_is_taken_if_it_is_free(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(sidecar, "USUAL_PORT", port)
        assert usual_port() != port
    assert usual_port() == port
