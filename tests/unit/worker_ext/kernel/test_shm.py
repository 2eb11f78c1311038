"""`/dev/shm` by owner, from the files' names, and by who has them open, as `/proc` shows it."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from highwater.host.report import SHM_TITLES
from highwater_worker.kernel import shm
from highwater_worker.kernel.shm import OWNERS, owner_of, read_shm

MIB = 1 << 20


class Machine:
    """A folder in place of `/dev/shm`, and a `/proc` whose processes have files of it open."""

    def __init__(self, folder: Path) -> None:
        self.shm, self.proc = folder / "shm", folder / "proc"
        self.shm.mkdir()
        device = self.shm.stat().st_dev
        self.device = f"{os.major(device):02x}:{os.minor(device):02x}"
        for name in ("pid", "ipc"):
            (self.proc / "self/ns").mkdir(parents=True, exist_ok=True)
            (self.proc / f"self/ns/{name}").write_text("")
        (self.proc / "self/mountinfo").write_text("22 1 0:5 / /proc rw - proc proc rw\n")

    def file(self, name: str, size: int = MIB, written: int = 0) -> Path:
        path = self.shm / name
        path.write_bytes(bytes(written))
        os.truncate(path, size)
        return path

    def process(self, pid: int, *mapped: str, opened: tuple[str, ...] = ()) -> Path:
        """`mapped` are lines of maps as `region` makes them."""
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        other = "7f0000000000-7f0000001000 r-xp 00000000 fe:00 7                          /usr/lib/libc.so.6\n"
        anonymous = "7f0000002000-7f0000003000 rw-p 00000000 00:00 0 \n"
        (folder / "maps").write_text(anonymous + "".join(mapped) + other)
        for number, path in enumerate(opened):
            (folder / f"fd/{number}").symlink_to(path)
        return folder

    def region(self, inode: int, size: int, path: str, offset: int = 0) -> str:
        return f"{1 << 44:x}-{(1 << 44) + size:x} rw-s {offset:08x} {self.device} {inode}    {path}\n"

    def of(self, path: Path) -> str:
        return self.region(path.stat().st_ino, path.stat().st_size, str(path))

    def read(self, seconds: float = 60.0) -> dict[str, object]:
        """Read so long after the files were made."""
        return read_shm(str(self.shm), str(self.proc), lambda: time.time() + seconds)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def kinds(found):
    return {name: {owner: row[0] for owner, row in found[name].items()} for name in shm.KINDS if found[name]}


def test_every_owner_has_a_title():
    names = [f"{start}1" for start, _ in OWNERS] + ["engine-cpushm", "mine"]
    assert {owner_of(name) for name in names} == set(SHM_TITLES)


def test_files_are_counted_by_owner_with_what_they_may_still_take(machine):
    (machine.shm / "highwater").mkdir()
    for name in ("nccl-abc", "highwater/a.ring", "mine"):
        (machine.shm / name).write_bytes(b"x")
    machine.file("psm_1234", written=8192)
    (machine.shm / "link").symlink_to("/etc")
    found = machine.read(0.0)
    rows = {owner: (files, used > 0) for owner, (files, used, _) in found["owners"].items()}
    assert rows == {"rpc_rings": (1, True), "nccl": (1, True), "recorder": (1, True), "other": (1, True)}
    files, used, promised = found["owners"]["rpc_rings"]
    assert (files, used + promised) == (1, MIB)


def test_a_file_is_left_over_where_no_process_has_it_mapped_or_open(machine):
    """Python keeps both; recorders and OpenMP's file are open in nobody all the time."""
    mapped, opened = machine.file("psm_mapped"), machine.file("psm_opened")
    for name in ("psm_left", "nccl-left", "sem.left", "mine", "__KMP_REGISTERED_LIB_7_0", "highwater-1.ring"):
        machine.file(name)
    machine.process(7, machine.of(mapped))
    machine.process(8, opened=(str(opened), "socket:[77]"))
    assert kinds(machine.read()) == {
        "owners": {"rpc_rings": 2, "openmp": 1, "recorder": 1},
        "left_over": {"rpc_rings": 1, "nccl": 1, "semaphores": 1, "other": 1},
    }


def test_a_new_file_is_in_use_before_it_is_mapped(machine):
    machine.file("psm_1")
    assert kinds(machine.read(1.0)) == {"owners": {"rpc_rings": 1}}
    assert kinds(machine.read(60.0)) == {"left_over": {"rpc_rings": 1}}


def test_a_region_without_a_name_is_its_owners_that_have_it_mapped(machine, monkeypatch):
    path = f"{machine.shm}/vllm_offload_1.mmap (deleted)"
    first, second = machine.region(77, 2 * MIB, path), machine.region(77, MIB, path, offset=3 * MIB)
    elsewhere = machine.region(78, MIB, "/dev/zero (deleted)").replace(machine.device, "00:01")
    machine.process(7, first, second, elsewhere)
    machine.process(8, first)
    used(monkeypatch, 3 * MIB)
    assert machine.read()["unlinked"] == {"kv_offload": [1, 3 * MIB, MIB]}


def test_what_several_such_owners_have_allocated_is_divided_by_their_sizes(machine, monkeypatch):
    ring = machine.file("psm_1", written=MIB)
    offloaded = machine.region(77, 6 * MIB, f"{machine.shm}/vllm_offload_1.mmap (deleted)")
    nccl = machine.region(78, 2 * MIB, f"{machine.shm}/nccl-x (deleted)")
    machine.process(7, offloaded, nccl, machine.of(ring))
    used(monkeypatch, ring.stat().st_blocks * 512 + 4 * MIB)
    assert machine.read()["unlinked"] == {"kv_offload": [1, 3 * MIB, 3 * MIB], "nccl": [1, MIB, MIB]}
    used(monkeypatch, 99 * MIB)  # a further one is open and not mapped
    assert machine.read()["unlinked"] == {"kv_offload": [1, 6 * MIB, 0], "nccl": [1, 2 * MIB, 0]}


def used(monkeypatch, size):
    space = os.statvfs_result(
        (4096, 4096, 1 << 30, (1 << 30) - size // 4096, (1 << 30) - size // 4096, 0, 0, 0, 0, 255)
    )
    monkeypatch.setattr(os, "statvfs", lambda _: space)


def hides_processes(machine):
    (machine.proc / "self/mountinfo").write_text("22 1 0:5 / /proc rw - proc proc rw,hidepid=invisible\n")


def has_no_namespaces(machine):
    (machine.proc / "self/ns/ipc").unlink()


def has_the_machines_ipc(machine):
    machine.monkeypatch.setattr(shm, "_MACHINES_IPC", (machine.proc / "self/ns/ipc").stat().st_ino)


def has_too_many(machine):
    machine.monkeypatch.setattr(shm, "MAX_PROCESSES", 0)


def has_too_large_maps(machine):
    machine.monkeypatch.setattr(shm, "MAX_MAPS_BYTES", 100)


def has_too_many_open(machine):
    machine.monkeypatch.setattr(shm, "MAX_DESCRIPTORS", 0)
    machine.process(9, opened=("/etc/hosts",))


def has_one_that_cannot_be_read(machine):
    folder = machine.process(9)
    (folder / "maps").unlink()
    (folder / "maps").mkdir()  # an OSError that is not of an end
    (folder / "status").write_text("Name:\tx\nVmSize:\t 9000 kB\nRssShmem:\t       0 kB\nThreads:\t1\n")


def has_one_whose_first_thread_ended(machine):
    """Its others go on with what it has open."""
    has_one_that_cannot_be_read(machine)
    (machine.proc / "9/status").write_text("Name:\tx\nState:\tZ (zombie)\nThreads:\t2\n")


@pytest.mark.parametrize(
    "lacks",
    [
        hides_processes,
        has_no_namespaces,
        has_the_machines_ipc,
        has_too_many,
        has_too_large_maps,
        has_too_many_open,
        has_one_that_cannot_be_read,
        has_one_whose_first_thread_ended,
    ],
)
def test_where_not_every_process_is_seen_it_is_not_known_who_has_a_file_open(machine, monkeypatch, lacks):
    machine.monkeypatch = monkeypatch
    machine.file("psm_1")
    machine.process(7)
    lacks(machine)
    assert kinds(machine.read()) == {"not_known": {"rpc_rings": 1}}


def test_a_zombie_or_thread_of_the_kernel_that_cannot_be_read_hides_nothing(machine):
    machine.file("psm_1")
    has_one_that_cannot_be_read(machine)
    (machine.proc / "9/status").write_text("Name:\tx\nState:\tZ (zombie)\nThreads:\t1\n")
    (machine.proc / "10").mkdir()
    assert kinds(machine.read()) == {"left_over": {"rpc_rings": 1}}


def test_in_the_machines_own_namespace_its_ipc_is_no_others(machine, monkeypatch):
    monkeypatch.setattr(shm, "MACHINES_PID_NAMESPACE", (machine.proc / "self/ns/pid").stat().st_ino)
    monkeypatch.setattr(shm, "_MACHINES_IPC", (machine.proc / "self/ns/ipc").stat().st_ino)
    machine.file("psm_1")
    assert kinds(machine.read()) == {"left_over": {"rpc_rings": 1}}


def test_a_crowd_of_files_is_cut(machine, monkeypatch):
    monkeypatch.setattr(shm, "MAX_FILES", 3)
    for number in range(9):
        machine.file(f"psm_{number}")
    found = machine.read(0.0)
    assert found["is_cut"]
    assert found["owners"]["rpc_rings"][0] == 3


def test_without_a_limit_there_is_no_size(machine, monkeypatch):
    """A tmpfs of size 0 counts nothing: it is not full."""
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
    assert not {"size", "used", "free"} & machine.read().keys()


HOLDS = """
import mmap, os, sys
path, how = sys.argv[1:]
file = os.open(path, os.O_CREAT | os.O_RDWR)
os.posix_fallocate(file, 0, 1 << 20)
if how == "mapped":  # and not touched
    held = mmap.mmap(file, 1 << 20)
    os.close(file)
if how == "ended":
    os._exit(0)
print(flush=True)
sys.stdin.read()
"""
LOOKS = """
import encodings.ascii, importlib.util, json, os, sys, time
module, proc = sys.argv[1:]
spec = importlib.util.spec_from_file_location("shm", module)
shm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shm)
os.setgid(65534)
os.setuid(65534)
print(json.dumps(shm.read_shm(proc=proc, clock=lambda: time.time() + 60.0)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="root can be another user")
@pytest.mark.parametrize(("how", "kind"), [("opened", "not_known"), ("mapped", "not_known"), ("ended", "left_over")])
def test_a_file_of_another_users_process_is_not_said_to_be_left(how, kind):
    """By the kernel: what is open alone, or untouched, counts as no shared memory; nothing is open in a zombie."""
    path = Path(f"/dev/shm/vllm_ec_test_{os.getpid()}")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # noqa: S103 - another user reads it
        machine = Machine(Path(folder))
        holds = [sys.executable, "-c", HOLDS, str(path), how]
        holder = subprocess.Popen(holds, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        (machine.proc / str(holder.pid)).symlink_to(f"/proc/{holder.pid}")
        try:
            holder.stdout.readline()
            while how == "ended" and ") Z " not in Path(f"/proc/{holder.pid}/stat").read_text():
                time.sleep(0.01)
            command = [sys.executable, "-c", LOOKS, shm.__file__, str(machine.proc)]
            looked = subprocess.run(command, capture_output=True, text=True, check=True)
        finally:
            holder.communicate(b"")
            path.unlink(missing_ok=True)
    assert [name for name, owners in kinds(json.loads(looked.stdout)).items() if "encoder_offload" in owners] == [kind]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/shm is Linux's")
def test_the_kernel_shows_a_mapped_file_and_one_without_a_name():
    path = Path(f"/dev/shm/vllm_offload_test_{os.getpid()}.mmap")
    with path.open("w+b") as file:
        os.truncate(path, 4 * MIB)
        region = mmap.mmap(file.fileno(), 4 * MIB)
        region[: 3 * MIB] = bytes(3 * MIB)
    try:
        named = read_shm(clock=lambda: time.time() + 60.0)
        path.unlink()
        nameless = read_shm()
    finally:
        path.unlink(missing_ok=True)
        region.close()
    assert named["owners"]["kv_offload"][0] >= 1
    assert nameless["unlinked"]["kv_offload"][0] >= 1
    assert sum(row[1] for row in nameless["unlinked"].values()) >= 3 * MIB
