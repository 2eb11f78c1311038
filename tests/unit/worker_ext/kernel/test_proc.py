"""What `/proc` says: of a process, and of what a path lies on, without a touch."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater_worker.kernel.proc import file_system_of, is_in_memory, is_remote, read_figures

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:20 / /dev/shm rw,nosuid - tmpfs tmpfs rw
24 22 0:30 / /mnt/with\040space rw - nfs4 server:/export rw
25 24 0:31 / /mnt/with\040space/inner rw - tmpfs tmpfs rw
26 22 0:32 / /run rw - ext4 /dev/sda2 rw
27 26 0:33 / /run rw master:3 - tmpfs tmpfs rw
malformed
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/dev/shm/highwater", "tmpfs"),
        ("/dev/shm2", "ext4"),
        ("/mnt/with space/a/b", "nfs4"),
        ("/mnt/with space/inner/a", "tmpfs"),
        ("/mnt/with space/inner/../x", "nfs4"),
        ("/run/highwater", "tmpfs"),
    ],
)
def test_the_innermost_mount_tells(root, path, kind):
    assert file_system_of(Path(path), root) == kind


def test_where_the_kernel_does_not_tell_nothing_is_known(tmp_path):
    kind = file_system_of(Path("/dev/shm"), tmp_path)
    assert (kind, is_in_memory(kind), is_remote(kind)) == (None, False, False)


@pytest.mark.parametrize(
    ("kind", "memory", "remote"),
    [
        ("tmpfs", True, False),
        ("ext4", False, False),
        ("overlay", False, False),
        ("fuse.fuse-overlayfs", False, False),
        ("fuse.glusterfs", False, True),
        ("fuse", False, True),
        ("nfs", False, True),
        ("autofs", False, True),
    ],
)
def test_kinds_are_told_apart(kind, memory, remote):
    """A container's own root may be in user space, and is local all the same."""
    assert (is_in_memory(kind), is_remote(kind)) == (memory, remote)


def test_a_process_may_call_itself_anything(tmp_path):
    """What is no printable ASCII is not handed on: a sidecar would refuse the whole file for it."""
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/status").write_bytes("Name:\té\x1b[2Jx\nThreads:\t1\n".encode())
    assert read_figures(7, tmp_path)["command"] == "???[2Jx"
