"""A copy of the worker package is all that an engine needs on its path, and is never half there."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import highwater_worker
from highwater import __version__
from highwater.process import worker_package
from highwater.process.worker_package import DISTRIBUTION, WorkerPackageError, copy_worker_package
from tests.fakes.raising import raising

LOADED_PLUGIN = """
import importlib.metadata, sys
found = importlib.metadata.entry_points()
group = "vllm.general_plugins"
points = found.select(group=group) if hasattr(found, "select") else found.get(group, ())
(point,) = set(points)
assert point.name == "highwater", point
print(point.load().__code__.co_filename)
print(importlib.metadata.version("vllm-highwater-worker"))
print(sum(1 for file in importlib.metadata.files("vllm-highwater-worker") if file.locate().exists()))
"""


def loaded_from(folder: Path) -> list[str]:
    """What a Python with nothing else on its path finds there, as vLLM looks for its plugins."""
    environ = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", "-c", LOADED_PLUGIN]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def small(version: str) -> tuple[str, dict[str, bytes]]:
    """A package of two files that say their version."""
    content = version.encode()
    metadata = f"vllm_highwater_worker-{version}.dist-info"
    return version, {
        "highwater_worker/__init__.py": content,
        "highwater_worker/inner/one.py": content,
        f"{metadata}/METADATA": content,
    }


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(worker_package, "_installed", lambda: small(version))


def versions_in(folder: Path) -> set[str]:
    """The versions that the package's files and its metadata say; whatever reads them finds all of them."""
    names = ("highwater_worker/__init__.py", "highwater_worker/inner/one.py")
    said = {(folder / name).read_text() for name in names}
    metadata = [path for path in folder.glob("vllm_highwater_worker-*.dist-info") if (path / "METADATA").is_file()]
    assert metadata
    return said


def stores_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]


def test_vllm_finds_the_plugin_in_the_copy_and_nowhere_else(tmp_path):
    copied = copy_worker_package(tmp_path / "new" / "copy")
    path, version, files = loaded_from(copied.folder)
    assert Path(path) == tmp_path / "new" / "copy" / "highwater_worker" / "plugin.py"
    assert version == copied.version == __version__
    package = [file for file in (copied.folder / "highwater_worker").rglob("*") if file.is_file()]
    assert int(files) == len(package) + 4  # METADATA, entry_points.txt, INSTALLER, RECORD
    assert not list(copied.folder.rglob("__pycache__"))


def test_a_copy_can_be_moved_as_a_whole(tmp_path):
    copy_worker_package(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there", symlinks=True)
    shutil.rmtree(tmp_path / "here")
    assert loaded_from(tmp_path / "there")[0].startswith(str(tmp_path / "there"))


def test_a_second_copy_writes_nothing(tmp_path):
    first = copy_worker_package(tmp_path)
    before = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    second = copy_worker_package(tmp_path)
    assert (first.is_new, second.is_new) == (True, False)
    assert {path: path.lstat().st_ino for path in tmp_path.rglob("*")} == before


def test_an_older_copy_is_replaced_and_goes(tmp_path, monkeypatch):
    """Its metadata too, or an engine would load both."""
    install(monkeypatch, "0.0.9")
    copy_worker_package(tmp_path)
    install(monkeypatch, "0.1.0")
    assert copy_worker_package(tmp_path).is_new
    assert versions_in(tmp_path) == {"0.1.0"}
    assert [path.name for path in tmp_path.glob("*.dist-info")] == ["vllm_highwater_worker-0.1.0.dist-info"]
    assert len(stores_in(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["change", "remove", "cut the link"])
def test_a_copy_that_was_damaged_is_mended(tmp_path, damage):
    copy_worker_package(tmp_path)
    if damage == "change":
        (tmp_path / "highwater_worker" / "plugin.py").write_text("broken")
    elif damage == "remove":
        (tmp_path / "highwater_worker" / "plugin.py").unlink()
    else:
        (tmp_path / "highwater_worker").unlink()
    assert copy_worker_package(tmp_path).is_new
    assert loaded_from(tmp_path)


class _StoppedHere(BaseException):
    """In place of a kill."""


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so many changes of the file system happen, and no other."""
    left = steps

    def counted(original: Any) -> Any:
        def change(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            if left == 0:
                raise _StoppedHere
            left -= 1
            return original(*arguments, **named)

        return change

    for name in ("mkdir", "write_bytes", "chmod", "symlink_to", "replace", "unlink"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))


def test_wherever_the_copying_is_cut_off_an_engine_finds_one_version_whole(tmp_path):
    seen: list[set[str]] = []
    for steps in range(100):
        folder = tmp_path / str(steps)
        with pytest.MonkeyPatch.context() as patched:
            install(patched, "0.0.9")
            copy_worker_package(folder)
            install(patched, "0.1.0")
            stop_after(steps, patched)
            try:
                copy_worker_package(folder)
            except _StoppedHere:
                is_finished = False
            else:
                is_finished = True
        seen.append(versions_in(folder))
        with pytest.MonkeyPatch.context() as patched:
            install(patched, "0.1.0")
            copy_worker_package(folder)
        assert versions_in(folder) == {"0.1.0"}
        assert len(stores_in(folder)) == 1
        if is_finished:
            break
    assert {"0.0.9"} in seen
    assert all(len(versions) == 1 for versions in seen)
    assert seen[-1] == {"0.1.0"}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "highwater_worker", ".hidden", "vllm_highwater_worker-9.dist-info"]
)
def test_a_folder_with_anything_else_in_it_is_refused(tmp_path, name):
    """Also a package of our name that somebody else put there: what we did not write we do not remove."""
    (tmp_path / name).mkdir()
    with pytest.raises(
        WorkerPackageError, match=f"{tmp_path} holds {name}, which .* did not write; name an empty folder"
    ):
        copy_worker_package(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_link_of_somebody_elses_is_refused_and_not_followed(tmp_path):
    (tmp_path / "theirs").mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "highwater_worker").symlink_to(tmp_path / "theirs")
    with pytest.raises(WorkerPackageError, match="did not write"):
        copy_worker_package(folder)
    assert list((tmp_path / "theirs").iterdir()) == []


def test_the_root_of_a_disk_is_no_foreign_folder(tmp_path):
    (tmp_path / "lost+found").mkdir()
    assert copy_worker_package(tmp_path).is_new


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        WorkerPackageError, match=f"cannot be copied to {tmp_path}/file/x: .*not a directory; name a folder"
    ):
        copy_worker_package(tmp_path / "file" / "x")


def test_the_engine_may_be_another_user(tmp_path):
    before = os.umask(0o077)
    try:
        copied = copy_worker_package(tmp_path / "made on the way" / "copy")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in copied.folder.rglob("*")} == {0o755, 0o644}
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (copied.folder, copied.folder.parent)} == {0o755}


def test_without_the_package_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_package, "distribution", raising(worker_package.PackageNotFoundError(DISTRIBUTION)))
    with pytest.raises(WorkerPackageError, match=f"pip install {DISTRIBUTION}"):
        copy_worker_package(tmp_path)


def test_a_package_that_is_no_folder_of_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_package, "find_spec", lambda _: None)
    with pytest.raises(WorkerPackageError, match="not a folder of files"):
        copy_worker_package(tmp_path)


@pytest.mark.parametrize("name", ["a:b", "a\nb"])
def test_a_folder_that_no_path_variable_can_name_is_refused(tmp_path, name):
    """An engine would look for it in pieces."""
    with pytest.raises(WorkerPackageError, match="cannot be on a PYTHONPATH"):
        copy_worker_package(tmp_path / name)


def test_a_folder_within_the_package_is_refused():
    """Its next copy would hold this one."""
    inside = Path(highwater_worker.__file__).parent / "copy"
    with pytest.raises(WorkerPackageError, match="lies within the worker package"):
        copy_worker_package(inside)
    assert not inside.exists()
