"""The limit of the sidecar's own container and its kills for memory, by control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.process.own_cgroup import memory_limit, oom_kill_count

GIB = 1 << 30
V1 = "12:memory:/docker/1\n4:cpu,cpuacct:/\n0::/\n"


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


@pytest.mark.parametrize(
    ("name", "mine", "other"), [("memory.max", "5", "9"), ("memory.events", "oom_kill 5", "oom_kill 9")]
)
def test_the_group_goes_before_what_is_mounted(tmp_path: Path, name: str, mine: str, other: str):
    """A service of a machine without containers: the mount is of all."""
    files = {
        "proc/self/cgroup": "0::/hw.service\n",
        f"sys/fs/cgroup/hw.service/{name}": mine,
        f"sys/fs/cgroup/{name}": other,
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert 5 in (memory_limit(tmp_path), oom_kill_count(tmp_path))


def test_without_control_groups_the_limit_is_unknown(tmp_path: Path):
    """No such file, no exception."""
    assert memory_limit(tmp_path) is None


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.events": "oom 2\noom_kill 5\noom_group_kill 1\n"}, 5),
        ("0::/system.slice/hw.service\n", {"sys/fs/cgroup/system.slice/hw.service/memory.events": "oom_kill 0\n"}, 0),
        ("0::/of/the/host\n", {"sys/fs/cgroup/memory.events": "oom_kill 1\n"}, 1),
        (V1, {"sys/fs/cgroup/memory/docker/1/memory.oom_control": "under_oom 0\noom_kill 3\n"}, 3),
        (V1, {"sys/fs/cgroup/memory/memory.oom_control": "oom_kill 4\n"}, 4),
        ("0::/\n", {}, None),
        ("0::/\n", {"sys/fs/cgroup/memory.events": "oom_kill x\n"}, None),
        ("garbage", {}, None),
        (None, {}, None),
    ],
)
def test_the_own_groups_count_is_read(tmp_path: Path, groups: str | None, files: dict[str, str], count: int | None):
    """Of either version, in a container and beside one; what cannot be read is no zero."""
    for name, text in ({"proc/self/cgroup": groups} if groups is not None else {}).items() | files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert oom_kill_count(tmp_path) == count
