"""The files of a release: the same bytes on every machine, and fit for an index."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from release.build import SUMS, absolute_links
from release.version import ROOT, current, semver

# A build is seconds of work, and may wait for its turn on a busy machine.
pytestmark = pytest.mark.timeout(900)
REPOSITORY = "https://git.example.org/highwater/highwater"


def built(out: Path, umask: int, **environ: str) -> dict[str, bytes]:
    command = [sys.executable, "-m", "release.build", "--out", str(out)]
    env = os.environ | environ
    done = subprocess.run(command, cwd=ROOT, env=env, umask=umask, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    return built(tmp_path_factory.mktemp("one") / "dist", 0o022)


@pytest.fixture(scope="module")
def dist(files, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_another_time_umask_folder_and_locale_give_the_same_bytes(files, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    again = built(
        tmp_path / "dist", 0o077, TMPDIR=str(tmp_path / "elsewhere"), TZ="Asia/Shanghai", LC_ALL="C", HOME="/"
    )
    assert sorted(again) == sorted(files)
    assert [name for name in files if files[name] != again[name]] == []


def test_these_are_the_files(files):
    version = current()
    assert sorted(files) == sorted(
        [
            SUMS,
            f"highwater-{semver(version)}.tgz",
            f"vllm_highwater-{version}-py3-none-any.whl",
            f"vllm_highwater-{version}.tar.gz",
            f"vllm_highwater_worker-{version}-py3-none-any.whl",
            f"vllm_highwater_worker-{version}.tar.gz",
        ]
    )


def test_the_checksums_are_theirs(files):
    """As `sha256sum -c` reads them."""
    listed = dict(reversed(line.split("  ")) for line in files[SUMS].decode().splitlines())
    assert listed == {name: hashlib.sha256(body).hexdigest() for name, body in files.items() if name != SUMS}


def test_an_index_would_take_them(dist):
    paths = [str(path) for path in dist.iterdir() if path.name.startswith("vllm_")]
    command = [sys.executable, "-m", "twine", "check", "--strict", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == len(paths) == 4


@pytest.mark.parametrize("name", ["vllm_highwater", "vllm_highwater_worker"])
def test_what_an_index_shows_leads_somewhere(dist, name):
    with zipfile.ZipFile(dist / f"{name}-{current()}-py3-none-any.whl") as wheel:
        (metadata,) = [entry for entry in wheel.namelist() if entry.endswith(".dist-info/METADATA")]
        shown = message_from_bytes(wheel.read(metadata))
        assert [entry for entry in wheel.namelist() if entry.endswith("/licenses/LICENSE")]
    targets = re.findall(r"\]\(([^)\s]+)\)", str(shown.get_payload()))
    assert len(targets) > 3
    for target in targets:
        assert target.startswith("https://"), target
        own = re.fullmatch(rf"{REPOSITORY}/(?:blob|raw)/v{re.escape(current())}/([^#]+)(#.*)?", target)
        assert own is None or (ROOT / own[1]).is_file(), target
    assert (shown["Author"], shown["Project-URL"]) == ("The Highwater authors", f"Repository, {REPOSITORY}")
    assert shown["License-Expression"] == "Apache-2.0"


def test_the_sdist_has_tracked_files_alone(dist):
    tracked = set(
        subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    )
    made = {"PKG-INFO", "worker_ext/LICENSE"}
    with tarfile.open(dist / f"vllm_highwater-{current()}.tar.gz") as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
        assert {(member.uname, member.gname, member.uid) for member in archive} <= {("", "", 0), ("root", "root", 0)}
    assert names - tracked == made
    assert {"tests/conftest.py", "helm/Chart.yaml", "release/build.py", "docs/policy.md"} <= names


def test_the_chart_is_what_helm_packages(dist):
    with tarfile.open(dist / f"highwater-{semver(current())}.tgz") as archive:
        names = {member.name for member in archive}
        chart = archive.extractfile("highwater/Chart.yaml").read().decode()
    assert {"highwater/values.yaml", "highwater/values.schema.json", "highwater/templates/_pod.tpl"} <= names
    assert f"version: {semver(current())}" in chart
    assert not [name for name in names if name.startswith(("highwater/generator", "highwater/source", "highwater/ci"))]


@pytest.mark.parametrize(
    ("text", "folder", "made"),
    [
        ("[a](docs/a.md#b)", "", f"[a]({REPOSITORY}/blob/v1.0.0/docs/a.md#b)"),
        ("![p](docs/a.png)", "", f"![p]({REPOSITORY}/raw/v1.0.0/docs/a.png)"),
        ("[a](../docs/a.md)", "worker_ext", f"[a]({REPOSITORY}/blob/v1.0.0/docs/a.md)"),
        ("[a](#b)", "worker_ext", f"[a]({REPOSITORY}/blob/v1.0.0/worker_ext/README.md#b)"),
        ("[a](https://b/c)", "", "[a](https://b/c)"),
        ("`policy.rules[0](x)`", "", "`policy.rules[0](x)`"),
    ],
)
def test_links_become_those_of_the_tag(text, folder, made):
    assert absolute_links(text, folder, REPOSITORY, "1.0.0") == made
