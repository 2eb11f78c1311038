"""`highwater serve` as a process of its own that says, when it gets SIGUSR1, what it holds.

`python -m tests.security.soak.sidecar FILE serve ...` writes its asyncio tasks by coroutine, and the objects of the
data plane by class, to FILE as JSON. Nothing else is different from `highwater serve`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from bench.dataplane.memory import rss_bytes
from highwater.terminal.cli import main
from highwater.terminal.demo.process import DemoError, KeptProcess, environ_with, free_port

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 300.0
COUNT_SECONDS = 120.0
# Objects that live as long as a connection or a request does.
_CONNECTED = re.compile("Connection|Exchange")
TOKEN = "soak-admin-token"


@dataclass(frozen=True, slots=True)
class Held:
    """The objects that the sidecar holds at one time.

    Attributes:
        descriptors: Open file descriptors.
        tasks: Asyncio tasks, by the name of their coroutine.
        objects: Connections and requests of the data plane, by class.
    """

    descriptors: int
    tasks: Mapping[str, int]
    objects: Mapping[str, int]

    def more_than(self, start: Held) -> dict[str, int]:
        """Return what there is more of than at the start, by name."""
        more = {"descriptors": self.descriptors - start.descriptors}
        for before, now in ((start.tasks, self.tasks), (start.objects, self.objects)):
            more |= {name: count - before.get(name, 0) for name, count in now.items()}
        return {name: count for name, count in more.items() if count > 0}


class SoakSidecar(KeptProcess):
    """The sidecar beside an engine; a context manager that starts and ends it.

    Args:
        engine_url: The engine.
        folder: Gets its log and its counts.
    """

    def __init__(self, engine_url: str, folder: Path) -> None:
        super().__init__("the sidecar", folder / "sidecar.log")
        self.port = free_port()
        self._counts = folder / "held.json"
        self._engine_url = engine_url

    def __enter__(self) -> SoakSidecar:
        serve = ["serve", "--engine-url", self._engine_url, "--port", str(self.port)]
        command = [sys.executable, "-m", "tests.security.soak.sidecar", str(self._counts), *serve]
        settings = {"HIGHWATER_ADMIN_TOKEN": TOKEN, "HIGHWATER_POLICY__MODE": "observe"}
        self.start(command, env=environ_with(settings, without_prefix="HIGHWATER_"), cwd=ROOT)
        self.wait_until_answers(self.port, "/livez", START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process that serves."""
        return min(self.pids())

    def rss_bytes(self) -> int:
        """Its resident memory."""
        return rss_bytes([self.pid])

    def held(self) -> Held:
        """Ask it what it holds.

        Raises:
            DemoError: It did not write them in time.
        """
        self._counts.unlink(missing_ok=True)
        descriptors = len(os.listdir(f"/proc/{self.pid}/fd"))
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + COUNT_SECONDS
        while not self._counts.exists():
            if time.monotonic() > deadline:
                raise DemoError(f"the sidecar did not say within {COUNT_SECONDS:g} s what it holds")
            time.sleep(0.05)
        counts = json.loads(self._counts.read_text(encoding="utf-8"))
        return Held(descriptors, counts["tasks"], counts["objects"])


def _write_counts(path: Path) -> None:
    """Write what this process holds; in a signal handler, which Python runs in the event loop's thread."""
    tasks = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    gc.collect()
    kinds = (((kind := type(found)).__module__, kind.__qualname__) for found in gc.get_objects())
    objects = Counter(
        name for module, name in kinds if str(module).startswith("gated_proxy") and _CONNECTED.search(name)
    )
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"tasks": tasks, "objects": objects}), encoding="utf-8")
    draft.rename(path)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("counts", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def _run(counts: Path, arguments: tuple[str, ...]) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: _write_counts(counts))
    main(list(arguments))


if __name__ == "__main__":
    _run()
