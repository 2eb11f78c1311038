"""What outlives the sidecar: written whole or not at all, read with care, never thrown away."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from highwater.process import state_file
from highwater.process.errors import NotKept
from highwater.process.state_file import MAX_FILE_BYTES, StateFile
from tests.fakes.raising import raising


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state.json"


def beside(path: Path) -> list[str]:
    """What else lies in the folder."""
    return sorted(other.name for other in path.parent.iterdir() if other != path)


no_room = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def test_without_a_path_nothing_is_kept():
    file = StateFile(None)
    file.write("policy", {"a": 1})
    assert (file.configured, file.read("policy"), file.problem, file.path) == (False, None, None, None)


def test_what_was_written_is_read_by_the_next(path):
    first = StateFile(path)
    first.write("policy", {"mode": "act"})
    first.write("other", {"at": 1.5})
    second = StateFile(path)
    assert (second.read("policy"), second.read("other"), second.problem) == ({"mode": "act"}, {"at": 1.5}, None)
    assert json.loads(path.read_bytes()) == {"schema": 1, "policy": {"mode": "act"}, "other": {"at": 1.5}}


def test_a_section_of_somebody_else_stays(path):
    path.write_text('{"schema": 1, "later": {"x": 1}}')
    StateFile(path).write("policy", {})
    assert StateFile(path).read("later") == {"x": 1}


def test_none_removes_a_section(path):
    file = StateFile(path)
    file.write("other", None)
    assert not path.exists()
    file.write("other", {"at": 1})
    file.write("other", None)
    assert (file.read("other"), StateFile(path).read("other")) == (None, None)


def test_what_is_read_is_a_copy(path):
    file = StateFile(path)
    given = {"rules": [1]}
    file.write("policy", given)
    given["rules"].append(2)
    (file.read("policy") or {})["rules"].append(3)
    assert file.read("policy") == {"rules": [1]}


def test_only_its_owner_may_read_it(path):
    path.write_text('{"schema": 1}')
    path.chmod(0o644)
    StateFile(path).write("policy", {})
    assert (stat.S_IMODE(path.stat().st_mode), beside(path)) == (0o600, [])


def test_a_link_stays_a_link(tmp_path, path):
    folder = tmp_path / "volume"
    folder.mkdir()
    path.symlink_to(folder / "real.json")
    StateFile(path).write("policy", {"a": 1})
    assert path.is_symlink()
    assert StateFile(folder / "real.json").read("policy") == {"a": 1}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is not valid JSON"),
        (b'{"schema": 1, "policy": {', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b'{"schema": 1, "policy": {"a": NaN}}', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b"{}", "is not of schema 1"),
        (b'{"schema": 2, "policy": {}}', "is not of schema 1"),
        (b'{"schema": true}', "is not of schema 1"),
        (b'{"schema": 1, "policy": []}', "has a section that is not a JSON object"),
        (b'{"schema": 1}' + b" " * MAX_FILE_BYTES, f"has more than {MAX_FILE_BYTES} bytes"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_what_cannot_be_read_is_set_aside_and_named(path, content, word):
    path.write_bytes(content)
    file = StateFile(path)
    (aside,) = beside(path)
    assert file.problem == (
        f"state_file: {path} {word}; it was set aside as {path.parent / aside}, and nothing of it is in force"
    )
    assert aside.startswith("state.json.corrupt-")
    assert (path.parent / aside).read_bytes() == content
    file.write("policy", {"a": 1})
    assert (file.read("other"), StateFile(path).read("policy")) == (None, {"a": 1})


def test_what_was_set_aside_before_is_not_overwritten(path, monkeypatch):
    monkeypatch.setattr(state_file.time, "time", lambda: 1_763_660_000.5)
    for content in ("first", "second"):
        path.write_text(content)
        StateFile(path)
    assert [(path.parent / name).read_text() for name in beside(path)] == ["first", "second"]
    assert beside(path) == ["state.json.corrupt-1763660000", "state.json.corrupt-1763660001"]


def test_what_cannot_be_set_aside_is_not_overwritten(path, monkeypatch):
    path.write_text("precious")
    monkeypatch.setattr(Path, "rename", raising(OSError(errno.EROFS, os.strerror(errno.EROFS))))
    file = StateFile(path)
    assert file.problem == (
        f"state_file: {path} is not valid JSON, and was not set aside: read-only file system; nothing can be kept"
    )
    with pytest.raises(NotKept, match="an unusable file is in its place"):
        file.write("policy", {})
    assert path.read_text() == "precious"


def test_what_is_no_file_is_left_where_it_is(path):
    """A named pipe would block a reader forever; a folder is not ours to rename."""
    os.mkfifo(path)
    file = StateFile(path)
    assert (file.problem or "").startswith(f"state_file: {path} is not a file, and was not set aside: it is no file of")
    path.unlink()
    path.mkdir()
    assert "is not a file, and was not set aside" in (StateFile(path).problem or "")
    assert path.is_dir()


def test_what_may_not_be_read_is_set_aside(path, monkeypatch):
    path.write_text('{"schema": 1}')
    monkeypatch.setattr(os, "open", raising(PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
    assert "cannot be read: permission denied; it was set aside as" in (StateFile(path).problem or "")


def test_a_missing_folder_is_told_at_the_start(tmp_path):
    """It is never made: a volume that is not mounted would go unnoticed."""
    path = tmp_path / "unmounted" / "state.json"
    file = StateFile(path)
    assert file.problem == f"state_file: {path} cannot be written: {path.parent} is missing or not writable"
    with pytest.raises(NotKept, match=r"state_file: .*unmounted/state.json could not be written: no such file"):
        file.write("policy", {})
    assert not path.parent.exists()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_disk_that_is_full_changes_nothing(path, monkeypatch, step):
    file = StateFile(path)
    file.write("policy", {"a": 1})
    monkeypatch.setattr(*((os, "fsync", no_room) if step == "fsync" else (Path, "replace", no_room)))
    with pytest.raises(NotKept, match="no space left on device; what was kept before still is") as caught:
        file.write("policy", {"a": 2})
    assert (caught.value.status, caught.value.code) == (507, "not_kept")
    monkeypatch.undo()
    assert (file.read("policy"), StateFile(path).read("policy"), beside(path)) == ({"a": 1}, {"a": 1}, [])


def test_it_is_on_the_disk_before_it_is_in_place_and_after(path, monkeypatch):
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor):
        steps.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync content")
        fsync(descriptor)

    def replaced(draft, target):
        steps.append("replace")
        return replace(draft, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    StateFile(path).write("policy", {})
    assert steps == ["sync content", "replace", "sync folder"]


def test_more_than_can_be_read_again_is_not_written(path):
    """The next start would set it aside."""
    file = StateFile(path)
    with pytest.raises(NotKept, match=f"more than the {MAX_FILE_BYTES} that are allowed"):
        file.write("policy", {"a": "x" * MAX_FILE_BYTES})
    assert (file.read("policy"), path.exists()) == (None, False)


def test_a_draft_that_a_crash_left_is_no_obstacle(path):
    """Nor is one that somebody else put there written into or followed, by whatever name a link leads to it."""
    draft = path.with_name(".state.json.draft")
    draft.write_text("half")
    elsewhere = path.parent / "elsewhere"
    os.link(draft, elsewhere)
    StateFile(path).write("policy", {"a": 1})
    assert StateFile(path).read("policy") == {"a": 1}
    assert elsewhere.read_text() == "half"
    draft.unlink()
    draft.symlink_to(path.parent / "victim")
    StateFile(path).write("policy", {"a": 2})
    assert (StateFile(path).read("policy"), (path.parent / "victim").exists()) == ({"a": 2}, False)
