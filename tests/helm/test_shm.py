"""The engine's /dev/shm outlives its container: what an earlier life left there goes before vLLM starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from highwater_worker.kernel.shm import OWNERS
from tests.helm.chart import Object, ci_values, container, mounts, pod, pods

SHM = "/run/highwater/shm"
MOUNTS_SHM = {"name": "other", "image": "other", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
# Nobody's of vLLM: a recorder is of use after the engine's end, and other names of Ray's may be anything.
STAYS = {"highwater", "ray"}


def run(values: Object, folder: Path, *words: str) -> list[str]:
    """Start the engine's container with a folder as its volume, and return what the program in vLLM's place writes."""
    program = ["sh", "-c", 'ls "$0"; for each in "$@"; do echo "$each"; done']
    engine = container(pod({**values, "engine": {"command": [*program, str(folder)], "args": list(words)}}), "vllm")
    command = [text.replace(SHM, str(folder)) for text in [*engine["command"], *engine["args"]]]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def fill(folder: Path) -> set[str]:
    """Files of every owner, and of others."""
    names = {f"{start}1" for start, _ in OWNERS} | {"engine-cpushm", "weights of mine"}
    for name in names:
        (folder / name).write_text("x")
    (folder / "models").mkdir()
    (folder / "models/psm_1").write_text("x")
    return names | {"models"}


def test_what_vllm_and_its_libraries_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path)
    said = run({}, tmp_path, "two words; $(no command)")
    assert sorted(said[:4]) == sorted({f"{name}1" for name in STAYS} | {"weights of mine", "models"})
    assert "two words; $(no command)" in said
    assert (tmp_path / "models/psm_1").exists()


@pytest.mark.parametrize("name", ["missing", "a file"])
def test_the_engine_starts_where_nothing_can_be_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").write_text("x")
    assert "word" in run({}, tmp_path / name, "word")


def test_the_volume_has_a_path_that_no_device_driver_mounts_over() -> None:
    for each in pods(ci_values("leaderworkerset-ray-values.yaml")):
        if engine := container(each, "vllm"):
            assert {mounts(engine)[path] for path in (SHM, "/dev/shm")} == {"shm"}
            assert f"cd {SHM}" in engine["command"][2]
            assert "/dev/shm/" not in engine["command"][2]


@pytest.mark.parametrize(
    "values",
    [
        {"pod": {"extraContainers": [MOUNTS_SHM]}},
        {"pod": {"extraInitContainers": [{"name": "plain", "image": "other"}, MOUNTS_SHM]}},
        {"sidecar": {"extraVolumeMounts": [{"name": "shm", "mountPath": "/dev/shm", "readOnly": True}]}},
    ],
)
def test_where_another_container_has_it_mounted_nothing_is_removed(tmp_path: Path, values: Object) -> None:
    names = fill(tmp_path)
    assert names <= set(run(values, tmp_path))
    engine = container(pod(values), "vllm")
    assert engine["command"] == ["vllm", "serve"]
    assert SHM not in mounts(engine)
