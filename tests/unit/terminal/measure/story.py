"""The seed story as an experiment: two NPUs, 57,766 MiB in use once up, 61,548 after a thousand images."""

from __future__ import annotations

from dataclasses import replace

from highwater.diagnose.evidence import CacheReading, EncoderEntry, Experiment, LoadRun, Moment
from highwater.model.engine import EngineLoad, EngineStatus
from highwater.model.policy import PolicyStatus, RankPressure, RemedyState, RuleStatus
from highwater.model.rank import Budget, Components, Device, EncoderCache, HostMemory, RankReading, TorchMemory
from highwater.model.remedies import RemedyResult
from highwater.model.report import Event
from tests.fakes.incident import MIB, TOTAL, reading

WEIGHTS, KV_POOL = 31_459_200_000, 21_540_531_712
OTHER_TENSORS, NON_TORCH = 256 * MIB, 1_178 * MIB
READY, GROWN = 57_766 * MIB, 3_782 * MIB
CACHED = READY - WEIGHTS - KV_POOL - OTHER_TENSORS - NON_TORCH
START, SECONDS, SETTLE = 1_763_660_000.0, 62.0, 5.0
IMAGE = 122 * MIB
NPU = Device(type="npu", index=0, name="Ascend910B3")


def point(
    rank: int, at: float, *, encoder: int = 0, cached: int = CACHED, other_tensors: int = OTHER_TENSORS
) -> RankReading:
    """One rank, its components summing to what is used."""
    allocated = WEIGHTS + KV_POOL + other_tensors + encoder
    used = allocated + cached + NON_TORCH
    return reading(
        rank,
        used=used,
        taken_at=at,
        device=NPU,
        components=Components(
            weights_bytes=WEIGHTS,
            kv_cache_bytes=KV_POOL,
            encoder_cache_bytes=encoder,
            other_tensors_bytes=other_tensors,
            torch_cached_bytes=cached,
            non_torch_bytes=NON_TORCH,
        ),
        torch=TorchMemory(
            allocated_bytes=allocated,
            reserved_bytes=allocated + cached,
            peak_allocated_bytes=WEIGHTS + KV_POOL + GROWN + 3 * OTHER_TENSORS,
            inactive_split_bytes=64 * MIB,
            alloc_retries=0,
            ooms=0,
        ),
        budget=Budget(gpu_memory_utilization=0.9, requested_bytes=TOTAL * 9 // 10, headroom_bytes=TOTAL - used),
        host_memory=HostMemory(
            rss_bytes=6 * 1024 * MIB, cgroup_used_bytes=128 * 1024 * MIB, cgroup_limit_bytes=512 * 1024 * MIB
        ),
        encoder_cache=EncoderCache(entries=encoder // IMAGE, device_bytes=encoder, capacity_embeds=16_384),
    )


def moment(name: str, title: str, at: float, **parts: int) -> Moment:
    return Moment(name=name, title=title, at=at, ranks=tuple(point(rank, at, **parts) for rank in (0, 1)))


def story() -> Experiment:
    """What `highwater measure --remedies all -- vllm bench serve ...` would have found."""
    end = START + SECONDS
    after = end + SETTLE
    steps = (
        RemedyResult(
            remedy="reset_mm_cache",
            outcome="refused",
            reason="reset_mm_cache can hang vLLM 0.12.0 for ever; 0.25 and newer bear it",
            frees="processed images in the API server's and EngineCore's host memory",
            does_not_free="device memory: encoder outputs, weights and KV pool stay",
        ),
        _done("release", 2 * (CACHED - 200 * MIB), "torch_cached_bytes", 0.41),
        _done("trim_encoder_cache", 2 * GROWN, "encoder_cache_bytes", 0.63),
    )
    return Experiment(
        name="bench of the 32B model",
        load=LoadRun(
            command=(
                "vllm",
                "bench",
                "serve",
                "--backend",
                "openai-chat",
                "--num-prompts",
                "1000",
                "--request-rate",
                "20",
            ),
            started_at=START,
            ended_at=end,
            seconds=SECONDS,
            exit_code=0,
        ),
        sidecar_url="http://127.0.0.1:8001",
        engine=EngineStatus(
            url="http://127.0.0.1:8000",
            state="ready",
            version="0.12.0",
            model="Qwen/Qwen3-VL-32B-Instruct",
            capabilities={"reset_encoder_cache": False},
        ),
        device=NPU,
        moments=(
            moment("ready", "ready", START - 300),
            moment("before", "before load", START),
            moment("peak", "peak under load", START + 40, encoder=GROWN, other_tensors=OTHER_TENSORS + 300 * MIB),
            moment("after", "after load", after, encoder=GROWN),
            moment("after release", "after release", after + 1, encoder=GROWN, cached=200 * MIB),
            moment("after trim_encoder_cache", "after trim_encoder_cache", after + 3, cached=200 * MIB),
        ),
        series={(0, rank): tuple(_series(rank)) for rank in (0, 1)},
        traffic=tuple(
            (START + second, EngineLoad(requests_running=8 if 0 < second < 62 else 0, requests_waiting=0))
            for second in range(70)
        ),
        remedies=steps,
        caches=(
            _cache("before the load", 0),
            _cache("after the load", 31),
            replace(
                _cache("after trim_encoder_cache", 31, residency="host"),
                totals=EncoderCache(entries=31, device_bytes=0, host_bytes=GROWN, capacity_embeds=16_384),
            ),
        ),
        events=(
            Event(id=1, at=START, kind="mark", summary="mark 'bench of the 32B model: load starts' at 112.82 GiB used"),
            Event(id=1, at=end, kind="mark", summary="mark 'bench of the 32B model: load ended' at 120.21 GiB used"),
        ),
        policy=PolicyStatus(
            mode="observe",
            level="short",
            summary="rank 0 is short",
            rules=(
                RuleStatus(
                    name="device",
                    signal="device_free_bytes",
                    phase="short",
                    ranks=tuple(RankPressure(rank=rank, dp_rank=0, high_free_bytes=1560 * MIB) for rank in (0, 1)),
                    remedies=(RemedyState(name="release"),),
                ),
            ),
        ),
        settings={"--gpu-memory-utilization": "0.9", "--max-num-batched-tokens": "16384"},
        recorded=True,
        version="0.1.0",
    )


def _done(remedy: str, freed: int, component: str, seconds: float) -> RemedyResult:
    return RemedyResult(
        remedy=remedy,
        outcome="done",
        seconds=seconds,
        freed_bytes=freed,
        credited_bytes=freed,
        freed_components=Components(**{component: freed}),
        quiesced_by="nothing",
        frees="what it frees",
        does_not_free="what it does not",
    )


def _cache(title: str, entries: int, residency: str = "device") -> CacheReading:
    row = EncoderEntry(mm_hash="5f" * 32, bytes=IMAGE, embeds=528, residency=residency, age_seconds=40.0)
    totals = EncoderCache(entries=entries, device_bytes=entries * IMAGE, capacity_embeds=16_384)
    return CacheReading(title=title, totals=totals, largest=(row,) * min(entries, 5))


def _series(rank: int) -> list[RankReading]:
    points = []
    for tenth in range(-40, 760):
        second = tenth / 10
        encoder = 0 if second < 2 else min(int(second / 1.3), 31) * IMAGE
        work = OTHER_TENSORS + (300 * MIB if 2 < second < 60 and tenth % 9 < 4 else 0)
        cached = CACHED if second < SECONDS + SETTLE + 1 else 200 * MIB
        if second > SECONDS + SETTLE + 3:
            encoder = 0
        points.append(point(rank, START + second, encoder=encoder, cached=cached, other_tensors=work))
    return points
