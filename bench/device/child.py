"""A step's part in a process of its own: another setting of the allocator, another process on the device.

`python -m bench.device.child DEVICE MODULE FUNCTION JSON` calls the function with the device and the arguments, and
prints what it returns as the last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from bench.device.torch_device import TorchDevice

CHILD_SECONDS = 900.0
T = TypeVar("T")


class ChildError(Exception):
    """A child process failed; the text has the end of what it wrote."""


def run_child(
    function: Callable[..., T], on: TorchDevice, *, environ: Mapping[str, str] | None = None, **arguments: object
) -> T:
    """Call a function of a module in a process of its own, on the same device, and return its result.

    Raises:
        ChildError: The process failed.
    """
    done = subprocess.run(
        _command(function, on, arguments),
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        env={**os.environ, **(environ or {})},
        check=False,
    )
    if done.returncode != 0:
        raise ChildError(f"{function.__name__} ended with status {done.returncode}: {done.stderr[-2000:]}")
    result: T = json.loads(done.stdout.splitlines()[-1])
    return result


@contextmanager
def child_beside(function: Callable[..., object], on: TorchDevice, **arguments: object) -> Iterator[Any]:
    """Run a function in a process beside this one, which it ends with; yields the first line that it printed.

    The function prints one line of JSON, and waits for the end of its standard input.

    Raises:
        ChildError: The process ended before it printed one.
    """
    command = _command(function, on, arguments)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise ChildError(f"{function.__name__} ended without a word")
            yield json.loads(line)
        finally:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(CHILD_SECONDS)


def _command(function: Callable[..., object], on: TorchDevice, arguments: Mapping[str, object]) -> list[str]:
    name = str(on.device)
    return [
        *(sys.executable, "-m", "bench.device.child", name),
        *(function.__module__, function.__name__, json.dumps(arguments)),
    ]


def main() -> None:
    """Call the function that the command line names."""
    device, module, function, arguments = sys.argv[1:]
    print(json.dumps(getattr(import_module(module), function)(TorchDevice(device), **json.loads(arguments))))


if __name__ == "__main__":
    main()
