"""Foreign files: opened where they are files, and nothing else."""

from __future__ import annotations

import os

import pytest

from highwater.files.regular import NotARegularFileError, open_regular


def test_a_file_is_opened_by_its_path(tmp_path):
    """For reading."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with os.fdopen(open_regular(path), "rb") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    """A pipe nobody writes into does not hold us, and nothing is left open."""
    path = tmp_path / "odd"
    makers = {"link": lambda: path.symlink_to(__file__), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}
    makers[kind]()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotARegularFileError):
        open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_that_takes_the_files_place_in_between_is_refused(tmp_path, monkeypatch):
    """It was a file when it was looked at."""
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
