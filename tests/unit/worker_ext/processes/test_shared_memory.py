"""`/dev/shm` by owner, from the files' names; both sides of the wire have one table."""

from __future__ import annotations

import os

from highwater.host import shared_memory as sidecar
from highwater.host.parts import SHM_TITLES
from highwater_worker.processes import shared_memory


def test_both_sides_tell_owners_apart_by_the_same_table():
    """The sidecar reads its own view where it is the engine's too."""
    assert shared_memory.OWNERS == sidecar.OWNERS
    names = [f"{start}1" for start, _ in sidecar.OWNERS] + ["engine-cpushm", "mine"]
    assert [shared_memory.owner_of(name) for name in names] == [sidecar.owner_of(name) for name in names]
    assert {sidecar.owner_of(name) for name in names} == set(SHM_TITLES)


def test_files_are_counted_by_owner_with_what_they_may_still_take(tmp_path):
    """A sparse file has promised its size; folders count with what is in them; links lead nowhere."""
    (tmp_path / "psm_1234").write_bytes(bytes(8192))
    os.truncate(tmp_path / "psm_1234", 1 << 20)
    (tmp_path / "nccl-abc").write_bytes(b"x")
    (tmp_path / "highwater").mkdir()
    (tmp_path / "highwater/a.ring").write_bytes(b"x")
    (tmp_path / "mine").write_bytes(b"x")
    (tmp_path / "link").symlink_to("/etc")
    found = shared_memory.read_shm(str(tmp_path))
    rows = {owner: (files, used > 0) for owner, (files, used, _) in found["owners"].items()}
    assert rows == {"rpc_rings": (1, True), "nccl": (1, True), "recorder": (1, True), "other": (1, True)}
    files, used, promised = found["owners"]["rpc_rings"]
    assert (files, used + promised) == (1, 1 << 20)
    assert sidecar.read_shm(tmp_path).owners == {name: tuple(row) for name, row in found["owners"].items()}


def test_a_crowd_of_files_is_cut(tmp_path, monkeypatch):
    """It says so, and goes on."""
    monkeypatch.setattr(shared_memory, "MAX_FILES", 3)
    for number in range(9):
        (tmp_path / f"psm_{number}").write_bytes(b"")
    found = shared_memory.read_shm(str(tmp_path))
    assert found["is_cut"]
    assert found["owners"]["rpc_rings"][0] < 3
