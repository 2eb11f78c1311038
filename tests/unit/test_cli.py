"""The command line: every setting has its flag, and what is wrong ends the start."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from highwater import __version__
from highwater.process import errors
from highwater.server.settings import Settings, keys, variable
from highwater.terminal import cli, serve

KEYS = dict(keys())
TOKEN = "hunter2hunter2"


@pytest.fixture
def started(monkeypatch) -> list[Settings]:
    """Settings that `serve` would have run with; nothing is served."""
    settings: list[Settings] = []
    monkeypatch.setattr(serve, "run", settings.append)
    return settings


def invoke(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, env=environ)


def flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


@pytest.mark.parametrize("key", KEYS)
def test_the_help_tells_of_every_key(key):
    text = " ".join(invoke("serve", "--help", COLUMNS="120").output.split())
    assert f" {flag(key)} " in text
    assert f"[{variable(key)};" in text
    assert KEYS[key].description in text


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_in_one_group_of_the_help(key):
    assert sum(serve.is_among(key, keys) for keys in serve.SETTINGS.values()) == 1


def test_every_command_is_in_one_group_of_the_help():
    listed = [name for commands in cli.COMMANDS.values() for name in commands]
    assert sorted(listed) == sorted(cli.main.commands)
    assert max(len(text) for commands in cli.COMMANDS.values() for text in commands.values()) <= 45
    assert "..." not in invoke("--help").output.partition("\n")[2]


def test_the_help_tells_of_no_other_key():
    words = invoke("serve", "--help").output.split()
    assert {word for word in words if word.startswith("--") and word.strip("-")} == {
        "--config",
        "--help",
        *map(flag, KEYS),
    }


def test_flags_reach_the_settings(started):
    result = invoke("serve", "--port", "9001", "--policy.mode", "observe", HIGHWATER_PORT="9002")
    assert result.exit_code == 0, result.output
    assert (started[0].port, started[0].policy.mode) == (9001, "observe")


def test_a_file_reaches_the_settings(started, tmp_path):
    (tmp_path / "a.toml").write_text("port = 9003\n", encoding="utf-8")
    assert invoke("serve", "--config", str(tmp_path / "a.toml"), HIGHWATER_PORT="9002").exit_code == 0
    assert started[0].port == 9003


def test_all_problems_are_printed_and_the_start_ends(started):
    result = invoke("serve", "--port", "eighty", "--policy.rules", "[", HIGHWATER_PROT="1", HIGHWATER_LOG_LEVEL="loud")
    assert (result.exit_code, result.stdout, started) == (2, "", [])
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("highwater: ") for line in lines)
    for word in ("port: 'eighty'", "policy.rules: '['", "HIGHWATER_PROT:", "log_level: 'loud'"):
        assert any(word in line for line in lines), (word, lines)


def test_an_unknown_flag_ends_the_start(started):
    result = invoke("serve", "--bad")
    assert (result.exit_code, started) == (2, [])
    assert "--bad" in result.stderr


def test_the_token_is_never_printed(started):
    result = invoke("serve", "--admin-token", TOKEN + " ", HIGHWATER_PORT="x")
    assert result.exit_code == 2
    assert TOKEN not in result.output
    assert TOKEN not in invoke("serve", "--help", HIGHWATER_ADMIN_TOKEN=TOKEN).output


def test_the_version_is_the_packages():
    assert invoke("--version").output.split()[-1] == __version__


@pytest.mark.parametrize(
    ("arguments", "slow"),
    [
        (["--help"], {"httpx", "pydantic", "rich", "tabulate", "highwater.terminal.asking"}),
        (["serve", "--help"], {"uvicorn", "fastapi", "aiohttp", "httpx", "torch"}),
    ],
)
def test_the_help_loads_no_more_than_it_shows(arguments, slow):
    code = (
        f"import sys; from highwater.terminal.cli import main; main({arguments}, standalone_mode=False); "
        f"sys.exit(' '.join({slow} & set(sys.modules)) or 0)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")


def test_the_documentation_has_every_code():
    named = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    listed = [code for codes, _ in errors.MEANINGS for code in codes]
    assert listed == sorted(named)
