"""Reads the sidecar beside the load, in a thread: what its history has gathered since, every other second.

The sidecar reads the workers anyway, and their recorders ten times a second; so nothing here calls the engine. A failed
reading is named in the report, and ends no load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import pairwise
from statistics import median
from typing import Any, Final, Self, TypeVar

from highwater.diagnose.evidence import CacheReading, EncoderEntry, Gap, Moment
from highwater.model.components import MemoryPoint
from highwater.model.engine import EngineLoad
from highwater.model.rank import Device, EncoderCache, HostMemory, RankKey, RankReading, key_of
from highwater.model.report import Event
from highwater.process.errors import SidecarError, SidecarRefused
from highwater.process.untrusted import plain
from highwater.terminal.client import SidecarClient, events_of, understood

EVERY_SECONDS = 2.0
JOIN_SECONDS = 10.0
OVERLAP_SECONDS = 5.0
MAX_POINTS = MAX_TRAFFIC = 4096
# A reading every second is the default; one in three that fails is no gap yet.
GAP_SECONDS, GAP_READINGS = 15.0, 3
_Kept = TypeVar("_Kept")


class Series:
    """The readings of all ranks, oldest first. Of too many, the lower one of each two in a row is dropped.

    A time longer than ``gap_seconds`` in which a rank was not read is a gap.
    """

    def __init__(self, gap_seconds: float = GAP_SECONDS) -> None:
        self.gap_seconds = gap_seconds
        self.gaps: list[Gap] = []
        self._points: dict[RankKey, list[RankReading]] = {}

    def add(self, points: Iterable[RankReading]) -> None:
        for point in points:
            kept = self._points.setdefault(point.key, [])
            if kept and point.taken_at <= kept[-1].taken_at:
                continue
            if kept and point.taken_at - kept[-1].taken_at > self.gap_seconds:
                self.gaps.append(Gap(start=kept[-1].taken_at, end=point.taken_at))
            kept.append(point)
            if len(kept) > MAX_POINTS:
                kept[:] = _halved(kept, _used)

    def last_at(self) -> dict[RankKey, float]:
        return {key: kept[-1].taken_at for key, kept in self._points.items()}

    def points(self) -> dict[RankKey, tuple[RankReading, ...]]:
        return {key: tuple(self._points[key]) for key in sorted(self._points)}

    def gaps_within(self, start: float, end: float) -> tuple[Gap, ...]:
        open_ended = {Gap(start=at, end=end) for at in self.last_at().values() if end - at > self.gap_seconds}
        cut = {Gap(start=max(gap.start, start), end=min(gap.end, end)) for gap in (*self.gaps, *open_ended)}
        return tuple(sorted((gap for gap in cut if gap.seconds > 0), key=lambda gap: gap.seconds, reverse=True))


def usual_gap(times: Sequence[float]) -> float:
    pauses = [later - earlier for earlier, later in pairwise(times)]
    return max(GAP_SECONDS, GAP_READINGS * median(pauses)) if pauses else GAP_SECONDS


def peaks(readings: Iterable[RankReading]) -> dict[RankKey, RankReading]:
    highest: dict[RankKey, RankReading] = {}
    for reading in readings:
        key = reading.key
        if reading.used_bytes is not None and (key not in highest or reading.used_bytes > _used(highest[key])):
            highest[key] = reading
    return highest


def _used(point: RankReading) -> int:
    return point.used_bytes or 0


def _halved(items: Sequence[_Kept], size: Callable[[_Kept], int]) -> list[_Kept]:
    pairs = zip(items[1::2], items[::2], strict=False)
    return [*(max(pair, key=size) for pair in pairs), *items[len(items) // 2 * 2 :]]


class Sampler(threading.Thread):
    """A thread that reads until the end of its context; it has ``client`` to itself.

    ``since`` is on the sidecar's clock. ``traffic`` is thinned where it is much; ``problem`` is why the last reading
    failed.
    """

    def __init__(self, client: SidecarClient, since: float, gap_seconds: float) -> None:
        super().__init__(name="sampler", daemon=True)
        self.series = Series(gap_seconds)
        self.traffic: list[tuple[float, EngineLoad]] = []
        self.recorded = False
        self.problem: str | None = None
        self._events: dict[tuple[int, float], Event] = {}
        self._client, self._since = client, since
        self._wants_recorded = True
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(JOIN_SECONDS)  # it may be waiting for a response, and holds nothing up if it goes on

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(sorted(self._events.values(), key=lambda event: event.at))

    def highest(self) -> RankReading | None:
        with self._lock:
            return max((points[-1] for points in self.series.points().values()), key=_used, default=None)

    def read(self) -> None:
        with self._lock:
            try:
                history = self._history()
                recorded = list(recorded_ranks(history.get("recorded", ()), self.series.last_at()))
                # A rank's recorder has all that its readings have, and more often; readings are for ranks without one.
                known = {point.key for point in recorded}
                self.recorded = self.recorded or bool(known)
                others = [point for point in history_ranks(history["readings"]) if point.key not in known]
                self.series.add(sorted([*recorded, *others], key=lambda point: point.taken_at))
                last = self.traffic[-1][0] if self.traffic else 0.0
                self.traffic += [each for each in traffic_of(history["readings"]) if each[0] > last]
                if len(self.traffic) > MAX_TRAFFIC:
                    self.traffic = _halved(self.traffic, lambda each: each[1].requests_running or 0)
                self._events |= {(event.id, event.at): event for event in events_of(history["events"])}
                # An event may come after a sample that is younger; what comes twice is known by its time.
                newest = min(self.series.last_at().values(), default=0.0)
                self._since = max(self._since, newest - OVERLAP_SECONDS)
                self.problem = None
            except SidecarError as exc:
                self.problem = str(exc)

    def add(self, points: Iterable[RankReading]) -> None:
        """Add readings from elsewhere, after all that could be read before them."""
        self.read()
        with self._lock:
            self.series.add(points)

    def run(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            self.read()

    def _history(self) -> Any:  # noqa: ANN401 - JSON
        query = {"since": f"{self._since:.6f}"}
        if self._wants_recorded:
            try:
                return self._client.get("/memory/history", {**query, "recorded": "true"})
            except SidecarRefused as exc:
                if exc.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
                self._wants_recorded = False
        return self._client.get("/memory/history", query)


# --- a sidecar's responses as the experiment's values, validated where they enter ---

# All raise SidecarUnreachable for a response that is not one of a sidecar of this version.

LARGEST = 5
# The settings of vLLM that affect memory, by the section of its configuration.
_SETTINGS: Final[Sequence[tuple[str, str]]] = (
    ("cache_config", "gpu_memory_utilization"),
    ("model_config", "max_model_len"),
    ("scheduler_config", "max_num_seqs"),
    ("scheduler_config", "max_num_batched_tokens"),
    ("model_config", "dtype"),
    ("model_config", "quantization"),
    ("model_config", "enforce_eager"),
    ("model_config", "enable_sleep_mode"),
    ("multimodal_config", "mm_processor_cache_gb"),
    ("multimodal_config", "limit_per_prompt"),
    ("cache_config", "block_size"),
    ("cache_config", "enable_prefix_caching"),
    ("parallel_config", "tensor_parallel_size"),
    ("parallel_config", "pipeline_parallel_size"),
    ("parallel_config", "data_parallel_size"),
)
# The other flags have the keys' names.
_OTHER_FLAGS: Final = {"limit_per_prompt": "--limit-mm-per-prompt"}


def history_ranks(readings: Iterable[Mapping[str, Any]]) -> Iterator[RankReading]:
    with understood("/memory/history"):
        for reading in readings:
            for row in reading["ranks"]:
                yield _sampled(row, reading["at"], row)


def recorded_ranks(ranks: Iterable[Mapping[str, Any]], after: Mapping[RankKey, float]) -> Iterator[RankReading]:
    with understood("/memory/history?recorded=true"):
        for rank in ranks:
            key = key_of(rank["dp_rank"], rank["rank"])
            for sample in rank["samples"]:
                if sample["at"] > after.get(key, 0.0):
                    yield _sampled(rank, sample["at"], sample)


def _sampled(rank: Mapping[str, Any], at: float, row: Mapping[str, Any]) -> RankReading:
    point = MemoryPoint.of_row(float(at), row)
    return RankReading(
        rank=rank["rank"],
        dp_rank=rank["dp_rank"],
        pid=rank["pid"],
        taken_at=point.at,
        device=Device(),
        total_bytes=point.total_bytes,
        free_bytes=point.free_bytes,
        used_bytes=point.used_bytes,
        used_ratio=point.used_ratio,
        components=point.components,
        torch=point.torch,
        host_memory=HostMemory(rss_bytes=point.host_rss_bytes),
        source="recorder",
    )


def traffic_of(readings: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, EngineLoad]]:
    with understood("/memory/history"):
        for row in readings:
            counted = EngineLoad(requests_running=row["requests_running"], requests_waiting=row["requests_waiting"])
            yield row["at"], counted


def cache_of(title: str, response: Mapping[str, Any], moment: Moment) -> CacheReading | None:
    with understood("/memory/encoder-cache"):
        present = [rank for rank in response["ranks"] if rank.get("present")]
        if not present:
            return None
        fullest = max(present, key=lambda rank: rank["device_bytes"] + rank["host_bytes"])
        reading = moment.rank(key_of(fullest.get("dp_rank"), fullest.get("rank")))
        known = reading.encoder_cache if reading is not None else None
        totals = EncoderCache(
            entries=fullest["entries_total"],
            device_bytes=fullest["device_bytes"],
            host_bytes=fullest["host_bytes"],
            capacity_embeds=fullest.get("capacity_embeds") or (known.capacity_embeds if known else None),
        )
        largest = tuple(
            EncoderEntry(
                mm_hash=plain(str(row.get("mm_hash")), 128),
                bytes=row.get("bytes"),
                embeds=shape[0] if isinstance(shape, list) and shape and isinstance(shape[0], int) else None,
                residency=row.get("residency"),
                age_seconds=row.get("age_seconds"),
            )
            for row, shape in ((row, row.get("shape")) for row in fullest["entries"][:LARGEST])
        )
        return CacheReading(title=title, totals=totals, largest=largest)


def settings_of(response: object) -> dict[str, str]:
    config = response.get("vllm_config") if isinstance(response, dict) else None
    if not isinstance(config, dict):
        return {}
    model = config.get("model_config")
    if isinstance(model, dict):
        config = {"multimodal_config": model.get("multimodal_config"), **config}
    found: dict[str, str] = {}
    for section, key in _SETTINGS:
        held = config.get(section)
        value = held.get(key) if isinstance(held, dict) else None
        if value not in (None, "", {}):
            found[_OTHER_FLAGS.get(key, f"--{key.replace('_', '-')}")] = plain(str(value), 200)
    return found
