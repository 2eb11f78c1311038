"""The cost of reading the sidecar with eight ranks and a thousand encoder cache entries on each: latency and CPU."""

from __future__ import annotations

import http.client
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from bench.figure import Figure, Goal, number, percentile
from bench.machine import cpu_seconds
from bench.sidecar import process_id, sidecar_beside
from bench.simulated_engine import ENTRIES, RANKS, SimulatedEngine
from bench.stage import Stage
from highwater.terminal.demo.sidecar import DemoSidecar

GAP_SECONDS = 0.008
SETTLE_SECONDS = 3.0  # until the recorders of every worker have said something
_WHERE = f"{RANKS} ranks, {ENTRIES} encoder cache entries each"


@dataclass(frozen=True, slots=True)
class _Path:
    """A page that is asked for, and how often in a round.

    Attributes:
        path: With its query.
        goal: Of the p99, in milliseconds.
        requests: In a round.
        is_recorded: Asked of a sidecar that has the workers' recorders.
    """

    path: str
    goal: Goal | None
    requests: int = 1000
    is_recorded: bool = False

    @property
    def what(self) -> str:
        return f"`GET {self.path}`" + (" from the recorders" if self.is_recorded else "")


# The others are held to this one: what is beneath it is HTTP, and the machine.
FLOOR = _Path("/livez", None)
OURS = _Path("/metrics?engine=0", Goal("under", 10.0))
CACHE = "/memory/encoder-cache?limit=1000"
PATHS: Sequence[_Path] = (
    FLOOR,
    _Path("/memory", Goal("under", 5.0)),
    OURS,
    _Path("/metrics", None),
    _Path(CACHE, Goal("under", 20.0), 200, is_recorded=True),
    _Path(CACHE, None, 50),
)
CPU_GOAL = Goal("at most", 1.0)


@dataclass(frozen=True, slots=True)
class _Round:
    """One round of one path, in milliseconds."""

    median: float
    p99: float
    cpu: float
    size: int


class _Reader:
    """One kept connection to a sidecar, with the admin token."""

    def __init__(self, sidecar: DemoSidecar) -> None:
        self._pid = process_id(sidecar)
        self._connection = http.client.HTTPConnection(urlsplit(sidecar.url).netloc, timeout=10)
        self._headers = sidecar.authorization()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def round(self, path: _Path, *, requests: int | None = None) -> _Round:
        """Ask so often, with gaps."""
        cpu = cpu_seconds(self._pid)
        times, size = self._ask(path.path, requests or path.requests)
        cpu = (cpu_seconds(self._pid) - cpu) / len(times)
        return _Round(statistics.median(times) * 1e3, percentile(times, 99) * 1e3, cpu * 1e3, size)

    def _ask(self, path: str, count: int) -> tuple[list[float], int]:
        """Return the seconds of each request, and the size of the last response."""
        times, size = [], 0
        for _ in range(count):
            # Random gaps: scrapers meet the sidecar idle, and now and then in the middle of a poll.
            time.sleep(random.uniform(0, GAP_SECONDS))  # noqa: S311 - no secret
            began = time.perf_counter()
            self._connection.request("GET", path, headers=self._headers)
            response = self._connection.getresponse()
            size = len(response.read())
            times.append(time.perf_counter() - began)
            assert response.status == http.client.OK, (path, response.status)
        return times, size


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """Return a figure for each path, and one for the CPU of a scrape of ours."""
    rounds: dict[_Path, list[_Round]] = {path: [] for path in PATHS}
    with ExitStack() as stack:
        engine = stack.enter_context(SimulatedEngine(stage.folder))
        rings = str(stage.folder / "simulated-rings")
        sidecars = {
            is_recorded: stack.enter_context(sidecar_beside(engine.url, stage.folder / str(is_recorded), **settings))
            for is_recorded, settings in {False: dict[str, str](), True: {"recorder_dir": rings}}.items()
        }
        readers = {which: stack.enter_context(_Reader(sidecar)) for which, sidecar in sidecars.items()}
        time.sleep(SETTLE_SECONDS)
        for path in PATHS:
            readers[path.is_recorded].round(path, requests=path.requests // 10)
        for _ in range(3 if short else 7):
            for path in PATHS:
                rounds[path].append(readers[path.is_recorded].round(path))
    floor = statistics.median(one.median for one in rounds[FLOOR])
    return [*(_latency(path, rounds[path], floor) for path in PATHS), _cpu(rounds[OURS], rounds[FLOOR])]


def _latency(path: _Path, rounds: Sequence[_Round], floor: float) -> Figure:
    p99s = [one.p99 for one in rounds]
    median = statistics.median(one.median for one in rounds)
    above = "" if path is FLOOR else f", {number(median - floor)} more than `{FLOOR.path}`"
    return Figure(
        what=f"{path.what}, p99",
        value=statistics.median(p99s),
        unit="ms",
        goal=path.goal,
        spread=f"rounds {number(min(p99s))} to {number(max(p99s))}; median {number(median)}{above}; "
        f"sidecar CPU {number(statistics.median(one.cpu for one in rounds))} ms a request; "
        f"{rounds[0].size / 1024:.0f} KiB",
        method=f"simulated engine, {_WHERE}; one connection with the admin token; {len(rounds)} rounds with random "
        f"gaps of 0 to {GAP_SECONDS * 1e3:.0f} ms; the median of the rounds' p99 counts",
    )


def _cpu(rounds: Sequence[_Round], floor: Sequence[_Round]) -> Figure:
    by_round = [one.cpu for one in rounds]
    return Figure(
        what="Sidecar's CPU for one scrape of its own page",
        value=statistics.median(by_round),
        unit="ms",
        goal=CPU_GOAL,
        spread=f"rounds {number(min(by_round))} to {number(max(by_round))}; of `{FLOOR.path}` "
        f"{number(statistics.median(one.cpu for one in floor))}",
        method=f"CPU: all threads over {OURS.requests} scrapes of `{OURS.path}`, polls included",
    )
