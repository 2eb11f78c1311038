"""The whole comparison: rounds of slices, memory of fresh processes, and the report of both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bench.dataplane import works
from bench.dataplane.bed import Bed, bed
from bench.dataplane.comparison import Comparison
from bench.dataplane.memory import OPEN_STREAMS, Memory, memory_of
from bench.dataplane.proxies import (
    DIRECT,
    NGINX,
    SIDECAR,
    Proxy,
    Start,
    nginx,
    sidecars,
)
from bench.dataplane.report import Report
from bench.dataplane.works import WORKS, Work
from bench.figure import Goal, number
from bench.rounds import order
from bench.stage import Stage
from highwater.terminal.demo.process import DemoError

WARM_UP_SECONDS = 0.4
# On a machine that others keep busy too, a slice can be over before anything was done in it.
TRIES = 3
Values = dict[str, list[float]]
"""By proxy, one a round."""


@dataclass(frozen=True, slots=True)
class Length:
    """The extent of a measurement."""

    rounds: int
    slice_seconds: float
    memory_rounds: int
    settle_seconds: float


SHORT = Length(rounds=4, slice_seconds=1.2, memory_rounds=2, settle_seconds=2.0)
FULL = Length(rounds=8, slice_seconds=4.0, memory_rounds=3, settle_seconds=10.0)


def measure(stage: Stage, *, short: bool) -> Report:
    """The data plane's section.

    Raises:
        DemoError: The sidecar did not start, or anybody's answer was not what it should be.
    """
    length, notes = SHORT if short else FULL, list[str]()
    with bed(stage.folder) as ready:
        peers = {**sidecars(notes), NGINX: nginx}
        with ready.all_running(peers, notes) as proxies:
            peers = {name: peers[name] for name in proxies}
            values = _rounds(ready, proxies, length)
        names = list(peers)
        memory = _memory(ready, peers, length)
        comparisons = [_comparison(work, values[work.name]) for work in WORKS] + _memory_comparisons(memory)
        return Report(
            title="As a proxy",
            columns=("work", "goal", *names, f"to {NGINX}", "met"),
            rows=[comparison.row(names) for comparison in comparisons],
            facts=_facts(values),
            methods=_methods(ready, length),
            notes=notes,
        )


def _rounds(ready: Bed, proxies: Mapping[str, Proxy], length: Length) -> dict[str, Values]:
    """Every work with every proxy in every round; the first round, a short one, is thrown away."""
    with_direct = {**proxies, DIRECT: ready.direct}
    values: dict[str, Values] = {work.name: {name: [] for name in with_direct} for work in WORKS}
    for work in WORKS:
        for proxy in with_direct.values():
            ready.load.run(proxy, work.options(WARM_UP_SECONDS))
    for turn in range(length.rounds):
        for work in WORKS:
            found = {
                name: _value(ready, work, with_direct[name], length.slice_seconds)
                for name in order(list(with_direct if work.needs_direct else proxies), turn)
            }
            for name, value in found.items():
                values[work.name][name].append(value)
            shown = ", ".join(f"{name} {number(found[name])}" for name in with_direct if name in found)
            print(f"  round {turn + 1}: {work.what}: {shown}", flush=True)
    return values


def _value(ready: Bed, work: Work, proxy: Proxy, seconds: float) -> float:
    for _ in range(TRIES):
        try:
            return work.value(ready.load.run(proxy, work.options(seconds)))
        except ZeroDivisionError:
            print(f"  {work.what}: {proxy.name} did nothing for {seconds:g} s; again", flush=True)
        except DemoError as exc:
            raise DemoError(f"{work.what}: {exc}") from exc
    raise DemoError(f"{work.what}: {proxy.name} did nothing for {seconds:g} s, {TRIES} times")


def _comparison(work: Work, values: Values) -> Comparison:
    direct = values[DIRECT]
    measured = {name: found for name, found in values.items() if name != DIRECT and found}
    if work.is_over_direct:
        measured = {
            name: [one - less for one, less in zip(found, direct, strict=True)] for name, found in measured.items()
        }
    return Comparison(what=work.what, unit=work.unit, goal=work.goal, values=measured)


def _memory(ready: Bed, peers: Mapping[str, Start], length: Length) -> dict[str, list[Memory]]:
    found: dict[str, list[Memory]] = {name: [] for name in peers}
    for turn in range(length.memory_rounds):
        for name in order(list(peers), turn):
            start = partial(ready.running, name, peers[name])
            found[name].append(memory_of(start, ready.load, length.settle_seconds))
            memory = found[name][-1]
            print(
                f"  memory of {name}: idle {number(memory.idle_mb)} MB, {number(memory.kb_per_stream)} KB a stream, "
                f"uploads add {number(memory.upload_growth_mb)} MB",
                flush=True,
            )
    return found


def _memory_comparisons(found: Mapping[str, Sequence[Memory]]) -> list[Comparison]:
    return [
        Comparison(
            what="10 MB image bodies, four at once, growth of RSS at its peak",
            unit="MB",
            goal=Goal("under", 8.0),
            values={name: [memory.upload_growth_mb for memory in each] for name, each in found.items()},
            is_absolute=True,
        ),
        Comparison(
            what="Idle RSS",
            unit="MB",
            goal=Goal("under", 80.0),
            values={name: [memory.idle_mb for memory in each] for name, each in found.items()},
            is_absolute=True,
        ),
        Comparison(
            what=f"RSS per open stream, of {OPEN_STREAMS}",
            unit="KB",
            goal=None,
            values={name: [memory.kb_per_stream for memory in each] for name, each in found.items()},
        ),
    ]


def _facts(values: Mapping[str, Values]) -> list[str]:
    """Return what one core does, out of the medians."""

    def median(work: Work, name: str = SIDECAR) -> float:
        return statistics.median(values[work.name][name])

    chunks, dense = 1e6 / median(works.SSE_256), 1e6 / median(works.SSE_64)
    return [
        f"One core of this machine passes {chunks * 0.025:,.0f} streams of 40 tokens per second "
        f"({dense * 0.01:,.0f} of 100), {1e6 / median(works.JSON):,.0f} JSON requests per second on kept connections, "
        f"{1e6 / median(works.FRESH):,.0f} on new ones, or {1e6 / median(works.UPLOADS):,.0f} MB of images per second.",
    ]


def _methods(ready: Bed, length: Length) -> list[str]:
    return [
        f"Upstream and load generator are C programs on loopback. {ready.cores.in_words().capitalize()}.",
        f"{SIDECAR} has default settings, its data plane [compiled](architecture.md#the-compiled-build) or not. "
        f"{NGINX} is Debian's: one worker, no access log, no buffering, kept connections.",
        f"{length.rounds} rounds; in brackets their lowest and highest ratio. Time to first byte is less that without "
        f"a proxy. Memory is of fresh processes, with {OPEN_STREAMS} streams; MB and KB are powers of ten.",
    ]
