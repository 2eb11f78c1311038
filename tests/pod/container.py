"""A container's runtime: one command in a PID and a mount namespace and a memory control group (version 1) of its own.

The IPC namespace is the sandbox's, as in a pod of Kubernetes.

Run as `python -I -S container.py SPEC COMMAND...`, as root. SPEC is JSON: `cgroup`, a folder to be made; `limit_bytes`
or null; `sandbox`, the process whose mounts the container begins with; `ended`, the file that gets what is known of the
end; `grace_seconds`, from SIGTERM, which goes on to the command, until SIGKILL.

The command is process 1: when it ends, all others of the container end. The control group is removed then, and its
parent with the last one. Standard library only, and nothing of Highwater: it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_NEW_MOUNTS, _NEW_IPC, _NEW_PIDS = 0x00020000, 0x08000000, 0x20000000  # CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18  # MS_BIND, MS_REC, MS_PRIVATE
_SIGNAL_WITH_PARENT = 1  # PR_SET_PDEATHSIG
MEMORY = "/sys/fs/cgroup/memory"
LOOK_SECONDS = 0.02
_REMOVE_SECONDS = 10.0
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library, and raise OSError where it returns an error."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    call("mount", source.encode(), target.encode(), None if kind is None else kind.encode(), flags, None)


def become_process_1(spec: Mapping[str, Any], command: list[str], cwd: str) -> None:
    """Enter the control group and the namespaces, and run the command; only an error returns."""
    call("prctl", _SIGNAL_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    (Path(spec["cgroup"]) / "cgroup.procs").write_text("0")
    if spec["sandbox"] is not None:
        for name, kind in (("ipc", _NEW_IPC), ("mnt", _NEW_MOUNTS)):
            namespace = os.open(f"/proc/{spec['sandbox']}/ns/{name}", os.O_RDONLY)
            call("setns", namespace, kind)
            os.close(namespace)
    call("unshare", _NEW_MOUNTS)
    mount("none", "/", None, _RECURSIVE | _PRIVATE)
    mount(spec["cgroup"], MEMORY, None, _BIND)  # as container runtimes do: it sees its own group alone
    mount("proc", "/proc", "proc", 0)
    os.chdir(cwd)
    os.execvp(command[0], command)  # noqa: S606 - what it is for


def counter(group: Path, file: str, name: str = "") -> int | None:
    """Return a number of a control group's file, by its name where there are several; None where it is not there."""
    with suppress(OSError, ValueError):
        for line in (group / file).read_text().splitlines():
            key, _, value = line.rpartition(" ")
            if key == name:
                return int(value)
    return None


def remove(group: Path) -> None:
    """Remove a control group once its last process has gone, and its parent if that was the last in it."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
        time.sleep(LOOK_SECONDS)
    with suppress(OSError):
        group.parent.rmdir()


def main(spec: Mapping[str, Any], command: list[str]) -> int:
    """Run the command until it ends; return its status (128 + n for signal n)."""
    call("prctl", _SIGNAL_WITH_PARENT, signal.SIGTERM, 0, 0, 0)
    group, cwd = Path(spec["cgroup"]), os.getcwd()
    group.mkdir(parents=True)
    try:
        if spec["limit_bytes"] is not None:
            (group / "memory.limit_in_bytes").write_text(str(spec["limit_bytes"]))
        call("unshare", _NEW_PIDS)
        if (pid := os.fork()) == 0:
            try:
                become_process_1(spec, command, cwd)
            finally:
                os._exit(127)
        status = wait(pid, spec["grace_seconds"])
        ended = {
            "exit_code": status,
            "oom_kills": counter(group, "memory.oom_control", "oom_kill"),
            "peak_bytes": counter(group, "memory.max_usage_in_bytes"),
        }
        draft = Path(f"{spec['ended']}.tmp")
        draft.write_text(json.dumps(ended))
        draft.replace(spec["ended"])
    finally:
        remove(group)
    return status


def wait(pid: int, grace_seconds: float) -> int:
    """Return the status of the command once it has ended; SIGTERM gives it a grace."""

    def end(*_: object) -> None:
        os.kill(pid, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, grace_seconds)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    _, raw = os.waitpid(pid, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    status = os.waitstatus_to_exitcode(raw)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
