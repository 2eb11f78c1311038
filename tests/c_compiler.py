"""The C compiler of this machine: what tests and benchmarks compile where they run."""

from __future__ import annotations

import os
import shlex
import shutil

NAMES = ("cc", "gcc", "clang")


def compiler() -> list[str]:
    """Return the command that compiles C: `CC`'s, else the first of `NAMES` that is there; empty where none is."""
    named = os.environ.get("CC")
    commands = [shlex.split(named)] if named else [[name] for name in NAMES]
    return next((command for command in commands if command and shutil.which(command[0])), [])


def obstacle() -> str | None:
    """Return in a sentence why C cannot be compiled here; None if it can."""
    if compiler():
        return None
    named = os.environ.get("CC")
    looked = f"CC={named}" if named else f"{', '.join(NAMES)}; CC names another"
    return f"there is no C compiler (looked for {looked}); Debian's packages are gcc and libc6-dev"
