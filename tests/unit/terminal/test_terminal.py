"""The commands as such: their help, and what they load for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from highwater.process.admin_token import TOKEN_VARIABLE
from highwater.server.settings import load
from highwater.terminal.cli import DEFAULT_URL, URL_VARIABLE, main

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
