"""The upstream and the load generator: small C programs, so that the proxy between them is what is measured."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path

from highwater.terminal.demo.engine import cache_dir
from highwater.terminal.demo.process import DemoError
from tests.c_compiler import compiler, obstacle

SOURCES = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")


def program(name: str) -> Path:
    """Return the program compiled from `<name>.c`; it is kept in the cache until a source changes.

    Raises:
        DemoError: There is no C compiler, or it failed.
    """
    source = SOURCES / f"{name}.c"
    built = cache_dir() / "programs" / f"{name}-{_digest([source, SOURCES / 'wire.h'])}"
    if not built.exists():
        _compile(source, built)
    return built


def _digest(sources: list[Path]) -> str:
    ingredients = [*(path.read_bytes() for path in sources), " ".join(FLAGS).encode()]
    return hashlib.sha256(b"\0".join(ingredients)).hexdigest()[:12]


def _compile(source: Path, built: Path) -> None:
    if missing := obstacle():
        raise DemoError(f"the data-plane benchmark compiles {source.name}, and {missing}")
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        draft = Path(folder) / "draft"
        command = [*compiler(), *FLAGS, "-o", str(draft), str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise DemoError(f"{' '.join(command)} failed:\n{result.stderr}")
        draft.rename(built)
