"""A sidecar's `/metrics` without an engine: a real exporter with a report that changes."""

from __future__ import annotations

import random
import time

from gated_proxy.door import Door
from gated_proxy.door_items import Cost, DoorLimits
from highwater.http.metrics import Counters, Exporter
from highwater.model.components import account
from highwater.model.engine import EngineStatus
from highwater.model.growth import Growth
from highwater.model.policy import PolicyStatus, RankPressure, RuleStatus
from highwater.model.rank import (
    Budget,
    Components,
    Device,
    EncoderCache,
    EncoderCacheTotals,
    HostMemory,
    TorchMemory,
    WorkerMemory,
)
from highwater.model.remedies import RemedyResult
from highwater.model.report import Report
from tests.observability.pictures.host import host_now, verdicts

GIB = 1024**3
MIB = 1024**2
_CODES = (200, 400)
_REMEDIES = ("release", "trim_encoder_cache", "reset_encoder_cache", "reset_mm_cache")
_FREED = Components(encoder_cache_bytes=512 * MIB, torch_cached_bytes=MIB)


class SimulatedPod:
    """Traffic, remedies now and then, and memory that changes between any two scrapes.

    Args:
        ranks: Workers of its engine.
    """

    def __init__(self, ranks: int) -> None:
        self._chance = random.Random(0)  # noqa: S311 - no secret
        self._host, self._model, self._ranks = "node-0", "vl-8b", ranks
        self._encoder_bytes = 2 * GIB
        self._door = Door(mode="on", limits=DoorLimits(decoded_bytes=GIB, encoder_tokens=32768))
        self._exporter = Exporter(
            Counters(),
            self._report,
            self._policy,
            door=self._door,
            growth=lambda: verdicts(ranks, exhausted_at=1_770_000_000.0),
            host=lambda: host_now(ranks),
            oom_kills=lambda: 0,
            process_memory_limit=lambda: GIB,
        )
        for remedy in _REMEDIES:
            self._remedy(remedy)
        for code in _CODES:
            self._request(code)

    def page(self) -> str:
        self._live()
        return self._exporter.page().decode()

    def _live(self) -> None:
        self._door.counts.requests += 1
        self._door.inside = Cost(decoded_bytes=self._chance.randrange(GIB), encoder_tokens=4096, items=4)
        for _ in range(15):
            self._exporter.counters.polled(self._chance.uniform(0.002, 0.02))
        for _ in range(self._chance.randrange(20)):
            self._request(self._chance.choices(_CODES, (99, 1))[0])
        self._encoder_bytes = min(max(self._encoder_bytes + self._chance.randrange(-64, 80) * MIB, 0), 4 * GIB)
        if self._chance.random() < 0.02:
            self._encoder_bytes = 0
            self._remedy("reset_encoder_cache")

    def _request(self, code: int) -> None:
        seconds = self._chance.uniform(0.05, 3.0)
        self._exporter.counters.traffic.request_started()
        self._exporter.counters.traffic.request_ended(
            "chat_completions",
            "POST",
            code,
            "complete",
            seconds=4 * seconds,
            first_byte_seconds=seconds,
            request_bytes=2000,
            response_bytes=8000,
        )

    def _remedy(self, name: str) -> None:
        result = RemedyResult(
            remedy=name, outcome="done", seconds=0.4, quiesced_by="gate", held_seconds=0.2, freed_components=_FREED
        )
        self._exporter.counters.remedy_ended(result, "policy")
        self._exporter.counters.policy_acted("device", name, "done")

    def _report(self) -> Report:
        ranks = tuple(account(self._worker(rank)) for rank in range(self._ranks))
        status = EngineStatus(
            url="http://127.0.0.1:8000",
            state="ready",
            version="0.32.0",
            model=self._model,
            requests_running=self._chance.randrange(40),
            requests_waiting=self._chance.randrange(4),
            kv_cache_usage_ratio=self._chance.random(),
            started_at=1_760_000_000.0,
            is_loading=False,
            extension_versions=("0.1.0",),
        )
        return Report(
            taken_at=time.time(),
            age_seconds=self._chance.random(),
            stale=False,
            engine=status,
            ranks_expected=self._ranks,
            ranks_reported=self._ranks,
            ranks=ranks,
            encoder_cache=EncoderCacheTotals.of(ranks),
            growth=Growth(since_ready_bytes=self._encoder_bytes * self._ranks, bytes_per_second=812.0),
        )

    def _worker(self, rank: int) -> WorkerMemory:
        allocated = 50 * GIB + self._encoder_bytes + self._chance.randrange(256) * MIB
        reserved = allocated + self._chance.randrange(512) * MIB
        used = reserved + GIB
        return WorkerMemory(
            rank=rank,
            host=self._host,
            taken_at=time.time(),
            device=Device(type="npu", index=rank, physical_index=rank, name="Ascend910B3", uuid=f"{self._host}-{rank}"),
            total_bytes=64 * GIB,
            free_bytes=64 * GIB - used,
            used_bytes=used,
            torch=TorchMemory(
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                peak_allocated_bytes=55 * GIB,
                inactive_split_bytes=128 * MIB,
                alloc_retries=0,
                ooms=0,
            ),
            releasable_bytes=max(reserved - allocated - 128 * MIB, 0),
            weights_bytes=18 * GIB,
            kv_cache_bytes=31 * GIB,
            encoder_cache=EncoderCache(
                entries=self._encoder_bytes // (4 * MIB),
                device_bytes=self._encoder_bytes,
                capacity_embeds=32768,
                embeds=self._encoder_bytes // (16 * 1024),
                oldest_age_seconds=self._chance.uniform(0, 600),
            ),
            budget=Budget(gpu_memory_utilization=0.9, requested_bytes=57 * GIB),
            host_memory=HostMemory(
                rss_bytes=4 * GIB, cgroup_used_bytes=80 * GIB, cgroup_limit_bytes=512 * GIB, pinned_bytes=GIB
            ),
        )

    def _policy(self) -> PolicyStatus:
        free, high, low = 13 * GIB - self._encoder_bytes, 1792 * MIB, 3584 * MIB
        ranks = tuple(
            RankPressure(rank=rank, dp_rank=0, free_bytes=free, high_free_bytes=high, low_free_bytes=low, short_bytes=0)
            for rank in range(self._ranks)
        )
        device = RuleStatus(
            name="device",
            signal="device_free_bytes",
            phase="calm",
            value=free,
            high_water=high,
            low_water=low,
            ranks=ranks,
        )
        host = RuleStatus(
            name="host", signal="host_used_ratio", phase="calm", value=0.16, high_water=0.9, low_water=0.8
        )
        return PolicyStatus(mode="act", level="calm", summary="all is calm", rules=(device, host))
