"""What the runbooks say to type works as printed, beside a sidecar that wants its token."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from click.testing import CliRunner

from highwater.cli import main
from highwater.policy.settings import PolicySettings
from tests.http.test_control_plane import both_on_ports

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs" / "runbooks").glob("*.md")), ROOT / "docs" / "oncall.md"]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
LINES = [
    line.strip()
    for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
# What a person puts in: another cluster's names, Prometheus' address.
ELSEWHERE = re.compile(r"kubectl|PROMETHEUS|http://127\.0\.0\.1:8001")
COMMANDS = sorted({line for line in LINES if not ELSEWHERE.search(line) and "=" not in line.split()[0]})
# In the text, with what they change. The fake engine has nothing to lose.
CHANGES = sorted({" ".join(command.split()) for command in re.findall(r"`(curl -X [^`]+)`", TEXT)})
# `highwater status` and `check` also say by their exit status that somebody should look.
MAX_EXIT_CODE = 2
TOKEN_LINE = (
    "TOKEN=$(highwater token)           "
    "# in Kubernetes: $(kubectl -n NAMESPACE exec POD -c highwater -- highwater token)"
)

shares = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environ(tmp_path_factory):
    """Return the environment of a shell on the sidecar's machine."""
    folder = tmp_path_factory.mktemp("machine")
    token_file = folder / "token"
    (folder / "highwater").write_text(f'#!/bin/sh\nexec {sys.executable} -m highwater "$@"\n')
    (folder / "highwater").chmod(0o755)
    async with both_on_ports(admin_token_file=token_file, policy=PolicySettings()) as sidecar:
        yield {
            **{name: value for name, value in os.environ.items() if not name.startswith("HIGHWATER_")},
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SIDECAR": f"http://127.0.0.1:{sidecar.port}",
            "HIGHWATER_URL": f"http://127.0.0.1:{sidecar.port}",
            "HIGHWATER_ADMIN_TOKEN_FILE": str(token_file),
            "TOKEN": token_file.read_text().strip(),
        }


async def typed(command: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """One line in a shell, in which `curl` fails where the response is an error."""
    script = f"set -o pipefail\ncurl() {{ command curl --fail-with-body --noproxy '*' \"$@\"; }}\n{command}\n"
    return await asyncio.to_thread(
        subprocess.run, ["bash", "-c", script], capture_output=True, text=True, check=False, env=environ, cwd=ROOT
    )


def test_there_is_something_to_try():
    """Calls over HTTP and commands, and no line that is neither."""
    kinds = {command.split()[0] for command in COMMANDS}
    assert kinds == {"curl", "highwater"}
    assert CHANGES


@shares
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("curl")])
async def test_a_call_works_as_printed(environ, command):
    """With the token where it is needed; a pipe finds something."""
    done = await typed(command, environ)
    assert (done.returncode, bool(done.stdout)) == (0, True), done


@shares
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("highwater")])
async def test_a_command_works_as_printed(environ, command):
    """It finds the sidecar and the token, and says something."""
    arguments = command.partition("#")[0].split()[1:]
    ran = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=environ, catch_exceptions=False)
    assert ran.exit_code <= MAX_EXIT_CODE, ran.output
    assert ran.stdout


@shares
@pytest.mark.parametrize("command", CHANGES)
async def test_a_change_is_allowed_as_printed(environ, command):
    """The token is where it must be, whatever the engine says then."""
    done = await typed(command, environ)
    assert "unauthorized" not in done.stdout
    assert '"code"' not in done.stdout or "recorder_dir" in done.stdout, done


@shares
async def test_the_token_is_found_as_printed(environ):
    """The same line wherever one is needed."""
    assert {line for line in LINES if line.startswith("TOKEN=$(highwater")} == {TOKEN_LINE}
    done = await typed(f"{TOKEN_LINE}\necho $TOKEN", {**environ, "TOKEN": ""})
    assert done.stdout.strip() == environ["TOKEN"]
