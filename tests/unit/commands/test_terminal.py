"""The commands as such: their help, and what they load for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from highwater.cli import main
from highwater.client.options import DEFAULT_URL, URL_VARIABLE
from highwater.commands.terminal import ALL
from highwater.files.admin_token import TOKEN_VARIABLE
from highwater.settings.sources import load

DOCS = Path(__file__).parents[3] / "docs" / "terminal.md"


def helped(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*arguments, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.name)
def test_every_command_has_examples(command):
    """Each begins with how it is typed."""
    text = helped(command.name)
    examples = text.partition("Examples:\n")[2].splitlines()
    assert len(examples) > 1
    assert all(f"highwater {command.name}" in line or "highwater" in line for line in examples), examples


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.name)
def test_every_command_is_documented(command):
    """With each of its flags."""
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


def test_a_size_for_no_trim_is_a_usage_error():
    """Said before anybody is asked."""
    result = CliRunner().invoke(main, ["reclaim", "release", "--free", "1GiB", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "trim_encoder_cache is not among the remedies" in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["top", "--help"]], ids=" ".join)
def test_the_help_loads_nothing_that_it_does_not_need(arguments):
    """It answers at once."""
    code = (
        f"import sys; from highwater.cli import main; main({arguments!r}, standalone_mode=False); "
        "sys.exit(' '.join({'httpx', 'httpx_sse', 'rich', 'tabulate'} & set(sys.modules)) or 0)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")
