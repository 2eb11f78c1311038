"""The latency of `GET /memory` and a scrape with eight ranks and a thousand encoder cache entries on each."""

from __future__ import annotations

import http.client
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from bench.figure import Figure, Goal, number, percentile
from bench.machine import cpu_seconds
from bench.sidecar import process_id, sidecar_beside
from bench.simulated_engine import ENTRIES, RANKS, SimulatedEngine
from bench.stage import Stage

WARM_UP = 100
GAP_SECONDS = 0.008
PROMETHEUS_ACCEPTS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
_WHERE = f"{RANKS} ranks, {ENTRIES} encoder cache entries each"


@dataclass(frozen=True, slots=True)
class _Path:
    what: str
    goal: Goal | None
    requests: int
    accept: str = "*/*"


PATHS: Mapping[str, _Path] = {
    "/memory": _Path("`GET /memory`", Goal("under", 5.0), 1000),
    "/metrics": _Path("`GET /metrics`", Goal("under", 10.0), 1000, PROMETHEUS_ACCEPTS),
    "/memory/encoder-cache?limit=1000": _Path("`GET /memory/encoder-cache?limit=1000`", None, 50),
}


@dataclass(frozen=True, slots=True)
class _Round:
    """One round of one path, in milliseconds."""

    median: float
    p99: float
    cpu: float
    size: int


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """One figure for each path."""
    rounds: dict[str, list[_Round]] = {path: [] for path in PATHS}
    with SimulatedEngine(stage.folder) as engine, sidecar_beside(engine.url, stage.folder) as sidecar:
        pid = process_id(sidecar)
        connection = http.client.HTTPConnection(urlsplit(sidecar.url).netloc, timeout=10)
        token = sidecar.authorization()
        for path in PATHS:
            _ask(connection, path, WARM_UP if PATHS[path].goal else 5, token)
        for _ in range(3 if short else 7):
            for path in PATHS:
                rounds[path].append(_round(connection, path, pid, token))
        connection.close()
    return [_figure(path, rounds[path]) for path in PATHS]


def _round(connection: http.client.HTTPConnection, path: str, pid: int, token: Mapping[str, str]) -> _Round:
    cpu = cpu_seconds(pid)
    times, size = _ask(connection, path, PATHS[path].requests, token)
    cpu = (cpu_seconds(pid) - cpu) / len(times)
    return _Round(statistics.median(times) * 1e3, percentile(times, 99) * 1e3, cpu * 1e3, size)


def _ask(
    connection: http.client.HTTPConnection, path: str, count: int, token: Mapping[str, str]
) -> tuple[list[float], int]:
    """Seconds of each of `count` requests, and the size of the last answer."""
    times, size = [], 0
    # Only for whoever has the token are the workers asked for the entries.
    headers = {"Accept": PATHS[path].accept, **(token if PATHS[path].goal is None else {})}
    for _ in range(count):
        # Random gaps: scrapers meet the sidecar idle, and now and then in the middle of a poll.
        time.sleep(random.uniform(0, GAP_SECONDS))  # noqa: S311 - no secret
        began = time.perf_counter()
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        size = len(response.read())
        times.append(time.perf_counter() - began)
        assert response.status == http.client.OK, (path, response.status)
    return times, size


def _figure(path: str, rounds: list[_Round]) -> Figure:
    p99s = [one.p99 for one in rounds]
    kept = " The workers are asked once a second at most; the other answers come from the last." if "?" in path else ""
    return Figure(
        what=f"{PATHS[path].what}, p99, {_WHERE}",
        value=statistics.median(p99s),
        unit="ms",
        goal=PATHS[path].goal,
        spread=f"rounds {number(min(p99s))} to {number(max(p99s))}; "
        f"median {number(statistics.median(one.median for one in rounds))}; "
        f"sidecar CPU {number(statistics.median(one.cpu for one in rounds))} ms a request; "
        f"{rounds[0].size / 1024:.0f} KiB",
        method=f"simulated engine, the sidecar with default settings, one keep-alive connection over loopback; "
        f"{len(rounds)} interleaved rounds of {PATHS[path].requests} requests with random gaps of 0 to "
        f"{GAP_SECONDS * 1e3:.0f} ms; the median of the rounds' p99 counts.{kept}",
    )
