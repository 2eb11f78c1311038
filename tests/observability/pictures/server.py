"""One simulated server of the scene: its memory over two hours, as the sidecar's real exporter shows it.

A load of images fills the encoder cache; the policy gives memory back twice; on the first server the engine dies later,
and loads again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gated_proxy.door import Door
from gated_proxy.door_items import Cost, DoorLimits
from gated_proxy.traffic import Connections
from highwater.host.watch import HostNow
from highwater.http.metrics import Counters, Exporter
from highwater.model.components import account
from highwater.model.engine import EngineState, EngineStatus
from highwater.model.growth import Growth, RankGrowth
from highwater.model.policy import PolicyStatus, RankPressure, RulePhase, RuleStatus
from highwater.model.rank import (
    Budget,
    Components,
    Device,
    EncoderCache,
    EncoderCacheTotals,
    HostMemory,
    RankReading,
    TorchMemory,
    WorkerMemory,
)
from highwater.model.remedies import RemedyResult
from highwater.model.report import Report
from highwater.model.units import GIB, MIB
from highwater_worker.wire import EXTENSION_VERSION
from tests.observability.pictures.host import LEAK_PER_REQUEST, host_now, verdicts

STEP_SECONDS: Final = 30
TOTAL, WEIGHTS, KV_CACHE, REST = 64 * GIB, 18 * GIB, 33 * GIB, 6 * GIB
HIGH, LOW = 2 * GIB, 4 * GIB
READY_MINUTE, DEATH_MINUTE, BACK_MINUTE = 4, 88, 95


class _Process(Collector):
    """The sidecar's own process, which grows a little."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        """Return the families of `prometheus_client.ProcessCollector`."""
        at = self._server.now
        seconds = at - self._server.began
        for name, value in {
            "virtual_memory_bytes": 400 * MIB,
            "resident_memory_bytes": 88 * MIB + 700 * seconds,
            "start_time_seconds": self._server.began - 600,
            "open_fds": 60 + 40 * self._server.load,
            "max_fds": 65536,
        }.items():
            yield GaugeMetricFamily(f"highwater_process_{name}", "x", value=value)
        yield CounterMetricFamily("highwater_process_cpu_seconds", "x", value=0.06 * seconds)


class _Engine:
    """vLLM's own families, as far as the dashboards read them."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.running = Gauge("vllm:num_requests_running", "x", ("engine",), registry=registry)
        self.waiting = Gauge("vllm:num_requests_waiting", "x", ("engine",), registry=registry)
        self.kv_cache = Gauge("vllm:kv_cache_usage_perc", "x", ("engine",), registry=registry)
        names = ("prefix_cache_hits", "prefix_cache_queries", "mm_cache_hits", "mm_cache_queries", "num_preemptions")
        names += ("generation_tokens", "prompt_tokens")
        self.counts = {name: Counter(f"vllm:{name}", "x", registry=registry) for name in names}
        buckets = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40)
        self.latency = {
            name: Histogram(f"vllm:{name}_seconds", "x", buckets=buckets, registry=registry)
            for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
        }


class Server:
    """A server from the scene's beginning on."""

    def __init__(self, seed: int, model: str, began: float, *, dies: bool) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self._seed, self._model, self._dies = seed, model, dies
        self.began = self.now = began
        self.load = 0.0
        self._cache, self._spilled, self._reserve, self._actions, self._restarts = 0, 0, 512 * MIB, 0, 0
        self._retries = self._spills = 0
        self._phase: RulePhase = "calm"
        self._incidents = {"died": 0, "hung": 0, "out_of_memory": 0, "start_failed": 0}
        self._sent = 0
        self._engine = _Engine()
        self._door = Door(mode="on", limits=DoorLimits(decoded_bytes=4 * GIB, encoder_tokens=131_072))
        self._exporter = Exporter(
            Counters(),
            self._report,
            self._policy,
            held=lambda: 4 if self._phase == "acting" else 0,
            door=self._door,
            connections=self._connections,
            incidents=lambda: self._incidents,
            growth=lambda: verdicts(2, exhausted_at=self.now + self._seconds_to_limit) if self.state == "ready" else (),
            oom_kills=lambda: 0,
            host=self._host,
            process=_Process(self),
            process_memory_limit=lambda: GIB,
            clock=lambda: self.now,
        )

    def page(self, at: float) -> str:
        """The scrape of that moment; moments go forward by `STEP_SECONDS`."""
        self.now = at
        self._live()
        return self._exporter.page().decode() + generate_latest(self._engine.registry).decode()

    @property
    def _minute(self) -> float:
        return (self.now - self.began) / 60

    @property
    def state(self) -> EngineState:
        """As the sidecar sees the engine."""
        if self._minute < READY_MINUTE:
            return "starting"
        if self._dies and DEATH_MINUTE <= self._minute < BACK_MINUTE:
            return "gone" if self._minute < DEATH_MINUTE + 1 else "starting"
        return "ready"

    def _live(self) -> None:
        counters = self._exporter.counters
        for _ in range(15):
            counters.polled(self._chance.uniform(0.002, 0.02))
        if self.state != "ready":
            self._be_down()
            return
        self.load = min(1.0, 0.3 + self._minute / 100) + self._chance.uniform(-0.1, 0.1)
        self._serve()
        self._cache += int(self.load * (60 + 10 * self._seed) * MIB)
        self._reserve = min(self._reserve + int(self.load * 10 * MIB), 2 * GIB)
        if self._phase == "short":
            self._phase = "acting"
            self._relieve()
        elif self._free(rank=1) < HIGH:
            self._phase = "short"
            self._retries += 1
        else:
            self._phase = "resting" if self._phase == "acting" else "calm"

    def _be_down(self) -> None:
        if self._dies and self.state == "gone" and self._minute < DEATH_MINUTE + STEP_SECONDS / 60:
            self._incidents["died"] += 1
            self._restarts += 1
            self._exporter.counters.poll_failed("workers", "unreachable")
        self._cache, self._reserve, self.load, self._phase = 0, 512 * MIB, 0.0, "held"
        if self._dies and self._minute > READY_MINUTE:
            for _ in range(8):
                self._exporter.counters.traffic.upstream_error("connect")
                self._request(502, "refused")

    def _relieve(self) -> None:
        for name, freed in (
            ("release", Components(torch_cached_bytes=self._reserve - 256 * MIB)),
            ("trim_encoder_cache", Components(encoder_cache_bytes=self._cache // 2)),
        ):
            result = RemedyResult(
                remedy=name,
                outcome="done",
                seconds=self._chance.uniform(0.2, 0.8),
                quiesced_by="gate",
                held_seconds=self._chance.uniform(0.05, 0.4),
                credited_components=freed,
            )
            self._exporter.counters.remedy_ended(result, "policy")
            self._exporter.counters.policy_acted("device", name, "done")
            self._actions += 1
        self._reserve, self._spilled = 256 * MIB, self._spilled + self._cache // 4
        self._spills += 60
        self._cache //= 2
        self._exporter.counters.traffic.request_refused("gate_full")

    def _serve(self) -> None:
        count = int(20 * self.load)
        engine = self._engine
        for _ in range(count):
            self._request(500 if self._chance.random() < 0.004 else 200, "complete")
            slow = 2.0 if self._phase in {"short", "acting"} else 1.0
            engine.latency["time_to_first_token"].observe(self._chance.lognormvariate(-1.6, 0.5) * slow)
            engine.latency["inter_token_latency"].observe(self._chance.lognormvariate(-3.7, 0.3) * slow)
            engine.latency["e2e_request_latency"].observe(self._chance.lognormvariate(1.2, 0.4) * slow)
        door = self._door.counts
        door.requests, door.items["jpeg"] = door.requests + count, door.items["jpeg"] + 2 * count
        if self.load > 1.0:
            door.waited, door.waited_seconds = door.waited + 1, door.waited_seconds + 0.5
        self._door.inside = Cost(decoded_bytes=count * 80 * MIB, encoder_tokens=count * 2048, items=2 * count)
        engine.running.labels("0").set(count)
        engine.waiting.labels("0").set(max(count - 16, 0))
        engine.kv_cache.labels("0").set(min(0.15 + 0.7 * self.load, 1.0))
        for name, each in (
            ("prefix_cache_hits", 300),
            ("prefix_cache_queries", 700),
            ("mm_cache_hits", 2),
            ("mm_cache_queries", 6),
            ("generation_tokens", 180),
            ("prompt_tokens", 900),
        ):
            engine.counts[name].inc(each * count)
        engine.counts["num_preemptions"].inc(1 if self.load > 1.0 else 0)

    def _request(self, code: int, result: str) -> None:
        self._sent += 1
        traffic = self._exporter.counters.traffic
        traffic.request_started()
        seconds = self._chance.uniform(0.5, 6.0)
        traffic.request_ended(
            "chat_completions",
            "POST",
            code,
            result,
            seconds=seconds,
            first_byte_seconds=seconds / 8 if result == "complete" else None,
            request_bytes=40_000,
            response_bytes=9_000,
        )

    def _connections(self) -> Connections:
        busy = int(20 * self.load)
        return Connections(
            clients=20 + busy,
            engine_active=busy,
            engine_idle=6,
            requests_on_new=self._sent // 30,
            requests_on_reused=self._sent - self._sent // 30,
            retries=self._sent // 900,
        )

    def _free(self, rank: int = 0) -> int:
        return TOTAL - WEIGHTS - KV_CACHE - REST - self._cache - self._reserve - rank * 300 * MIB

    def _report(self) -> Report:
        is_up = self.state == "ready"
        ranks = tuple(account(self._worker(rank)) for rank in range(2)) if is_up else ()
        pace = self.load * (70 + 10 * self._seed) * MIB / STEP_SECONDS
        rank_growth = tuple(
            RankGrowth(rank=rank, dp_rank=0, bytes_per_second=pace, seconds_to_full=self._free(rank) / max(pace, 1))
            for rank in range(2)
        )
        began = self.began + 60 * (BACK_MINUTE - 5) if self._restarts and is_up else self.began - 60
        return Report(
            taken_at=self.now if is_up else None,
            age_seconds=self._chance.random() if is_up else None,
            stale=not is_up,
            engine=EngineStatus(
                url="http://127.0.0.1:8000",
                state=self.state,
                started_at=began,
                restarts=self._restarts,
                version="0.32.0",
                model=self._model,
                requests_running=int(20 * self.load) if is_up else None,
                requests_waiting=max(int(20 * self.load) - 16, 0) if is_up else None,
                kv_cache_usage_ratio=min(0.15 + 0.7 * self.load, 1.0) if is_up else None,
                is_loading=self.state == "starting",
                extension_versions=(EXTENSION_VERSION,),
            ),
            ranks_expected=2,
            ranks_reported=len(ranks),
            ranks=ranks,
            encoder_cache=EncoderCacheTotals.of(ranks),
            growth=self._growth(ranks, pace, rank_growth),
        )

    def _growth(self, ranks: tuple[RankReading, ...], pace: float, by_rank: tuple[RankGrowth, ...]) -> Growth:
        if not ranks:
            return Growth()
        return Growth(since_ready_bytes=2 * (self._cache + self._reserve), bytes_per_second=2 * pace, ranks=by_rank)

    @property
    def _seconds_to_limit(self) -> float:
        return max(7200 - 60 * self._minute, 60.0)

    def _host(self) -> HostNow | None:
        if self.state != "ready":
            return None
        leaked = self._sent * LEAK_PER_REQUEST
        waited = max(self._minute - 60, 0.0)
        return host_now(2, leaked=leaked, seconds_to_limit=self._seconds_to_limit, waited=waited)

    def _worker(self, rank: int) -> WorkerMemory:
        free = self._free(rank)
        allocated = WEIGHTS + KV_CACHE + self._cache + 3 * GIB + rank * 300 * MIB
        return WorkerMemory(
            rank=rank,
            dp_rank=0,
            host=f"node-{self._seed}",
            taken_at=self.now,
            device=Device(
                type="npu", index=rank, physical_index=rank, name="Ascend910B3", uuid=f"simulated-{self._seed}-{rank}"
            ),
            total_bytes=TOTAL,
            free_bytes=free,
            used_bytes=TOTAL - free,
            torch=TorchMemory(
                allocated_bytes=allocated,
                reserved_bytes=allocated + self._reserve,
                peak_allocated_bytes=allocated + GIB,
                inactive_split_bytes=128 * MIB,
                alloc_retries=self._retries,
                ooms=0,
            ),
            releasable_bytes=max(self._reserve - 128 * MIB, 0),
            weights_bytes=WEIGHTS,
            kv_cache_bytes=KV_CACHE,
            encoder_cache=EncoderCache(
                entries=self._cache // (4 * MIB),
                device_bytes=self._cache,
                host_bytes=self._spilled,
                host_entries=self._spilled // (4 * MIB),
                capacity_embeds=450_000,
                embeds=self._cache // (16 * 1024),
                oldest_age_seconds=min(60 * self._minute, 1800),
                spills=self._spills,
                restores=self._spills // 3,
                restore_seconds=self._spills / 900,
            ),
            budget=Budget(gpu_memory_utilization=0.9, requested_bytes=57 * GIB),
            host_memory=HostMemory(
                rss_bytes=6 * GIB + self._spilled,
                cgroup_used_bytes=70 * GIB + 2 * self._spilled,
                cgroup_limit_bytes=128 * GIB,
                pinned_bytes=GIB,
            ),
        )

    def _policy(self) -> PolicyStatus:
        free = [self._free(rank) for rank in range(2)]
        ranks = tuple(
            RankPressure(
                rank=rank,
                dp_rank=0,
                free_bytes=free[rank],
                high_free_bytes=HIGH,
                low_free_bytes=LOW,
                short_bytes=max(LOW - free[rank], 0) if self._phase != "calm" else 0,
            )
            for rank in range(2)
        )
        device = RuleStatus(
            name="device",
            signal="device_free_bytes",
            phase=self._phase,
            value=min(free),
            high_water=HIGH,
            low_water=LOW,
            ranks=ranks if self.state == "ready" else (),
        )
        used = 1 - min(free) / TOTAL
        share = RuleStatus(
            name="share", signal="device_used_ratio", phase="calm", value=used, high_water=0.99, low_water=0.97
        )
        cache = RuleStatus(
            name="cache",
            signal="encoder_cache_bytes",
            phase="calm",
            value=2 * self._cache,
            high_water=16 * GIB,
            low_water=8 * GIB,
        )
        level = "short" if self._phase in {"short", "acting", "resting"} else "calm"
        return PolicyStatus(
            mode="act", level=level, summary="simulated", rules=(device, share, cache), actions_last_hour=self._actions
        )


def exposition(text: str, labels: str, at: float) -> Iterator[str]:
    """The samples of a page with the labels that a scrape adds, as OpenMetrics with a time."""
    for line in text.splitlines():
        if line.startswith("#") or "_created" in line:
            continue
        series, _, value = line.rpartition(" ")
        name, brace, own = series.partition("{")
        inside = f"{labels},{own}" if brace else f"{labels}}}"
        yield f"{name}{{{inside} {value} {at:.0f}\n"
