"""One slice: the load generator against one proxy, once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bench.dataplane.cores import on_core
from bench.dataplane.proxies import Proxy
from bench.dataplane.works import Sample
from highwater.terminal.demo.process import DemoError

DEADLINE_SECONDS = 120.0


class LoadGenerator:
    """Sends, checks and measures.

    Args:
        binary: load.c, compiled.
        core: Where it runs.
    """

    def __init__(self, binary: Path, core: int) -> None:
        self._binary = binary
        self._core = core

    def start(self, proxy: Proxy, options: Mapping[str, float]) -> subprocess.Popen[str]:
        """Begin a slice; whoever wants no more than its result takes `run`."""
        pids = proxy.pids()
        given = {"port": proxy.port, **options}
        words = [f"{name}={value}" for name, value in given.items()]
        if pids:
            words.append("pids=" + ",".join(map(str, pids)))
        with on_core(self._core):
            return subprocess.Popen(
                [str(self._binary), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )

    def run(self, proxy: Proxy, options: Mapping[str, float]) -> Sample:
        """A whole slice.

        Raises:
            DemoError: An answer was not what it should be; one is enough.
        """
        return result_of(self.start(proxy, options), proxy)


def result_of(process: subprocess.Popen[str], proxy: Proxy) -> Sample:
    """Return what a slice printed, once it has ended.

    Raises:
        DemoError: An answer was not what it should be.
    """
    try:
        printed, complaint = process.communicate(timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise DemoError(f"{proxy.name}: the load generator did not end in {DEADLINE_SECONDS:g} s") from None
    if process.returncode != 0:
        raise DemoError(f"{proxy.name}: {complaint.strip() or f'the load generator ended with {process.returncode}'}")
    sample: Sample = json.loads(printed)
    return sample
