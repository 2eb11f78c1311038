"""The memory control group of this process: a container's. Linux alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Version 1 writes a number near 2**63 where there is no limit.
_UNLIMITED_BYTES = 1 << 60
# Of a number below 2**64.
_MAX_DIGITS = 21


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process's control group may use; ``None`` without a limit, or where it is not known.

    Args:
        root: The file system's root; tests replace it.
    """
    texts = (text.strip() for text in _texts(root, "memory.limit_in_bytes", "memory.max"))
    return next(
        (
            int(text)
            for text in texts
            if len(text) < _MAX_DIGITS and text.isdigit() and 0 < int(text) < _UNLIMITED_BYTES
        ),
        None,
    )


def oom_kill_count(root: Path = Path("/")) -> int | None:
    """Return how many processes of this process's own control group the kernel has killed for memory.

    Args:
        root: The file system's root; tests replace it.
    """
    for text in _texts(root, "memory.oom_control", "memory.events"):
        count = dict(line.partition(" ")[::2] for line in text.splitlines()).get("oom_kill", "").strip()
        if len(count) < _MAX_DIGITS and count.isdigit():
            return int(count)
    return None


def _texts(root: Path, name_1: str, name_2: str) -> Iterator[str]:
    """Yield a file of the group from each possible place, by its name in version 1 and in version 2."""
    try:
        groups = (root / "proc/self/cgroup").read_text("ascii", "replace").splitlines()
    except OSError:
        return
    for _, _, rest in (line.partition(":") for line in groups):
        controllers, _, path = rest.partition(":")
        is_version_1 = "memory" in controllers.split(",")
        if not is_version_1 and controllers:
            continue
        top = root / ("sys/fs/cgroup/memory" if is_version_1 else "sys/fs/cgroup")
        # In a container the mount shows its own group, whatever path the kernel gives.
        for folder in (top / path.strip("/"), top):
            with suppress(OSError, ValueError):
                yield (folder / (name_1 if is_version_1 else name_2)).read_text("ascii", "replace")
