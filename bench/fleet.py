"""What many sidecars cost one Prometheus: a real one scrapes 200 simulated ones, with all rules loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.demo.errors import DemoError
from app.demo.process import KeptProcess, free_port
from bench.dataplane.report import Report
from bench.figure import number
from bench.prometheus_history import Span, write_blocks
from bench.simulated_fleet import SimulatedFleet, labels_of, model_of
from bench.stage import Stage
from helm.source.alerts import ALERTS, DAY, HOUR, MINUTE, duration
from helm.source.recording import RECORDINGS
from helm.source.rules import recording_groups, rule_groups

MIB = 1024**2
TIMES = 5  # 200 servers are measured, 1,000 are what the reader plans for
READY_SECONDS = 60.0
LOOK_SECONDS = 2.0
DASHBOARD = Path(__file__).resolve().parent.parent / "helm" / "dashboards" / "highwater-fleet.json"
ALERT_GROUP, RECORDING_GROUP = "highwater", "highwater-fleet"
# The two alerts that look back for a day and more, and the most that the others do.
LONG_ALERTS = ("HighwaterSidecarDown", "HighwaterSidecarsGone", "HighwaterObserveMode")
# The same panel from what ranks say and from what is recorded of servers.
_INFO = "on (job, instance) group_left (model) highwater_engine_info"
BY_RANKS = f"sum by (model, component) (highwater_memory_component_bytes * {_INFO})"
BY_SERVERS = "sum by (model, component) (instance_component:highwater_memory_component_bytes:sum)"
SHORT_FAMILIES = re.compile(r"highwater_(device_memory_(free|total)_bytes|engine_(up|info)|torch_\w+_total)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is simulated.

    Attributes:
        servers: Sidecars.
        ranks: Of each.
        scrape_seconds: Between two scrapes, and between two evaluations of all rules.
        warm_seconds: From the first scrape of each, which makes the series, until something is measured.
        measured_seconds: For how long.
        long_history: Servers that have a whole week behind them; 0: nobody has any past.
    """

    servers: int = 200
    ranks: int = 8
    scrape_seconds: float = 15.0
    warm_seconds: float = 10.0
    measured_seconds: float = 75.0
    long_history: int = 20


FULL = Size()
SHORT = Size(servers=10, scrape_seconds=1.0, warm_seconds=1.0, measured_seconds=4.0, long_history=0)


class Prometheus(KeptProcess):
    """A Prometheus of this machine, with the fleet as its targets and our rules.

    Args:
        folder: Gets its data and its log.
        port: Of the simulated fleet.
        size: How many targets there are, and how often it looks.
    """

    def __init__(self, folder: Path, port: int, size: Size) -> None:
        super().__init__("prometheus", folder / "prometheus.log")
        self._folder, self._size, self._fleet_port, self._port = folder, size, port, free_port()

    @property
    def data(self) -> Path:
        """Its storage."""
        return self._folder / "tsdb"

    def __enter__(self) -> Prometheus:
        config = self._folder / "prometheus.json"
        config.write_text(json.dumps(self._config()), encoding="utf-8")  # JSON is YAML
        command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={self.data}"]
        command += [f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=warn"]
        self.start(command, env=dict(os.environ), cwd=self._folder)
        self.wait_until_answers(self._port, "/-/ready", READY_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _config(self) -> Mapping[str, Any]:
        target = f"127.0.0.1:{self._fleet_port}"
        every = duration(self._size.scrape_seconds)
        targets = [
            {"targets": [target], "labels": labels_of(number) | {"__metrics_path__": f"/{number}/metrics"}}
            for number in range(self._size.servers)
        ]
        files = {"alerts.json": rule_groups(), "recordings.json": recording_groups(self._size.scrape_seconds)}
        for name, groups in files.items():
            (self._folder / name).write_text(json.dumps(groups), encoding="utf-8")
        job = {"job_name": "highwater", "params": {"engine": ["1"]}, "static_configs": targets}
        return {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": [str(self._folder / name) for name in files],
            "scrape_configs": [job],
        }

    def ask(self, query: str, at: float | None = None) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
        """The rows of an instant query, and what the engine says that it took.

        Args:
            query: PromQL.
            at: Unix seconds; now where it is not given.
        """
        parameters = {"query": query, "stats": "all"} | ({"time": str(at)} if at is not None else {})
        url = f"http://127.0.0.1:{self._port}/api/v1/query"
        data = httpx.post(url, data=parameters, trust_env=False, timeout=120).raise_for_status().json()["data"]
        return data["result"], data["stats"]

    def value(self, query: str) -> float:
        """The one number of a query, or 0 where there is none."""
        rows, _ = self.ask(query)
        return float(rows[0]["value"][1]) if rows else 0.0

    def about_itself(self) -> dict[str, float]:
        """Its own metrics, summed over what labels they have; those of a rule group by `name group`."""
        text = httpx.get(f"http://127.0.0.1:{self._port}/metrics", trust_env=False, timeout=60).text
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
            group = re.search(r'rule_group="[^"]*;([^"]+)"', labels)
            key = f"{name} {group[1]}" if group else name
            found[key] = found.get(key, 0.0) + float(value)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one run measured; seconds, bytes and counts.

    Attributes:
        series: In the head, recorded series included.
        samples: Of each scrape; `ours` of them, of which `of_rank` for each rank and `created` say since when.
        page_seconds: Of each scrape: mean, and the 99th of 100.
        evaluations: Of each rule group, seconds each.
        recorded: Series that the recordings make of each server, and of each namespace and model.
        cores: Processor time of Prometheus.
        rss_bytes: Resident: as it began, and at the end.
        samples_per_second: Taken in.
        alerts: Seconds of each alert's expression, and the samples that it read.
        dashboard: Seconds of each query of the fleet dashboard, and the rows that it brought.
        panel: Seconds of one panel of it, and of the same from recordings; the median of some.
        failures: Rules that could not be evaluated.
        skipped: Evaluations of a group that were left out for lack of time.
        up: Targets that answered.
        failed_scrapes: Of all.
    """

    series: float
    samples: float
    ours: float
    of_rank: float
    created: float
    page_seconds: tuple[float, float]
    evaluations: Mapping[str, Sequence[float]]
    recorded: tuple[float, float]
    cores: float
    rss_bytes: tuple[float, float]
    samples_per_second: float
    alerts: Mapping[str, tuple[float, int]]
    dashboard: Mapping[str, tuple[float, int]]
    panel: tuple[float, float]
    failures: float
    skipped: float
    up: float
    failed_scrapes: float


def program(name: str) -> str:
    """Where it is.

    Raises:
        DemoError: It is not installed.
    """
    found = shutil.which(name)
    if found is None:
        raise DemoError(f"{name} is not installed; make tools brings it")
    return found


def watch(folder: Path, size: Size) -> Seen:
    """Start all of it, look on, end it.

    Args:
        folder: For data and logs.
        size: How much.

    Raises:
        DemoError: Prometheus is not there, or something did not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with SimulatedFleet(folder, servers=size.servers, ranks=size.ranks) as fleet:
        prometheus = Prometheus(folder, fleet.port, size)
        if size.long_history:
            _give_past(prometheus.data, folder, size)
        with prometheus:
            return _look(prometheus, size)


def _give_past(data: Path, folder: Path, size: Size) -> None:
    """What the rules look back at: an hour of every server, and of some a week."""
    longest = 7 * DAY
    spans = [
        Span(range(size.servers), SHORT_FAMILIES, 40 * MINUTE),
        Span(range(size.long_history), re.compile(r"highwater_build_info\b"), longest),
        Span(range(size.long_history), re.compile(r"highwater_policy_mode\b"), DAY + HOUR),
    ]
    write_blocks(program("promtool"), data, folder, spans, ranks=size.ranks, step_seconds=size.scrape_seconds)


def _look(prometheus: Prometheus, size: Size) -> Seen:
    begun = prometheus.about_itself()
    deadline = time.monotonic() + READY_SECONDS
    # Its discovery hands targets over every five seconds, and it spreads their first scrapes over one interval.
    while prometheus.value("sum(up)") < size.servers and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(size.warm_seconds)
    before, began = prometheus.about_itself(), time.monotonic()
    evaluations = dict(_evaluations(prometheus, began + size.measured_seconds))
    after, seconds = prometheus.about_itself(), time.monotonic() - began

    def grown(name: str) -> float:
        return after[name] - before[name]

    def grown_of(name: str) -> float:
        return sum(grown(f"{name} {group}") for group in (ALERT_GROUP, RECORDING_GROUP))

    window = duration(round(size.measured_seconds))
    servers = size.servers
    pairs = {(labels_of(server)["namespace"], model_of(server)) for server in range(servers)}
    return Seen(
        series=after["prometheus_tsdb_head_series"],
        samples=prometheus.value("avg(scrape_samples_scraped)"),
        ours=prometheus.value('count({__name__=~"highwater_.+"})') / servers,
        of_rank=prometheus.value('count({__name__=~"highwater_.+", rank="0"})') / servers,
        created=prometheus.value('count({__name__=~"highwater_.+_created"})') / servers,
        page_seconds=(
            prometheus.value(f"avg(avg_over_time(scrape_duration_seconds[{window}]))"),
            prometheus.value(f"quantile(0.99, quantile_over_time(0.99, scrape_duration_seconds[{window}]))"),
        ),
        evaluations=evaluations,
        recorded=(
            prometheus.value('count({__name__=~"instance.*:highwater_.+"})') / servers,
            prometheus.value('count({__name__=~"namespace_model.*:highwater_.+"})') / len(pairs),
        ),
        cores=grown("process_cpu_seconds_total") / seconds,
        rss_bytes=(begun["process_resident_memory_bytes"], after["process_resident_memory_bytes"]),
        samples_per_second=grown("prometheus_tsdb_head_samples_appended_total") / seconds,
        up=prometheus.value(f"sum(max_over_time(up[{window}]))"),
        failed_scrapes=prometheus.value(f"sum(count_over_time(up[{window}]) - sum_over_time(up[{window}]))"),
        failures=grown_of("prometheus_rule_evaluation_failures_total"),
        skipped=grown_of("prometheus_rule_group_iterations_missed_total"),
        alerts={alert.name: _cost(prometheus, alert.expression()) for alert in ALERTS},
        dashboard=dict(_dashboard(prometheus)),
        panel=(_median_cost(prometheus, BY_RANKS), _median_cost(prometheus, BY_SERVERS)),
    )


def _evaluations(prometheus: Prometheus, until: float) -> Iterator[tuple[str, list[float]]]:
    """Until then, how long every evaluation of a group took."""
    seen: dict[str, dict[float, float]] = {ALERT_GROUP: {}, RECORDING_GROUP: {}}
    while time.monotonic() < until:
        now = prometheus.about_itself()
        for group, found in seen.items():
            at = now[f"prometheus_rule_group_last_evaluation_timestamp_seconds {group}"]
            found[at] = now[f"prometheus_rule_group_last_duration_seconds {group}"]
        time.sleep(min(LOOK_SECONDS, max(until - time.monotonic(), 0.0)))
    for group, found in seen.items():
        yield group, list(found.values())


def _cost(prometheus: Prometheus, query: str) -> tuple[float, int]:
    _, stats = prometheus.ask(query)
    return stats["timings"]["execTotalTime"], stats["samples"]["totalQueryableSamples"]


def _median_cost(prometheus: Prometheus, query: str) -> float:
    return statistics.median(_cost(prometheus, query)[0] for _ in range(9))


def _dashboard(prometheus: Prometheus) -> Iterator[tuple[str, tuple[float, int]]]:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            query = re.sub(r"\$__(rate_interval|interval)", "1m", target["expr"])
            rows, stats = prometheus.ask(re.sub(r"\$\w+", ".*", query))
            yield f"{panel['title']} {target['refId']}", (stats["timings"]["execTotalTime"], len(rows))


def measure(stage: Stage, *, short: bool = False) -> Report:
    """The table of docs/fleet.md."""
    size = SHORT if short else FULL
    return report(watch(stage.folder / "fleet", size), size)


def report(seen: Seen, size: Size) -> Report:
    """In words."""
    assert seen.up == size.servers, f"{seen.up} of {size.servers} targets answered"
    assert seen.failures == 0, f"{seen.failures} rule evaluations failed"
    short_alerts = sum(seconds for name, (seconds, _) in seen.alerts.items() if name not in LONG_ALERTS)
    rss_grown = seen.rss_bytes[1] - seen.rss_bytes[0]

    def row(what: str, value: float, unit: str, *, grows: bool = True, more: str = "") -> tuple[str, str, str]:
        text = f"{number(value)} {unit}".rstrip() + (f" ({more})" if more else "")
        return what, text, f"{number(value * TIMES)} {unit}".rstrip() if grows else "the same"

    rows = [
        row("samples of a scrape, `?engine=1`", seen.samples, "", grows=False, more=f"{number(seen.ours)} ours"),
        row("series of each rank", seen.of_rank, "", grows=False),
        row("time of a scrape, mean", seen.page_seconds[0] * 1e3, "ms", grows=False),
        row("time of a scrape, 99th of 100", seen.page_seconds[1] * 1e3, "ms", grows=False),
        row("series in the head", seen.series, ""),
        row("recorded of each server", seen.recorded[0], "", grows=False),
        row("recorded of each namespace and model", seen.recorded[1], "", grows=False),
        row("samples taken in", seen.samples_per_second, "a second"),
        _evaluation_row("alerts, one evaluation of the group", seen.evaluations[ALERT_GROUP]),
        _evaluation_row("recordings, one evaluation of the group", seen.evaluations[RECORDING_GROUP]),
        row("fleet dashboard, all queries once", sum(seconds for seconds, _ in seen.dashboard.values()) * 1e3, "ms"),
        row("CPU of Prometheus", seen.cores, "cores"),
        (
            "memory of Prometheus, resident",
            f"{number(seen.rss_bytes[1] / MIB)} MiB ({number(seen.rss_bytes[0] / MIB)} at its start)",
            f"{number((seen.rss_bytes[0] + rss_grown * TIMES) / MIB)} MiB",
        ),
    ]
    facts = [
        f"One panel, memory by model and component: {number(seen.panel[0] * 1e3)} ms from what ranks say, "
        f"{number(seen.panel[1] * 1e3)} ms from what is recorded of servers (medians of 9).",
        f"Of our {number(seen.ours)} series {number(seen.created)} are `_created`: when a counter began.",
        f"The alerts that look back for an hour at most, each asked once: {number(short_alerts * 1e3)} ms together.",
    ]
    if size.long_history:
        facts += [_long_fact(name, *seen.alerts[name], size) for name in LONG_ALERTS]
    return Report(
        title="A fleet",
        columns=("what", f"{size.servers} servers, measured", f"{TIMES * size.servers:,} servers, extrapolated"),
        rows=rows,
        facts=facts,
        methods=_methods(size),
        notes=[f"{what}: {count:g}." for what, count in _missed(seen).items() if count],
    )


def _missed(seen: Seen) -> Mapping[str, float]:
    return {"Evaluations left out for lack of time": seen.skipped, "Scrapes that failed": seen.failed_scrapes}


def _evaluation_row(what: str, seconds: Sequence[float]) -> tuple[str, str, str]:
    middle = statistics.median(seconds) * 1e3
    spread = f"{len(seconds)} evaluations, {number(min(seconds) * 1e3)} to {number(max(seconds) * 1e3)}"
    return what, f"{number(middle)} ms ({spread})", f"{number(middle * TIMES)} ms"


def _long_fact(name: str, seconds: float, samples: int, size: Size) -> str:
    all_servers = seconds * TIMES * size.servers / size.long_history
    return (
        f"`{name}` with the whole past of {size.long_history} servers: {number(seconds * 1e3)} ms for {samples:,} "
        f"samples; of {TIMES * size.servers:,} servers {number(all_servers)} s (extrapolated)."
    )


def _methods(size: Size) -> list[str]:
    past = (
        f"Before that, the past was written: 40 minutes of what the short alerts read, and for {size.long_history} "
        "servers a week of `highwater_build_info` and a day of `highwater_policy_mode`, which is a tenth of what the "
        "long alerts cost."
        if size.long_history
        else "Nothing has a past: whatever looks back costs less than it would."
    )
    return [
        f"One process serves {size.servers} pages of a real exporter with {size.ranks} ranks, four remedies that ran, "
        "changing numbers, and as many series of the engine as a real vLLM has, on loopback.",
        f"A real Prometheus scrapes each every {size.scrape_seconds:g} s and evaluates alerts and recordings "
        f"({len(RECORDINGS)} rules) as often; shipped, recordings are evaluated every 30 s and alerts every minute. "
        f"{size.measured_seconds:g} s are measured, {size.warm_seconds:g} s after the first scrapes.",
        past,
        f"Extrapolated: {TIMES} times, memory {TIMES} times its growth. Nothing was measured at that size.",
        "The dashboard's queries are asked one by one, for one moment and all servers; a panel over time costs more.",
    ]
