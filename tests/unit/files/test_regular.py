"""Foreign files: opened where they are files, and nothing else."""

from __future__ import annotations

import os

import pytest

from highwater.files.regular import FileTooLargeError, NotARegularFileError, open_regular, read_regular


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
