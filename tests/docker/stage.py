"""One stage of an image without Docker: the folders that its steps write to, as the root of a file system.

In a mount namespace of its own: the machine's ``/usr`` and ``/etc``, read-only, are the base; its Python is a copy of
the one that runs the tests, thinned as in the official image; what the steps write is kept, and nothing else can be
written.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# Where the steps of our images write. Anything else is an error, for a base may be shared.
WRITTEN = ("opt", "src", "wheels", "usr/local", "var/lib/highwater", "tmp")
_LIBRARY = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
_NOT_IN_THE_BASE = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "config-*", "*.a")


def obstacle() -> str | None:
    """Why there can be none here, in a sentence; None where there can."""
    for tool in ("unshare", "chroot", "setpriv", "mount"):
        if not _tool(tool):
            return f"there is no {tool}"
    if os.geteuid() != 0:
        return "only root can mount, and start as somebody else"
    if sys.base_prefix == "/usr":
        return "this Python is the machine's own, which the stage takes for its base"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no mount namespace: {tried.stderr.strip()}"


def _tool(name: str) -> str:
    """Its path; the user who runs it may have another search path, without the administrator's folders."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or ""


class Stage:
    """A file system's root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lay_base(self) -> None:
        """Lay the empty folders, and the base's Python."""
        for name in WRITTEN:
            (self.folder / name).mkdir(parents=True)
        base, local = Path(sys.base_prefix), self.folder / "usr/local"
        for name in ("bin", "lib", "include"):
            (local / name).mkdir()
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        shutil.copy(base / "bin" / python, local / "bin" / python)
        for name in ("python", "python3"):
            (local / "bin" / name).symlink_to(python)
        for library in base.glob("lib/libpython*.so*"):
            shutil.copy(library, local / "lib", follow_symlinks=False)
        ignored = shutil.ignore_patterns(*_NOT_IN_THE_BASE)
        shutil.copytree(base / _LIBRARY, local / _LIBRARY, symlinks=True, ignore=ignored)
        shutil.copytree(base / "include" / python, local / "include" / python)

    def path(self, inside: str) -> Path:
        """Where something lies that the image has at an absolute path."""
        return self.folder / inside.lstrip("/")

    def command(
        self, command: Sequence[str], *, folder: str = "/", user: str | None = None, volumes: Mapping[str, Path]
    ) -> list[str]:
        """A command line that runs another one in here.

        Args:
            command: What to run.
            folder: Where, inside.
            user: By number, ``65532:65532``: without any privilege, and all is read-only but the volumes. None: as
                root, and the stage's own folders can be written.
            volumes: Folders outside, by absolute path inside.
        """
        words = list(command)
        if user is not None:
            uid, _, gid = user.partition(":")
            words = [
                *(_tool("setpriv"), f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"),
                *("--inh-caps=-all", "--bounding-set=-all", *words),
            ]
        # The copied Python's own library, where it has one: the path in it is not the copy's.
        start = 'export LD_LIBRARY_PATH=/usr/local/lib; cd "$1"; shift; exec "$@"'
        inside = ["sh", "-ec", start, "sh", folder, *words]
        return [
            _tool("unshare"),
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-ec",
            self._script(user, volumes),
            "sh",
            *inside,
        ]

    def _script(self, user: str | None, volumes: Mapping[str, Path]) -> str:
        mount = "ro" if user is not None else "rw"
        lines = [
            f"new={shlex.quote(str(self.folder))}/root",
            "mkdir -p $new",
            "mount -t tmpfs -o mode=0755 none $new",
            "mkdir $new/usr $new/etc $new/proc $new/dev",
        ]
        for name in ("usr", "etc"):
            lines += [f"mount --bind /{name} $new/{name}", f"mount -o remount,bind,ro $new/{name}"]
        lines += ["mount --rbind /proc $new/proc", "mount --rbind /dev $new/dev"]
        lines += ["for link in /bin /sbin /lib /lib64; do [ ! -L $link ] || cp -P $link $new; done"]
        for name in WRITTEN:
            outside = shlex.quote(str(self.folder / name))
            lines += [f"mkdir -p $new/{name}", f"mount --bind {outside} $new/{name}"]
            lines += [f"mount -o remount,bind,{mount} $new/{name}"]
        for inside, path in volumes.items():
            lines += [f"mkdir -p $new{inside}", f"mount --bind {shlex.quote(str(path))} $new{inside}"]
        lines += [f"mount -o remount,{mount} $new", f'exec {_tool("chroot")} $new "$@"']
        return "\n".join(lines)
