"""The modules that each step needs, and a folder of wheels for a machine without network.

`python -m bench.device needs` says what is missing here. `make device-wheels` fetches the sidecar's wheels for another
Python, without PyTorch, which the machine with the device has.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MAX_BYTES = 64 * 1024**2
REQUIREMENTS = Path(__file__).resolve().parents[2] / "docker" / "requirements.txt"
PLATFORMS = tuple(f"manylinux_2_{glibc}" for glibc in (5, 12, 17, 24, 27, 28, 31, 34))
_SIDECAR = (
    *("click", "fastapi", "httptools", "httpx", "httpx_sse", "markdown_it", "packaging"),
    *("prometheus_client", "pydantic", "rich", "tabulate", "tenacity", "uvicorn", "uvloop", "yaml"),
)
NEEDS: Mapping[str, tuple[str, ...]] = {
    "reading": ("torch", "pydantic"),
    "allocator": ("torch",),
    "spill": ("torch",),
    "under-load": ("torch",),
    "oom": ("torch", *_SIDECAR),
    "policy": ("torch", *_SIDECAR),
    "engine": ("torch", "vllm", *_SIDECAR),
}
"""By step, all that it uses. A step without them runs all the same, and skips by name what needs them."""


def missing(modules: Sequence[str]) -> list[str]:
    """Return the modules of a list that are not installed here."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def report() -> str:
    """Return a line for each step, with what is missing."""
    rows = {step: missing(modules) for step, modules in NEEDS.items()}
    return "\n".join(
        f"{step:12} {'missing: ' + ', '.join(names) if names else 'complete'}" for step, names in rows.items()
    )


def fetch(folder: Path, *, python: str, machine: str) -> int:
    """Fetch the sidecar's pinned wheels into a folder, and return their size in bytes.

    Args:
        folder: Is emptied first.
        python: The Python of the machine with the device, such as `3.12`.
        machine: Its architecture: `x86_64`, or `aarch64` as beside many an Ascend.

    Raises:
        subprocess.CalledProcessError: A wheel cannot be had; pip has said which.
        ValueError: The wheels are larger than what can be carried.
    """
    download(folder, f"--requirement={REQUIREMENTS}", python=python, machine=machine)
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{folder} has {size} bytes; at most {MAX_BYTES} can be carried")
    return size


def download(folder: Path, *what: str, python: str, machine: str) -> None:
    """Fetch wheels for another machine into a folder, which is emptied first; none of what they require.

    Args:
        folder: Gets them.
        what: Requirements, as pip takes them.
        python: The Python of the machine, such as `3.12`.
        machine: Its architecture.

    Raises:
        subprocess.CalledProcessError: A wheel cannot be had; pip has said which.
    """
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--abi=cp{python.replace('.', '')}", "--abi=abi3", "--abi=none"]
    command += [f"--platform={platform}_{machine}" for platform in PLATFORMS]
    subprocess.run([*command, f"--dest={folder}", *what], check=True)
