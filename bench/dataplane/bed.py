"""The parts that all slices share: the fake upstream, the load generator, and the core of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.dataplane.cores import Cores, on_core, spread
from bench.dataplane.programs import program
from bench.dataplane.proxies import DIRECT, Proxy, Start, all_running, running, upstream_of
from bench.dataplane.slices import LoadGenerator


@dataclass(frozen=True, slots=True)
class Bed:
    """The upstream runs; proxies are started before it, on the core that is theirs.

    Attributes:
        cores: Who runs where.
        load: The load generator.
        direct: The upstream itself, as if it were a proxy.
        folder: For logs.
    """

    cores: Cores
    load: LoadGenerator
    direct: Proxy
    folder: Path

    @contextmanager
    def running(self, name: str, start: Start) -> Iterator[Proxy]:
        """One proxy; see `proxies.running`."""
        with ExitStack() as stack:
            with on_core(self.cores.proxy):
                proxy = stack.enter_context(running(name, start, self.direct.port, self.folder))
            yield proxy

    @contextmanager
    def all_running(self, peers: Mapping[str, Start], notes: list[str]) -> Iterator[dict[str, Proxy]]:
        """Those that can be had; see `proxies.all_running`."""
        with ExitStack() as stack:
            with on_core(self.cores.proxy):
                proxies = stack.enter_context(all_running(peers, self.direct.port, self.folder, notes))
            yield proxies


@contextmanager
def bed(folder: Path) -> Iterator[Bed]:
    """Compile what is missing, and start the upstream.

    Raises:
        DemoError: There is no compiler, or the upstream does not start.
    """
    cores = spread(sorted(os.sched_getaffinity(0)))
    load = LoadGenerator(program("load"), cores.load)
    with ExitStack() as stack:
        with on_core(cores.upstream):
            port = stack.enter_context(upstream_of(program("upstream"), folder))
        # What only waits must not wait on the proxies' core.
        stack.enter_context(on_core(cores.load))
        yield Bed(cores, load, Proxy(DIRECT, port, list), folder)
