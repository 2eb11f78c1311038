"""Host memory is read from files of either cgroup version, and never costs the answer."""

from __future__ import annotations

import mmap

import pytest

from highwater_worker.devices import HostMemory, read_host
from highwater_worker.errors import Notes

MIB = 1 << 20
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "31 23 0:27 / /sys/fs/cgroup/memory rw,nosuid shared:5 - cgroup cgroup rw,memory\n"


@pytest.fixture
def machine(tmp_path):
    """`machine({path: text})` makes a file tree with these files; /proc's usual ones are there already."""

    def make(files):
        defaults = {
            "proc/self/statm": "9000 1000 500 1 0 400 0\n",
            "proc/meminfo": "MemTotal: 65536 kB\nMemFree: 1 kB\nMemAvailable: 32768 kB\nHugePages_Total: 0\n",
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/\n",
        }
        for name, text in (defaults | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def group(path, limit, current, inactive=0, active=0):
    return {
        f"{path}/memory.max": f"{limit}\n",
        f"{path}/memory.current": f"{current}\n",
        f"{path}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file {active}\n",
    }


def read(root):
    notes = Notes()
    return read_host(notes, root), notes.as_list()


def test_a_container_sees_its_own_limit(machine):
    """File pages that the kernel would drop first are not counted as used, whether read once or often."""
    host, notes = read(machine(group("sys/fs/cgroup", 40 * MIB, 30 * MIB, 1 * MIB, 3 * MIB)))
    assert host == HostMemory(1000 * mmap.PAGESIZE, 26 * MIB, 40 * MIB, 64 * MIB, 32 * MIB)
    assert (host.total_bytes, host.free_bytes, notes) == (40 * MIB, 14 * MIB, [])


@pytest.mark.parametrize(("used", "tightest"), [(30, (19, 20)), (60, (60, 60))])
def test_the_group_above_that_has_least_left_counts(machine, used, tightest):
    """Not the one of the least limit: a pod's may be far off while its node's is met."""
    top = "sys/fs/cgroup"
    files = {"proc/self/cgroup": "0::/pod/box\n"}
    files |= group(f"{top}/pod/box", "max", 5 * MIB) | group(f"{top}/pod", 20 * MIB, 19 * MIB)
    host, _ = read(machine(files | group(top, 60 * MIB, used * MIB)))
    assert (host.cgroup_used_bytes // MIB, host.cgroup_limit_bytes // MIB) == tightest
    assert host.free_bytes == (tightest[1] - tightest[0]) * MIB


def test_only_groups_with_a_limit_are_asked_what_they_drop_first(machine, monkeypatch):
    asked = []

    def read_lines(path):
        asked.append(path)
        return path.read_text().splitlines() if path.is_file() else []

    top = "sys/fs/cgroup"
    files = {"proc/self/cgroup": "0::/pod/box\n"} | group(f"{top}/pod/box", "max", 5 * MIB)
    root = machine(files | group(f"{top}/pod", 20 * MIB, 19 * MIB) | group(top, "max", 30 * MIB))
    monkeypatch.setattr("highwater_worker.kernel.cgroup.lines_of", read_lines)
    host, _ = read(root)
    assert host.cgroup_limit_bytes == 20 * MIB
    assert [path for path in asked if path.name == "memory.stat"] == [root / top / "pod/memory.stat"]


def test_without_a_limit_the_machine_is_the_limit(machine):
    host, notes = read(machine(group("sys/fs/cgroup", "max", 5 * MIB)))
    assert (host.cgroup_used_bytes, host.cgroup_limit_bytes) == (5 * MIB, None)
    assert (host.total_bytes, host.free_bytes, notes) == (64 * MIB, 32 * MIB, [])


@pytest.mark.parametrize(("limit", "expected"), [(50 * MIB, 50 * MIB), (9223372036854771712, None)])
def test_version_1_writes_no_limit_as_a_huge_one(machine, limit, expected):
    """About 2^63, to the page."""
    box = "sys/fs/cgroup/memory/docker/1"
    files = {
        "proc/self/mountinfo": V2_MOUNT + V1_MOUNT,
        "proc/self/cgroup": "12:memory:/docker/1\n4:cpu,cpuacct:/\n0::/\n",
        f"{box}/memory.limit_in_bytes": f"{limit}\n",
        f"{box}/memory.usage_in_bytes": f"{9 * MIB}\n",
        f"{box}/memory.stat": f"inactive_file 7\ntotal_inactive_file {MIB}\n",
    }
    host, _ = read(machine(files))
    assert (host.cgroup_used_bytes, host.cgroup_limit_bytes) == (8 * MIB, expected)


def test_kills_for_memory_are_counted_in_its_own_group(machine):
    top = "sys/fs/cgroup"
    files = {"proc/self/cgroup": "0::/pod/box\n"} | group(f"{top}/pod/box", "max", 5 * MIB)
    files |= group(f"{top}/pod", "max", 5 * MIB) | {f"{top}/pod/memory.events": "oom_kill 40\n"}
    files[f"{top}/pod/box/memory.events"] = "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 1\n"
    host, notes = read(machine(files))
    assert (host.cgroup_oom_kills, notes) == (2, [])


@pytest.mark.parametrize("events", [None, "", "oom 1\n", "oom_kill\n", "oom_kill many\n"])
def test_a_kernel_that_counts_no_kills_says_nothing(machine, events):
    files = group("sys/fs/cgroup", "max", 5 * MIB)
    host, notes = read(machine(files if events is None else files | {"sys/fs/cgroup/memory.events": events}))
    assert (host.cgroup_oom_kills, notes) == (None, [])


def test_version_1_counts_kills_in_another_file(machine):
    """Since Linux 4.13."""
    box = "sys/fs/cgroup/memory/docker/1"
    files = {
        "proc/self/mountinfo": V2_MOUNT + V1_MOUNT,
        "proc/self/cgroup": "12:memory:/docker/1\n0::/\n",
        f"{box}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{box}/memory.usage_in_bytes": f"{9 * MIB}\n",
        f"{box}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    }
    assert read(machine(files))[0].cgroup_oom_kills == 3


@pytest.mark.parametrize(
    ("mounted", "path"), [("/docker/1", "/docker/1"), ("/docker/1", "/elsewhere"), ("/", "/../../other")]
)
def test_a_path_from_outside_the_container_leads_to_its_mount(machine, mounted, path):
    files = {
        "proc/self/mountinfo": V2_MOUNT.replace("0:26 /", f"0:26 {mounted}"),
        "proc/self/cgroup": f"0::{path}\n",
    }
    host, _ = read(machine(files | group("sys/fs/cgroup", 40 * MIB, MIB)))
    assert host.cgroup_limit_bytes == 40 * MIB


@pytest.mark.parametrize("text", ["", "garbage", "0::", "a:b", ":::::", "0::/\n\n"])
def test_a_garbled_group_list_means_no_group(machine, text):
    host, notes = read(machine({"proc/self/cgroup": text, "proc/self/mountinfo": "1 2 3\n- - -\n\n"}))
    assert (host.cgroup_used_bytes, host.total_bytes, notes) == (None, 64 * MIB, [])


def test_no_proc_at_all_is_noted_name_by_name(tmp_path):
    host, notes = read(tmp_path)
    assert host == HostMemory(None, None, None, None, None)
    assert (host.total_bytes, host.free_bytes) == (None, None)
    assert [note["name"] for note in notes] == ["host_memory.node_total_bytes", "host_memory.rss_bytes"]


def test_a_kernel_without_an_estimate_of_available_memory_is_noted(machine):
    """Before Linux 3.14."""
    host, notes = read(machine({"proc/meminfo": "MemTotal: 65536 kB\n"}))
    assert (host.node_available_bytes, host.free_bytes) == (None, None)
    assert [note["name"] for note in notes] == ["host_memory.node_available_bytes"]
