"""What each part of the sidecar shows in the families of ``/metrics``; their table is ``families.toml``.

A value that is not known has no sample, and a family without labels is left out then. How many series there are is
bounded, whatever the files in the recorders' folder say.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Final, TypeAlias, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from gated_proxy.door import REASONS as DOOR_REASONS
from gated_proxy.door import Door
from gated_proxy.door import Mode as DoorMode
from gated_proxy.door_items import Form
from gated_proxy.traffic import Connections, Histogram, ProxyTraffic
from highwater.diagnose.verdict import Verdict, VerdictState
from highwater.host.watch import HostNow
from highwater.model.components import COMPONENTS
from highwater.model.engine import EngineState
from highwater.model.growth import GrowthKind, SeriesGrowth
from highwater.model.policy import SIGNALS, PolicyLevel, PolicyMode, PolicyStatus, RulePhase
from highwater.model.rank import RankReading, device_title, rank_title
from highwater.model.remedies import device_total, used_total
from highwater.model.report import Report
from highwater.model.units import sum_known
from highwater_worker.kernel.cgroup import EVENTS

Labels: TypeAlias = tuple[str, ...]
Row: TypeAlias = tuple[Labels, float | None]

HELP: Final[Mapping[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def family(name: str, labels: Labels, rows: Iterable[Row]) -> Metric:
    form = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    made = form(f"highwater_{name.removesuffix('_total')}", HELP[name], labels=labels)
    for values, value in rows:
        if value is not None:
            made.add_metric(values, value)
    return made


def known(name: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield family(name, (), [((), value)])


def counted(name: str, label: str, counts: Mapping[Any, float | None]) -> Metric:
    return family(name, (label,), (((value,), count) for value, count in counts.items()))


def one_of(name: str, label: str, literal: object, now: str) -> Metric:
    return family(name, (label,), (((value,), value == now) for value in get_args(literal)))


# --- the report ---


_RANK_LABELS: Final = ("rank", "device", "host")


def _of_encoder_cache(name: str) -> Callable[[RankReading], float | None]:
    return lambda rank: getattr(rank.encoder_cache, name) if rank.encoder_cache is not None else None


# A family of each rank, and where its value stands.
_RANK_VALUES: Final[Mapping[str, Callable[[RankReading], float | None]]] = {
    "device_memory_total_bytes": lambda r: r.total_bytes,
    "device_memory_free_bytes": lambda r: r.free_bytes,
    "device_memory_used_bytes": lambda r: r.used_bytes,
    "device_memory_used_ratio": lambda r: r.used_ratio,
    "torch_allocated_bytes": lambda r: r.torch.allocated_bytes,
    "torch_reserved_bytes": lambda r: r.torch.reserved_bytes,
    "torch_peak_allocated_bytes": lambda r: r.torch.peak_allocated_bytes,
    "device_releasable_bytes": lambda r: r.releasable_bytes,
    "host_memory_pinned_bytes": lambda r: r.host_memory.pinned_bytes,
    "host_memory_rss_bytes": lambda r: r.host_memory.rss_bytes,
    "host_memory_used_ratio": lambda r: r.host_memory.used_ratio,
    "host_memory_used_bytes": lambda r: r.host_memory.share[0],
    "host_memory_limit_bytes": lambda r: r.host_memory.share[1],
    "encoder_cache_oldest_age_seconds": _of_encoder_cache("oldest_age_seconds"),
    "encoder_cache_embeds": _of_encoder_cache("embeds"),
    "encoder_cache_capacity_embeds": _of_encoder_cache("capacity_embeds"),
    "torch_alloc_retries_total": lambda r: r.torch.alloc_retries,
    "torch_ooms_total": lambda r: r.torch.ooms,
    "encoder_cache_spills_total": _of_encoder_cache("spills"),
    "encoder_cache_restores_total": _of_encoder_cache("restores"),
    "encoder_cache_restore_seconds_total": _of_encoder_cache("restore_seconds"),
}


def report_families(report: Report) -> Iterator[Metric]:
    engine = report.engine
    yield from known("engine_up", engine.traits.is_up)
    yield from known("engine_restarts_total", engine.restarts)
    yield one_of("engine_state", "state", EngineState, engine.state)
    # Also of an engine that was never reached: dashboards join on it, and that one must not drop out of sight.
    yield family("engine_info", ("version", "model"), [((engine.version or "", engine.model or ""), 1.0)])
    yield from known("engine_start_time_seconds", engine.started_at)
    yield from known("engine_loading", engine.is_loading)
    yield counted("extension_info", "version", dict.fromkeys(engine.extension_versions, 1.0))
    yield from known("engine_requests_running", engine.requests_running)
    yield from known("engine_requests_waiting", engine.requests_waiting)
    yield from known("engine_kv_cache_usage_ratio", engine.kv_cache_usage_ratio)
    yield from known("ranks_expected", report.ranks_expected)
    yield from known("ranks_reported", 0 if report.stale else report.ranks_reported)
    if report.stale:
        return
    ranks = [
        ((rank_title(rank.dp_rank, rank.rank, unknown=""), device_title(rank.device), rank.host or ""), rank)
        for rank in report.ranks
    ]
    for name, read in _RANK_VALUES.items():
        yield family(name, _RANK_LABELS, ((labels, read(rank)) for labels, rank in ranks))
    yield family(
        "memory_component_bytes",
        (*_RANK_LABELS, "component"),
        (
            ((*labels, component.label), getattr(rank.components, component.name))
            for labels, rank in ranks
            for component in COMPONENTS
        ),
    )
    sizes: list[Row] = []
    entries: list[Row] = []
    for labels, rank in ranks:
        if (cache := rank.encoder_cache) is not None:
            sizes += [((*labels, "device"), cache.device_bytes), ((*labels, "host"), cache.host_bytes)]
            entries.append(((*labels, "device"), cache.entries - cache.host_entries))
            entries.append(((*labels, "host"), cache.host_entries))
    yield family("encoder_cache_bytes", (*_RANK_LABELS, "residency"), sizes)
    yield family("encoder_cache_entries", (*_RANK_LABELS, "residency"), entries)
    identity = (*_RANK_LABELS, "dp_rank", "physical_index", "uuid", "product")
    identities: list[Row] = []
    for labels, rank in ranks:
        of_rank = (rank.dp_rank, rank.device.physical_index, rank.device.uuid, rank.device.name)
        identities.append(((*labels, *("" if one is None else str(one) for one in of_rank)), 1.0))
    yield family("device_info", identity, identities)
    yield from known("devices_memory_total_bytes", device_total(report.ranks))
    yield from known("devices_memory_used_bytes", used_total(report.ranks))
    growth, labelled = report.growth, {rank.key: labels for labels, rank in ranks}
    yield from known("growth_bytes", growth.since_ready_bytes)
    yield from known("growth_bytes_per_second", growth.bytes_per_second)
    ends = ((labelled[key], one.seconds_to_full) for one in growth.ranks if (key := one.key) in labelled)
    yield family("device_memory_seconds_to_full", _RANK_LABELS, ends)


def verdict_families(verdict: Verdict) -> Iterator[Metric]:
    yield one_of("verdict", "state", VerdictState, verdict.state)
    yield from known("verdict_exit_status", verdict.exit_status)


# --- the policy ---


def policy_families(policy: PolicyStatus) -> Iterator[Metric]:
    rules = policy.rules
    yield one_of("policy_mode", "mode", PolicyMode, policy.mode)
    yield one_of("policy_level", "level", PolicyLevel, policy.level)
    yield from known("policy_actions_last_hour", policy.actions_last_hour)
    yield family("policy_rule_info", ("rule", "signal"), (((rule.name, rule.signal), 1.0) for rule in rules))
    phases = (((rule.name, phase), phase == rule.phase) for rule in rules for phase in get_args(RulePhase))
    yield family("policy_state", ("rule", "state"), phases)
    short = (
        ((rule.name, rank_title(rank.dp_rank, rank.rank, unknown="")), rank.short_bytes)
        for rule in rules
        for rank in rule.ranks
    )
    yield family("policy_short_bytes", ("rule", "rank"), short)
    # Value and waters by unit: no family mixes units.
    for unit in ("bytes", "ratio"):
        of_unit = [rule for rule in rules if SIGNALS[rule.signal].is_ratio == (unit == "ratio")]
        yield counted(f"policy_signal_{unit}", "rule", {rule.name: rule.value for rule in of_unit})
        yield counted(f"policy_high_water_{unit}", "rule", {rule.name: rule.high_water for rule in of_unit})
        yield counted(f"policy_low_water_{unit}", "rule", {rule.name: rule.low_water for rule in of_unit})


# --- the proxy ---

# The refusals that have a family of their own: the gate's, and those while the sidecar stops.
SHED_REASONS: Final = ("gate_full", "held_too_long", "shutting_down")


def traffic_families(traffic: ProxyTraffic) -> Iterator[Metric]:
    classes = dict(sorted(traffic.classes.items()))
    ended = [(name, key, count) for name, one in classes.items() for key, count in sorted(one.ended.items())]
    yield family(
        "proxy_requests_total",
        ("path_class", "method", "code", "result"),
        (((name, method, str(code), result), count) for name, (method, code, result), count in ended),
    )
    yield from known("proxy_requests_in_flight", traffic.under_way)
    yield _histogram("proxy_request_duration_seconds", {name: one.durations for name, one in classes.items()})
    yield _histogram("proxy_time_to_first_byte_seconds", {name: one.first_bytes for name, one in classes.items()})
    received = {name: one.request_bytes for name, one in classes.items()}
    yield counted("proxy_request_bytes_total", "path_class", received)
    sent = {name: one.response_bytes for name, one in classes.items()}
    yield counted("proxy_response_bytes_total", "path_class", sent)
    left = sum(count for _, (_, _, result), count in ended if result == "client_left")
    yield from known("proxy_client_disconnects_total", left)
    yield counted("proxy_upstream_errors_total", "reason", dict(sorted(traffic.upstream_errors.items())))
    yield counted("proxy_refused_total", "reason", dict(sorted(traffic.refused.items())))
    # From 0 on: many at once, at the first reset that sheds any, are an increase and not a series that begins.
    shed = {reason: traffic.refused.get(reason, 0) for reason in SHED_REASONS}
    yield counted("proxy_requests_shed_total", "reason", shed)


def _histogram(name: str, series: Mapping[str, Histogram]) -> Metric:
    made = HistogramMetricFamily(f"highwater_{name}", HELP[name], labels=("path_class",))
    for label, one in series.items():
        if any(one.counts):
            bounds = (*map(floatToGoString, one.bounds), "+Inf")
            buckets = list(zip(bounds, map(float, accumulate(one.counts)), strict=True))
            made.add_metric((label,), buckets, one.total)
    return made


def connection_families(connections: Connections) -> Iterator[Metric]:
    yield from known("proxy_connections", connections.clients)
    states = {"active": connections.engine_active, "idle": connections.engine_idle}
    yield counted("proxy_engine_connections", "state", states)
    requests = {"new": connections.requests_on_new, "reused": connections.requests_on_reused}
    yield counted("proxy_engine_requests_total", "connection", requests)
    yield from known("proxy_retries_total", connections.retries)
    yield from known("proxy_tunnels", connections.tunnels)


def door_families(door: Door) -> Iterator[Metric]:
    inside, limits, counts = door.inside, door.limits, door.counts
    yield one_of("door_mode", "mode", DoorMode, door.mode)
    yield from known("door_requests_waiting", door.waiting)
    yield from known("door_decoded_bytes", inside.decoded_bytes)
    yield from known("door_decoded_limit_bytes", limits.decoded_bytes)
    yield from known("door_encoder_tokens", inside.encoder_tokens)
    yield from known("door_encoder_limit_tokens", limits.encoder_tokens)
    yield from known("door_items", inside.items)
    yield from known("door_requests_total", counts.requests)
    yield from known("door_waits_total", counts.waited)
    yield from known("door_wait_seconds_total", counts.waited_seconds)
    yield from known("door_faults_total", counts.faults)
    yield counted("door_items_seen_total", "form", {form: counts.items[form] for form in get_args(Form)})
    # From 0 on, as of those that the gate sheds.
    yield counted("door_refused_total", "reason", {reason: counts.refused[reason] for reason in DOOR_REASONS})


# --- host memory ---

MAX_PROCESSES: Final = 64
# Shown together, because their names, and so their series, would come and go.
_TOGETHER: Final = ("other", "resource_tracker")
_KINDS: Final = {
    "anonymous": "anonymous_bytes",
    "file": "file_bytes",
    "shared": "shmem_bytes",
    "swap": "swap_bytes",
}
_CONTAINER_KINDS: Final = {
    "anonymous": "anonymous_bytes",
    "shared": "shmem_bytes",
    "page_cache": "page_cache_bytes",
    "kernel": "kernel_bytes",
}


def host_families(now: HostNow | None) -> Iterator[Metric]:
    if now is None:
        return
    reading = now.reading
    alone = [one for one in reading.processes if one.role not in _TOGETHER][:MAX_PROCESSES]
    by_kind: list[Row] = [
        ((one.role, one.name, kind), getattr(one, field)) for one in alone for kind, field in _KINDS.items()
    ]
    for role in _TOGETHER:
        together = [one for one in reading.processes if one.role == role]
        for kind, field in _KINDS.items():
            size = sum_known(getattr(one, field) for one in together)
            by_kind.append(((role, role.replace("_", " "), kind), size))
    yield family("host_process_bytes", ("role", "process", "kind"), by_kind)
    fields = {"peak_bytes": "peak_bytes", "threads": "threads", "open_files": "descriptors"}
    for name, field in fields.items():
        rows = (((one.role, one.name), getattr(one, field)) for one in alone)
        yield family(f"host_process_{name}", ("role", "process"), rows)
    if (container := reading.container) is not None:
        yield from known("host_container_used_bytes", container.used_bytes)
        yield from known("host_container_kept_bytes", container.kept_bytes)
        yield from known("host_container_limit_bytes", container.limit_bytes)
        kinds = {kind: getattr(container, field) for kind, field in _CONTAINER_KINDS.items()}
        yield counted("host_container_bytes", "kind", kinds)
        yield from known("host_container_not_attributed_bytes", now.report.parts.not_attributed_bytes)
        events = {event: container.events.get(event) for event in EVENTS}
        yield counted("host_container_events_total", "event", events)
        if (waited := container.pressure) is not None:
            seconds = {"some": waited.some_seconds, "full": waited.full_seconds}
            yield counted("host_container_pressure_seconds_total", "tasks", seconds)
        yield from known("host_container_seconds_to_limit", now.report.outlook.seconds_to_limit)
    if (shm := reading.shm) is not None:
        yield from known("host_shm_size_bytes", shm.size_bytes)
        yield from known("host_shm_free_bytes", shm.free_bytes)
        yield from known("host_shm_promised_bytes", shm.promised_bytes)
        sizes = Counter[str]()
        for one in shm.owners:
            sizes["left_over" if one.state == "left_over" else one.owner] += one.used_bytes
        yield counted("host_shm_used_bytes", "owner", sizes)


# --- growth ---

# Each series takes five lines. Eight ranks with all their processes have more series; growing series come first.
MAX_SHOWN: Final = 120
_SERIES: Final = ("process", "series")


def growth_families(series: Sequence[SeriesGrowth]) -> Iterator[Metric]:
    judged = islice((one for one in series if not one.is_over), MAX_SHOWN)
    shown = [((one.owner, one.measure.removesuffix("_bytes")), one) for one in judged]
    verdicts = (((*labels, kind), kind == one.verdict) for labels, one in shown for kind in get_args(GrowthKind))
    yield family("growth_verdict", (*_SERIES, "verdict"), verdicts)
    for name, unit in (("growth_leak_bytes", "bytes"), ("growth_leak_items", "count")):
        rates = [(labels, one.rate) for labels, one in shown if one.unit == unit and one.rate is not None]
        rows = (((*labels, rate.driver), rate.per_driver) for labels, rate in rates)
        yield family(name, (*_SERIES, "driver"), rows)
    yield family("growth_exhausted_timestamp_seconds", _SERIES, ((labels, one.exhausted_at) for labels, one in shown))
