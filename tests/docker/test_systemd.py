"""The units for systemd, held to systemd's own reading of them, and to the page that tells how to install them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from highwater.server.settings import keys, variable
from tests.docker.image import DOCKER, ROOT

UNITS = DOCKER / "systemd"
SIDECAR = UNITS / "highwater.service"
DROP_IN = UNITS / "vllm.service.d" / "highwater.conf"
PAGE = (ROOT / "docs" / "install" / "bare-metal.md").read_text("utf-8")
# A machine has neither; systemd looks whether what it is to start can be started.
PROGRAM = "/opt/highwater/venv/bin/highwater"
VLLM = "[Service]\nExecStart=/bin/true serve MODEL\n"


def settings_of(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text("utf-8").splitlines()
    return [
        (name, value) for name, equals, value in (line.partition("=") for line in lines if line[:1].isalpha()) if equals
    ]


def environ_of(path: Path) -> dict[str, str]:
    given = [word for name, value in settings_of(path) if name == "Environment" for word in shlex.split(value)]
    return dict(word.split("=", 1) for word in given)


def verified(folder: Path, **changed: str) -> str:
    """What systemd has to say of both units beside one of vLLM's; empty where it has nothing to say."""
    (folder / "vllm.service.d").mkdir(parents=True)
    (folder / "vllm.service").write_text(VLLM)
    for path in (SIDECAR, DROP_IN):
        text = path.read_text("utf-8").replace(PROGRAM, "/bin/true")
        for old, new in changed.items():
            text = text.replace(old, new)
        (folder / path.relative_to(UNITS)).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", "vllm.service", "highwater.service"]
    environ = os.environ | {"SYSTEMD_UNIT_PATH": f"{folder}:"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_systemd_has_nothing_to_say(tmp_path):
    """It would name a key that it does not know."""
    assert shutil.which("systemd-analyze"), "make tools"
    assert verified(tmp_path / "ours") == ""
    assert "MemoryMost" in verified(tmp_path / "wrong", MemoryMax="MemoryMost")


def test_workers_and_sidecar_share_their_folder():
    """It is in memory, systemd makes it for vLLM's user, and it outlives the engine."""
    drop_in = dict(settings_of(DROP_IN))
    assert environ_of(DROP_IN)["HIGHWATER_RECORDER_DIR"] == environ_of(SIDECAR)["HIGHWATER_RECORDER_DIR"]
    assert environ_of(DROP_IN)["HIGHWATER_RECORDER_DIR"] == f"/run/{drop_in['RuntimeDirectory']}"
    assert drop_in["RuntimeDirectoryPreserve"] == "yes"


def test_the_engine_is_watched_and_nothing_else():
    names = {name for name, _ in settings_of(DROP_IN)}
    assert set(environ_of(DROP_IN)) == {"PYTHONPATH", "HIGHWATER_RECORDER_DIR"}
    assert not {"ExecStart", "Requires", "BindsTo", "PartOf"} & names
    assert dict(settings_of(DROP_IN))["Wants"] == "highwater.service"


def test_every_setting_of_the_sidecar_is_one():
    """Or it would not start."""
    known = {variable(key) for key, _ in keys()}
    assert {name for name in environ_of(SIDECAR) if name.startswith("HIGHWATER_")} <= known


def test_the_page_installs_what_the_units_start():
    assert f"python3 -m venv {Path(PROGRAM).parents[1]}" in PAGE
    assert f"{PROGRAM} extension --copy-to {environ_of(DROP_IN)['PYTHONPATH']}" in PAGE
    assert f"ExecStart={PROGRAM} serve" in SIDECAR.read_text("utf-8")
    named = re.findall(r"docker/systemd/[\w./]+", PAGE)
    assert {ROOT / name for name in named} == {SIDECAR, DROP_IN}
    assert dict(settings_of(SIDECAR))["EnvironmentFile"].lstrip("-") in PAGE
