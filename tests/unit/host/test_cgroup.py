"""Memory cgroups of both versions mean the same, read here or by the engine's own processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.host.cgroup import container_of, memory_limit, read_group
from highwater.units import GIB, MIB
from highwater_worker.devices import cgroup as worker_cgroup
from tests.unit.host.recorded import V1_STAT, group, machine

V1_GROUPS = "12:memory:/docker/1\n4:cpu,cpuacct:/\n0::/\n"
V1_MOUNT = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.fixture(autouse=True)
def _forgets_groups():
    worker_cgroup.group_files.cache_clear()


def version_1(root, limit=9223372036854771712):
    folder = root / "sys/fs/cgroup/memory/box"
    folder.mkdir(parents=True)
    texts = {
        "memory.usage_in_bytes": "5108666368\n",
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.max_usage_in_bytes": "6000000000\n",
        "memory.kmem.usage_in_bytes": "209719296\n",
        "memory.kmem.tcp.usage_in_bytes": "4096\n",
        "memory.failcnt": "7\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "memory.stat": V1_STAT,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return machine(root, proc__self__cgroup="4:memory:/box\n0::/\n", proc__self__mountinfo=V1_MOUNT)


def test_version_2_by_kind(tmp_path):
    """File pages without shared memory, the kernel's with socket buffers, and what cannot be dropped."""
    group(tmp_path, "pod", limit=str(6144 * MIB))
    root = machine(tmp_path, proc__self__cgroup="0::/pod\n")
    one = container_of(read_group("self", root))
    assert (one.version, one.used_bytes, one.limit_bytes) == (2, 5_108_666_368, 6144 * MIB)
    assert (one.anonymous_bytes, one.shmem_bytes, one.page_cache_bytes) == (3072 * MIB, 600 * MIB, 1000 * MIB)
    assert (one.droppable_bytes, one.kernel_bytes) == (1000 * MIB, 200 * MIB + 4096)
    assert one.kept_bytes == 5_108_666_368 - 1100 * MIB
    assert one.room_bytes == 6144 * MIB - one.kept_bytes
    assert one.events["oom_kill"] == 1
    assert (one.pressure.some_avg60, one.pressure.full_seconds) == (11.0, 1.5)


def test_version_1_by_kind(tmp_path):
    """The same numbers from the other version's files; without a limit there is no room to speak of."""
    one = container_of(read_group("self", version_1(tmp_path)))
    assert (one.version, one.limit_bytes, one.room_bytes) == (1, None, None)
    assert (one.anonymous_bytes, one.shmem_bytes, one.page_cache_bytes) == (3072 * MIB, 600 * MIB, 1000 * MIB)
    assert (one.kernel_bytes, one.sock_bytes, one.swap_bytes) == (209_719_296, 4096, 4096)
    assert one.events == {"oom_kill": 2, "max": 7}
    assert one.kept_bytes == 5_108_666_368 - 1000 * MIB


def test_a_limit_above_the_own_group_counts(tmp_path):
    """The pod's, where the container has none: that is the one that kills."""
    group(tmp_path, "pod", limit=str(5000 * MIB), current=4999 * MIB)
    group(tmp_path, "pod/box", current=2000 * MIB)
    root = machine(tmp_path, proc__self__cgroup="0::/pod/box\n")
    one = container_of(read_group("self", root))
    assert (one.used_bytes, one.limit_bytes) == (2000 * MIB, 5000 * MIB)
    assert one.room_bytes == 5000 * MIB - (4999 - 1100) * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_rank_tells_of_the_same_group(tmp_path, version):
    """Of which the kernel can drop the same."""
    if version == 1:
        root = version_1(tmp_path, limit=6 * 1024 * MIB)
    else:
        group(tmp_path, "pod", limit=str(6144 * MIB))
        root = machine(tmp_path, proc__self__cgroup="0::/pod\n")
    ours = read_group("self", root)
    assert worker_cgroup.read_cgroup(root) == (ours.kept, ours.limit)


def test_without_groups_nothing_is_claimed(tmp_path):
    """No mount of the file system, or none that shows the group."""
    assert read_group("self", machine(tmp_path)) is None


# --- the sidecar's own group ---


@pytest.mark.parametrize(
    ("groups", "file", "text", "limit"),
    [
        ("0::/", "sys/fs/cgroup/memory.max", f"{GIB}\n", GIB),
        ("0::/kubepods/pod1/c1", "sys/fs/cgroup/memory.max", f"{GIB}\n", GIB),
        ("0::/kubepods/c1", "sys/fs/cgroup/kubepods/c1/memory.max", f"{GIB}\n", GIB),
        ("5:cpu:/\n4:memory:/docker/c", "sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes", f"{GIB}\n", GIB),
        ("0::/", "sys/fs/cgroup/memory.max", "max\n", None),
        ("4:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("0::/", "sys/fs/cgroup/memory.max", "what\n", None),
        ("0::/", "elsewhere", "1", None),
    ],
)
def test_the_limit_is_that_of_the_own_group(tmp_path: Path, groups: str, file: str, text: str, limit: int | None):
    """As mounted in a container, or under the group's path; ``None`` without a limit."""
    for name, content in (("proc/self/cgroup", groups), (file, text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert memory_limit(tmp_path) == limit


def test_the_group_goes_before_what_is_mounted(tmp_path: Path):
    """A service of a machine without containers: the mount is of all."""
    files = {
        "proc/self/cgroup": "0::/hw.service\n",
        "sys/fs/cgroup/hw.service/memory.max": "5",
        "sys/fs/cgroup/memory.max": "9",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert memory_limit(tmp_path) == 5


def test_without_control_groups_the_limit_is_unknown(tmp_path: Path):
    """No such file, no exception."""
    assert memory_limit(tmp_path) is None
