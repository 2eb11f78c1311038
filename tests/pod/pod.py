"""A pod without Kubernetes: containers on this machine, with memory limits that the kernel itself enforces.

Each container has a PID and a mount namespace and a memory control group (version 1) of its own (`container.py`); all
of a pod share the network, IPC, `/dev/shm` and the folders that they are told of, and these outlive a container. What a
pod made goes with it, also when the test is killed: its processes end with the pipe to their keeper, mounts with their
namespace, control groups with their last process.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from highwater.terminal.demo.process import KeptProcess
from tests.patience import wait_until
from tests.pod import container

GRACE_SECONDS = 6.0
"""Shorter than that of the keeper, which would end the runtime before it has written anything."""
SHM_BYTES = 1024**3
_SANDBOX = 'mount -t tmpfs -o "size=$1" tmpfs /dev/shm && echo $$ > "$2" && exec sleep infinity'


def own_group() -> Path:
    """Return the memory control group that this process is in.

    Raises:
        OSError: Memory is not counted by version 1 here.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path(container.MEMORY) / path.lstrip("/")
    raise FileNotFoundError("the kernel counts memory by control groups of version 2, or not at all")


def why_not(folder: Path) -> str | None:
    """Return why this machine runs no pod; None where it does. Tried, for nothing else tells."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "containers need root on Linux"
    try:
        with Pod(folder) as pod:
            tried = pod.container("tried", limit_bytes=None)
            tried.start(["true"], env=os.environ, cwd=folder)
            wait_until(lambda: not tried.is_running())
            said = tried.log_path.read_text(errors="replace").strip()
            return None if tried.ended().exit_code == 0 else f"no container runs here: {said}"
    except OSError as exc:
        return f"no container can be made here: {exc}"


def _number_within(pid: int) -> int:
    """Return a process's number in its container: the machine's numbers begin anew now and then."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return sys.maxsize  # it has ended


@dataclass(frozen=True)
class Ended:
    """What Kubernetes would say in `lastState.terminated`."""

    exit_code: int | None
    """None where the runtime itself was killed."""
    oom_kills: int
    peak_bytes: int

    @property
    def reason(self) -> str:
        """The kernel's kill of any process of the container makes it `OOMKilled`, whatever process 1 returned."""
        return "OOMKilled" if self.oom_kills else "Completed" if self.exit_code == 0 else "Error"


class Container(KeptProcess):
    """One container; another start has a control group and namespaces of its own, and appends to the same log."""

    def __init__(self, name: str, pod: Pod, limit_bytes: int | None) -> None:
        self.log_path = pod.folder / f"{name}.log"
        super().__init__(name, self.log_path)
        self.name, self.limit_bytes = name, limit_bytes
        self.starts = 0
        self._pod = pod

    @property
    def group(self) -> Path:
        """The control group of the present life, or the last."""
        return self._pod.group / f"{self.name}-{self.starts}"

    def start(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> None:
        """Start its process 1, and do not wait until it is ready."""
        self.stop()  # the keeper of the life before, which has ended
        self.starts += 1
        spec = {
            "cgroup": str(self.group),
            "limit_bytes": self.limit_bytes,
            "sandbox": self._pod.sandbox,
            "ended": str(self._ended_path),
            "grace_seconds": GRACE_SECONDS,
        }
        runtime = [sys.executable, "-I", "-S", container.__file__, json.dumps(spec)]
        super().start([*runtime, *command], env=env, cwd=cwd)

    def pids(self) -> list[int]:
        """Return its processes, by their numbers on this machine: process 1 first."""
        with suppress(OSError, ValueError):
            return sorted(map(int, (self.group / "cgroup.procs").read_text().split()), key=_number_within)
        return []

    def pid_of(self, title: str) -> int:
        """Return the process whose title begins so (`VLLM::EngineCore`)."""
        for pid in self.pids():
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                    return pid
        raise AssertionError(f"{self.name} has no process {title}")

    def kept_bytes(self) -> int:
        """Return what is charged to it now, without pages that the kernel drops before it kills anything."""
        used = container.counter(self.group, "memory.usage_in_bytes") or 0
        dropped = (
            container.counter(self.group, "memory.stat", f"total_{kind}_file") for kind in ("active", "inactive")
        )
        return used - sum(each or 0 for each in dropped)

    def run(self, command: Sequence[str]) -> None:
        """Start a further process in it, as `kubectl exec` does; it ends with the container."""
        join = f'echo $$ > "{self.group}/cgroup.procs" && exec "$@"'
        enter = ["nsenter", "--target", str(self.pids()[0]), "--mount", "--pid", "--"]
        process = KeptProcess(f"a process in {self.name}", self._pod.folder / "run.log")
        process.start(["sh", "-c", join, "sh", *enter, *command], env=os.environ, cwd=self._pod.folder)
        self._pod.stack.callback(process.stop)

    def kill(self) -> None:
        """End every process of it at once, as the kernel does with `memory.oom.group`."""
        with suppress(IndexError, ProcessLookupError):
            os.kill(self.pids()[0], signal.SIGKILL)

    def ended(self) -> Ended:
        try:
            known = json.loads(self._ended_path.read_text())
        except (OSError, ValueError):
            return Ended(None, 0, 0)
        return Ended(known["exit_code"], known["oom_kills"] or 0, known["peak_bytes"] or 0)

    @property
    def _ended_path(self) -> Path:
        return self._pod.folder / f"{self.group.name}.ended"


class Pod:
    """Containers that share a network, `/dev/shm` and a folder; a context manager that ends them all."""

    def __init__(self, folder: Path, *, shm_bytes: int = SHM_BYTES) -> None:
        self.folder = folder
        self.group = Path()
        self.sandbox: int | None = None
        self._shm_bytes = shm_bytes
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.group = own_group() / f"highwater-pod-{secrets.token_hex(4)}"
        self.group.mkdir()
        with ExitStack() as stack:
            stack.callback(self._remove_group)
            sandbox = KeptProcess("the sandbox", self.folder / "sandbox.log")
            stack.callback(sandbox.stop)
            ready = self.folder / "sandbox.ready"
            script = [_SANDBOX, "sh", str(self._shm_bytes), str(ready)]
            command = ["unshare", "--ipc", "--mount", "--propagation", "private", "sh", "-c", *script]
            sandbox.start(command, env=os.environ, cwd=self.folder)
            wait_until(lambda: (ready.exists() and ready.read_text()) or not sandbox.is_running())
            if not ready.exists():
                raise OSError((self.folder / "sandbox.log").read_text(errors="replace").strip())
            self.sandbox = int(ready.read_text())
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def container(self, name: str, *, limit_bytes: int | None) -> Container:
        """Return a container that is not started yet; it is stopped with the pod."""
        made = Container(name, self, limit_bytes)
        self.stack.callback(made.stop)
        return made

    def shm(self) -> list[str]:
        return sorted(os.listdir(f"/proc/{self.sandbox}/root/dev/shm"))

    def _remove_group(self) -> None:
        """Remove the control group, once the last container's runtime has removed its own."""
        deadline = time.monotonic() + GRACE_SECONDS
        while self.group.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                self.group.rmdir()
                return
            time.sleep(container.LOOK_SECONDS)
