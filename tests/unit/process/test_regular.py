"""Foreign files: opened where they are files, and nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from highwater.process.regular import (
    FileTooLargeError,
    NotARegularFileError,
    NotPrivate,
    open_regular,
    read_private,
    read_regular,
    replace_private,
)


def test_a_file_is_opened_by_its_path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with os.fdopen(open_regular(path), "rb") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "odd"
    makers = {"link": lambda: path.symlink_to(__file__), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}
    makers[kind]()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotARegularFileError):
        open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_that_takes_the_files_place_in_between_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.symlink_to(__file__)
    monkeypatch.setattr(os, "stat", lambda *_, **__: os.lstat(__file__))
    with pytest.raises(NotARegularFileError):
        open_regular(path)


def test_an_operators_own_path_may_be_a_link(tmp_path):
    """Kubernetes mounts its files so."""
    path = tmp_path / "link"
    path.symlink_to(__file__)
    os.close(open_regular(path, follows_link=True))


def test_a_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert read_regular(path, 7) == b"content"
    with pytest.raises(FileTooLargeError, match="it has more than 6 bytes"):
        read_regular(path, 6)


def test_the_beginning_of_a_file_is_read_within_the_same_bound(tmp_path):
    """A file that is too large is refused, even though its first bytes would be few."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert read_regular(path, 7, first_bytes=3) == b"con"
    with pytest.raises(FileTooLargeError):
        read_regular(path, 6, first_bytes=3)


# Whoever runs the tests, root too: their ids are changed on the way.
WE, STRANGER = 1000, 4242
REAL = os.fstat, Path.lstat


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "secret"


@pytest.fixture(autouse=True)
def _as_an_ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: WE)
    owned_by(monkeypatch, WE)


def owned_by(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """Let every file look like one of that user's."""
    fstat, lstat = REAL

    def changed(found: os.stat_result) -> os.stat_result:
        return os.stat_result([uid if index == 4 else value for index, value in enumerate(found[:10])])

    monkeypatch.setattr(os, "fstat", lambda descriptor: changed(fstat(descriptor)))
    monkeypatch.setattr(Path, "lstat", lambda path: changed(lstat(path)))


def test_what_was_written_is_read_and_is_for_its_owner_alone(path):
    path.write_text("old")
    path.chmod(0o666)
    before = os.umask(0)
    try:
        replace_private(path, b"new")
    finally:
        os.umask(before)
    assert (read_private(path, max_bytes=10), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_link_in_its_place_is_replaced_and_not_written_through(tmp_path, path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path.symlink_to(victim)
    replace_private(path, b"secret")
    assert (victim.read_text(), path.is_symlink(), path.read_bytes()) == ("mine", False, b"secret")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o666, 0o620])
def test_a_file_that_others_can_read_or_write_is_refused(path, mode):
    path.write_text("secret")
    path.chmod(mode)
    with pytest.raises(NotPrivate, match=f"mode {mode:04o}.*chmod 600"):
        read_private(path, max_bytes=10)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_our_own_is_read(path, mode):
    path.write_text("secret")
    path.chmod(mode)
    assert read_private(path, max_bytes=10) == b"secret"


def test_a_file_of_another_user_is_refused(path, monkeypatch):
    replace_private(path, b"secret")
    owned_by(monkeypatch, STRANGER)
    with pytest.raises(NotPrivate, match=f"belongs to user {STRANGER}"):
        read_private(path, max_bytes=10)


@pytest.mark.parametrize(("mode", "is_read"), [(0o440, True), (0o640, True), (0o444, False), (0o660, False)])
def test_a_file_of_roots_may_be_read_by_a_group(path, monkeypatch, mode, is_read):
    """As Kubernetes mounts a Secret where the pod has an fsGroup; but by nobody else."""
    path.write_text("secret")
    path.chmod(mode)
    owned_by(monkeypatch, 0)
    try:
        assert (read_private(path, max_bytes=10), is_read) == (b"secret", True)
    except NotPrivate:
        assert not is_read


def test_a_link_of_our_own_is_followed(tmp_path, path):
    """Kubernetes swaps Secrets by links."""
    (tmp_path / "..data").mkdir()
    replace_private(tmp_path / "..data" / "secret", b"secret")
    path.symlink_to("..data/secret")
    assert read_private(path, max_bytes=10) == b"secret"


def test_a_link_of_another_user_is_not_followed(tmp_path, path, monkeypatch):
    replace_private(tmp_path / "real", b"secret")
    path.symlink_to("real")
    owned_by(monkeypatch, STRANGER)
    with pytest.raises(NotPrivate, match="belongs to user"):
        read_private(path, max_bytes=10)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_not_waited_for(path, kind):
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(0o700)
    with pytest.raises(NotPrivate, match="is not a file"):
        read_private(path, max_bytes=10)


def test_a_large_file_is_not_read_whole(path):
    replace_private(path, b"x" * 11)
    with pytest.raises(NotPrivate, match="more than 10 bytes"):
        read_private(path, max_bytes=10)


def test_a_missing_file_is_told_apart(path):
    with pytest.raises(FileNotFoundError):
        read_private(path, max_bytes=10)
