"""What the kernel counts means the same of both versions of cgroups, read here or by the engine's own processes."""

from __future__ import annotations

import pytest

from highwater.host.kernel import container_of, memory_limit, shm_of
from highwater.model.units import MIB
from highwater_worker.kernel import cgroup as worker_cgroup
from highwater_worker.kernel.cgroup import read_container
from tests.unit.host.recorded import V1_STAT, group, machine

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
    group(tmp_path, "pod", limit=str(6144 * MIB))
    root = machine(tmp_path, proc__self__cgroup="0::/pod\n")
    one = container_of(read_container(root))
    assert (one.version, one.used_bytes, one.limit_bytes) == (2, 5_108_666_368, 6144 * MIB)
    assert (one.anonymous_bytes, one.shmem_bytes, one.page_cache_bytes) == (3072 * MIB, 600 * MIB, 1000 * MIB)
    assert (one.droppable_bytes, one.kernel_bytes) == (1000 * MIB, 200 * MIB + 4096)
    assert one.kept_bytes == 5_108_666_368 - 1100 * MIB
    assert one.room_bytes == 6144 * MIB - one.kept_bytes
    assert one.events["oom_kill"] == 1
    assert (one.pressure.some_avg60, one.pressure.full_seconds) == (11.0, 1.5)


def test_version_1_by_kind(tmp_path):
    one = container_of(read_container(version_1(tmp_path)))
    assert (one.version, one.limit_bytes, one.room_bytes) == (1, None, None)
    assert (one.anonymous_bytes, one.shmem_bytes, one.page_cache_bytes) == (3072 * MIB, 600 * MIB, 1000 * MIB)
    assert (one.kernel_bytes, one.sock_bytes, one.swap_bytes) == (209_719_296, 4096, 4096)
    assert one.events == {"oom_kill": 2, "max": 7}
    assert one.kept_bytes == 5_108_666_368 - 1000 * MIB


def test_what_a_worker_does_not_say_is_kept_is_what_the_kernel_cannot_drop():
    raw = {"version": 2, "used": 1000, "stat": {"active_file": 100, "inactive_file": 200, "slab_reclaimable": 50}}
    assert container_of(raw).kept_bytes == 650


def test_a_limit_above_the_own_group_counts(tmp_path):
    group(tmp_path, "pod", limit=str(5000 * MIB), current=4999 * MIB)
    group(tmp_path, "pod/box", current=2000 * MIB)
    root = machine(tmp_path, proc__self__cgroup="0::/pod/box\n")
    one = container_of(read_container(root))
    assert (one.used_bytes, one.limit_bytes) == (2000 * MIB, 5000 * MIB)
    assert one.room_bytes == 5000 * MIB - (4999 - 1100) * MIB


def test_without_groups_nothing_is_claimed(tmp_path):
    assert read_container(machine(tmp_path)) is None


@pytest.mark.parametrize("bad", [-1, 2**60, 2**70, True, 1.5, "7", None, [], {}])
def test_what_no_kernel_counts_is_unknown(bad):
    raw = {
        **dict.fromkeys(("version", "inode", "used", "limit", "kept", "peak", "kernel", "sock", "swap"), bad),
        "stat": dict.fromkeys(("anon", "file", "shmem", "slab", "active_file"), bad),
        "events": {"oom_kill": bad, "wizard": 1},
        "pressure": {"some": [0.0, bad, 0.0, 1], "full": [bad], "none": [0, 0, 0, 0]},
        "path": "/pod\x1b[2J",
    }
    one = container_of(raw, boot_id="71a42b98", age_seconds=2.0)
    known = {name: value for name in one.__slots__ if (value := getattr(one, name)) not in (None, {}, False)}
    assert known.pop("key").startswith("71a42b98-")
    assert "\x1b" not in one.key
    pressure = known.pop("pressure", None)
    assert known == {"age_seconds": 2.0, "sees": "engine"}
    assert pressure is None or bad == 1.5


@pytest.mark.parametrize("row", [[1, 2], [1, 2, -3], [1, "2", 3], [], "123", {"a": 1}, [1, 2, 2**70], None])
def test_rows_of_shared_memory_that_cannot_be_are_left_out(row):
    one = shm_of(
        {"size": -1, "owners": {"nccl": row, "B[2J": [1, 2, 3]}, "left_over": {"other": [1, 2, 3]}, "unlinked": 7}
    )
    assert (one.size_bytes, one.promised_bytes) == (None, 0)
    assert [(owner.owner, owner.state, owner.used_bytes) for owner in one.owners] == [("other", "left_over", 2)]


def test_the_limit_is_the_tightest_of_the_own_group(tmp_path):
    group(tmp_path, "pod", limit=str(5000 * MIB))
    group(tmp_path, "pod/box")
    assert memory_limit(machine(tmp_path, proc__self__cgroup="0::/pod/box\n")) == 5000 * MIB


def test_without_control_groups_the_limit_is_unknown(tmp_path):
    assert memory_limit(tmp_path) is None
