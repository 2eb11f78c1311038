"""Prometheus families, from the last report and from what is counted as it happens.

A page needs no I/O: it shows the last report, and per-rank families vanish while that is stale, so that a dead engine's
numbers do not look current. Endpoint pickers scrape twenty times a second, so each part of the page is rendered once
and then only when what it shows has changed. The golden file ``tests/unit/api/golden/metrics.txt`` shows every family.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, Generic, TypeVar, get_args

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from highwater.accounting.components import COMPONENTS
from highwater.accounting.totals import device_total, used_total
from highwater.api.counters import Counters
from highwater.api.families import Form, Row, counted, counter, gauge, known, one_of
from highwater.api.growth_metrics import growth_families
from highwater.api.host_metrics import host_families
from highwater.api.proxy_metrics import connection_families, traffic_families
from highwater.diagnose.evidence import IncidentKind
from highwater.host.cgroup import memory_limit
from highwater.host.watch import HostNow
from highwater.policy.rules import RATIO_SIGNALS
from highwater.proxy.traffic import Connections
from highwater.readings.engine import EngineState
from highwater.readings.growth import SeriesGrowth
from highwater.readings.policy import PolicyLevel, PolicyMode, PolicyStatus, RulePhase, RuleStatus
from highwater.readings.rank import RankReading, rank_title
from highwater.readings.report import Report
from highwater.text.table import device_title

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
"""Of the classic text format, whatever a scraper accepts: vLLM speaks no other, and a page has one format."""
_RANK_LABELS = ("rank", "device", "host")
_T = TypeVar("_T")


def _of_encoder_cache(name: str) -> Callable[[RankReading], float | None]:
    return lambda rank: getattr(rank.encoder_cache, name) if rank.encoder_cache is not None else None


# Per rank: metric name, help, and where the value stands.
_RANK_GAUGES: tuple[tuple[str, str, Callable[[RankReading], float | None]], ...] = (
    ("device_memory_total_bytes", "Memory of the device.", lambda r: r.total_bytes),
    ("device_memory_free_bytes", "Memory of the device that no process uses.", lambda r: r.free_bytes),
    ("device_memory_used_bytes", "Memory of the device in use; on CPU the worker's RSS.", lambda r: r.used_bytes),
    ("device_memory_used_ratio", "Used over total memory of the device.", lambda r: r.used_ratio),
    ("torch_allocated_bytes", "Live tensors in PyTorch's allocator.", lambda r: r.torch.allocated_bytes),
    ("torch_reserved_bytes", "What PyTorch's allocator took from the device.", lambda r: r.torch.reserved_bytes),
    ("torch_peak_allocated_bytes", "Highest allocated bytes so far.", lambda r: r.torch.peak_allocated_bytes),
    (
        "device_releasable_bytes",
        "Memory that a release of PyTorch's unused blocks would give back to the device now.",
        lambda r: r.releasable_bytes,
    ),
    (
        "host_memory_pinned_bytes",
        "Host memory that PyTorch keeps locked in place for copies, in use or not.",
        lambda r: r.host_memory.pinned_bytes,
    ),
    ("host_memory_rss_bytes", "Resident set size of the worker's process.", lambda r: r.host_memory.rss_bytes),
    (
        "host_memory_used_ratio",
        "Host memory in use over the cgroup's limit or the node's total.",
        lambda r: r.host_memory.used_ratio,
    ),
    (
        "host_memory_used_bytes",
        "Host memory in use by the worker's cgroup, or by the node.",
        lambda r: r.host_memory.share[0],
    ),
    ("host_memory_limit_bytes", "The cgroup's memory limit, or the node's total.", lambda r: r.host_memory.share[1]),
    (
        "encoder_cache_oldest_age_seconds",
        "Time since the oldest encoder cache entry was first seen by a poll: a lower bound.",
        _of_encoder_cache("oldest_age_seconds"),
    ),
    ("encoder_cache_embeds", "Embeddings in the encoder cache, wherever they lie.", _of_encoder_cache("embeds")),
    (
        "encoder_cache_capacity_embeds",
        "Embeddings that the engine's scheduler lets the encoder cache hold.",
        _of_encoder_cache("capacity_embeds"),
    ),
)
_RANK_COUNTERS: tuple[tuple[str, str, Callable[[RankReading], float | None]], ...] = (
    (
        "torch_alloc_retries",
        "Allocations that succeeded only after cached blocks were freed.",
        lambda r: r.torch.alloc_retries,
    ),
    ("torch_ooms", "Allocations that failed for lack of memory.", lambda r: r.torch.ooms),
    ("encoder_cache_spills", "Encoder outputs moved to host memory.", _of_encoder_cache("spills")),
    ("encoder_cache_restores", "Encoder outputs brought back at an access.", _of_encoder_cache("restores")),
    (
        "encoder_cache_restore_seconds",
        "Time that steps waited for encoder outputs to be brought back.",
        _of_encoder_cache("restore_seconds"),
    ),
)


class _Part(Collector, Generic[_T]):
    """Families of the page for what ``read`` returns, rendered again when it changes; ``None``: no families."""

    def __init__(self, read: Callable[[], _T], families: Callable[[_T], Iterable[Metric]]) -> None:
        self._read = read
        self._families = families
        self._value: _T | None = None
        self._text = b""

    def text(self) -> bytes:
        value = self._read()
        if value != self._value:
            self._value = value
            self._text = generate_latest(self)
        return self._text

    def collect(self) -> Iterable[Metric]:
        return () if self._value is None else self._families(self._value)


class Exporter:
    """The page of metrics; the callables return each part's value as it stands.

    Args:
        oom_kills: Of processes of the engine, over all its lives.
        process: Reads the sidecar's own process; once a second at most, since a descriptor is a file to list.
        process_memory_limit: Bytes; ``None`` without a limit. As often.
    """

    def __init__(
        self,
        counters: Counters,
        report: Callable[[], Report],
        policy: Callable[[], PolicyStatus],
        *,
        held: Callable[[], int] = lambda: 0,
        connections: Callable[[], Connections] = Connections,
        dropped_lines: Callable[[], int] = lambda: 0,
        incidents: Callable[[], Mapping[IncidentKind, int]] = dict,
        growth: Callable[[], tuple[SeriesGrowth, ...]] = tuple,
        host: Callable[[], HostNow | None] = lambda: None,
        oom_kills: Callable[[], int | None] = lambda: None,
        process: Collector | None = None,
        process_memory_limit: Callable[[], int | None] = memory_limit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # With a prefix: vLLM's own page, which follows on the same one, has the plain names.
        own_process = process or ProcessCollector(namespace="highwater", registry=None)

        self.counters = counters

        def ageless() -> Report:
            # The age goes on while the report stays what it is.
            return replace(report(), age_seconds=None)

        def process_families(_: int) -> Iterator[Metric]:
            yield from own_process.collect()
            yield from known("process_memory_limit_bytes", _MEMORY_LIMIT, process_memory_limit())

        self._parts = (
            _Part(ageless, _report_families),
            _value("report_age_seconds", "Age of the last reading of the workers.", lambda: report().age_seconds),
            # To judge the rules takes longer than to render them, and they are judged by the report.
            _Part(lambda: (ageless(), counters.changes), lambda _: _policy_families(policy())),
            _Part(lambda: counters.changes, lambda _: counters.registry.collect()),
            _Part(lambda: counters.traffic.counted, lambda _: traffic_families(counters.traffic)),
            _Part(host, host_families),
            _value("engine_oom_kills", _OOM_KILLS, oom_kills, counter),
            _value("proxy_requests_held", "Proxied requests that wait for a reset to end.", held),
            _Part(connections, connection_families),
            _value("access_log_lines_dropped", _DROPPED_LINES, dropped_lines, counter),
            _Part(lambda: dict(incidents()), lambda kinds: [counted("incidents", _INCIDENTS, "kind", kinds)]),
            _Part(
                lambda: dict(counters.internal_errors.counts),
                lambda parts: [counted("internal_errors", _INTERNAL_ERRORS, "part", parts)],
            ),
            _Part(growth, growth_families),
            _Part(lambda: int(clock()), process_families),
        )

    def page(self) -> bytes:
        return b"".join(part.text() for part in self._parts)


_DROPPED_LINES: Final = (
    "Lines of the access log that were dropped, because they could not be written as fast as requests ended."
)
_INCIDENTS: Final = "Incidents by kind, without repetitions; the folder of incidents remembers them over restarts."
_OOM_KILLS: Final = (
    "Processes of the engine that the kernel has killed for memory, in all lives of the engine that this sidecar saw; "
    "absent where no counter can be read."
)
_INTERNAL_ERRORS: Final = "Unexpected exceptions in a part of the sidecar, which went on; its log has each."
_MEMORY_LIMIT: Final = "Memory that the sidecar's container may use, its page cache included; absent without a limit."


def _value(name: str, text: str, read: Callable[[], float | None], form: Form = gauge) -> _Part[float | None]:
    return _Part(read, lambda value: known(name, text, value, form))


def _report_families(report: Report) -> Iterator[Metric]:
    yield from _engine_families(report)
    if not report.stale:
        yield from _rank_families(report.ranks)
        yield from _growth_families(report)


def _engine_families(report: Report) -> Iterator[Metric]:
    engine = report.engine
    text = "Whether the engine is up, as far as is known: also while it is slow, busy, paused or asleep."
    yield from known("engine_up", text, engine.traits.is_up)
    text = "Lives of the engine that the sidecar saw end, starts that failed included."
    yield from known("engine_restarts", text, engine.restarts, counter)
    yield one_of("engine_state", "1 for the state that the engine is in.", "state", EngineState, engine.state)
    # Also of an engine that was never reached: dashboards join on it, and that one must not drop out of sight.
    text = "Always 1; the engine's version and model are labels."
    yield gauge("engine_info", text, ("version", "model"), [((engine.version or "", engine.model or ""), 1.0)])
    text = "When the first process of the engine's workers was started, since unix epoch in seconds."
    yield from known("engine_start_time_seconds", text, engine.started_at)
    text = "Whether the workers' recorders show a start under way; absent where they would not show one."
    yield from known("engine_loading", text, engine.is_loading)
    text = "Always 1; the version of the workers' package is a label."
    yield gauge("extension_info", text, ("version",), (((version,), 1.0) for version in engine.extension_versions))
    yield from known("engine_requests_running", "Requests in the engine's running batch.", engine.requests_running)
    yield from known("engine_requests_waiting", "Requests queued in the engine's scheduler.", engine.requests_waiting)
    text = "Used share of the KV cache's blocks, of the fullest engine."
    yield from known("engine_kv_cache_usage_ratio", text, engine.kv_cache_usage_ratio)
    yield from known("ranks_expected", "Workers that the engine's configuration asks for.", report.ranks_expected)
    yield from known("ranks_reported", "Workers in the last report.", 0 if report.stale else report.ranks_reported)


def _policy_families(policy: PolicyStatus) -> Iterator[Metric]:
    yield one_of("policy_mode", "1 for the mode that the policy is in.", "mode", PolicyMode, policy.mode)
    text = "1 for how memory stands by the rule that is worst off."
    yield one_of("policy_level", text, "level", PolicyLevel, policy.level)
    text = "Remedies that the policy started within the last hour."
    yield from known("policy_actions_last_hour", text, policy.actions_last_hour)
    rules = policy.rules
    text = "Always 1; the signal that the rule watches is a label."
    yield gauge("policy_rule_info", text, ("rule", "signal"), (((rule.name, rule.signal), 1.0) for rule in rules))
    phases = (((rule.name, phase), phase == rule.phase) for rule in rules for phase in get_args(RulePhase))
    yield gauge("policy_state", "1 for the state that the rule is in.", ("rule", "state"), phases)
    text = "Device memory that is missing to the rule's low water once high water is crossed; 0 before."
    short = (((rule.name, rank_title(rank.dp_rank, rank.rank, unknown="")), rank.short_bytes)
             for rule in rules for rank in rule.ranks)  # fmt: skip
    yield gauge("policy_short_bytes", text, ("rule", "rank"), short)
    # Value and waters by unit: no family mixes units.
    for unit, are_ratios in (("bytes", False), ("ratio", True)):
        of_unit = [rule for rule in rules if (rule.signal in RATIO_SIGNALS) == are_ratios]
        for name, text, read in _WATERS:
            yield gauge(f"policy_{name}_{unit}", text, ("rule",), [((rule.name,), read(rule)) for rule in of_unit])


_WATERS: tuple[tuple[str, str, Callable[[RuleStatus], float | None]], ...] = (
    ("signal", "What the rule watches, on the rank that is worst off, as of the last report.", lambda r: r.value),
    ("high_water", "Where the rule acts; of that rank, where each has its own.", lambda r: r.high_water),
    ("low_water", "Where the rule is satisfied; of that rank, where each has its own.", lambda r: r.low_water),
)


def _rank_families(ranks: tuple[RankReading, ...]) -> Iterator[Metric]:
    labelled = [(_labels(rank), rank) for rank in ranks]
    for form, table in ((gauge, _RANK_GAUGES), (counter, _RANK_COUNTERS)):
        for name, text, read in table:
            yield form(name, text, _RANK_LABELS, [(labels, read(rank)) for labels, rank in labelled])
    parts = (((*labels, component.label), getattr(rank.components, component.name))
             for labels, rank in labelled for component in COMPONENTS)  # fmt: skip
    yield gauge("memory_component_bytes", "Exclusive parts of the used bytes.", (*_RANK_LABELS, "component"), parts)
    caches = [(labels, rank.encoder_cache) for labels, rank in labelled if rank.encoder_cache is not None]
    by_residency = (*_RANK_LABELS, "residency")
    sizes: list[Row] = []
    entries: list[Row] = []
    for labels, cache in caches:
        sizes += [((*labels, "device"), cache.device_bytes), ((*labels, "host"), cache.host_bytes)]
        entries.append(((*labels, "device"), cache.entries - cache.host_entries))
        entries.append(((*labels, "host"), cache.host_entries))
    yield gauge("encoder_cache_bytes", "Bytes of encoder outputs kept.", by_residency, sizes)
    yield gauge("encoder_cache_entries", "Encoder outputs kept.", by_residency, entries)
    text = "Always 1; the device's identity, as its own exporter knows it, and its product name are labels."
    with_identity = (*_RANK_LABELS, "dp_rank", "physical_index", "uuid", "product")
    yield gauge("device_info", text, with_identity, [((*_labels(rank), *_identity(rank)), 1.0) for rank in ranks])
    text = "Memory of all devices, each counted once."
    yield from known("devices_memory_total_bytes", text, device_total(ranks))
    text = "Memory in use on all devices, each counted once, however many ranks it has."
    yield from known("devices_memory_used_bytes", text, used_total(ranks))


def _identity(rank: RankReading) -> tuple[str, ...]:
    device = rank.device
    numbers = ("" if number is None else str(number) for number in (rank.dp_rank, device.physical_index))
    return (*numbers, device.uuid or "", device.name or "")


def _growth_families(report: Report) -> Iterator[Metric]:
    text = "Growth of used bytes over all ranks since the engine became ready."
    yield from known("growth_bytes", text, report.growth.since_ready_bytes)
    text = "Pace of used bytes over all devices now; absent where that of one is not steady."
    yield from known("growth_bytes_per_second", text, report.growth.bytes_per_second)
    text = "When the device is full at its present pace; absent where its readings do not foretell that."
    ranks = {rank.key: _labels(rank) for rank in report.ranks}
    growing = [one for one in report.growth.ranks if one.key in ranks]
    ends = ((ranks[one.key], one.seconds_to_full) for one in growing)
    yield gauge("device_memory_seconds_to_full", text, _RANK_LABELS, ends)


def _labels(rank: RankReading) -> tuple[str, str, str]:
    return rank_title(rank.dp_rank, rank.rank, unknown=""), device_title(rank.device), rank.host or ""
