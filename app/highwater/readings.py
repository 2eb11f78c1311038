"""The frozen values that all layers share: a worker's memory, the report, and what happened.

Bytes are integers, times are Unix seconds, ratios are 0 to 1; an unknown figure is ``None``, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

SCHEMA = 1

# When each one holds: app/highwater/engine/verdict.py. What follows from it: STATES, below.
EngineState: TypeAlias = Literal[
    "starting", "ready", "paused", "sleeping", "busy", "slow", "stuck", "not_answering", "gone"
]
# The worst state of the policy's rules; `unknown`: no fresh reading, so nothing is done.
PolicyLevel: TypeAlias = Literal["calm", "short", "urgent", "held", "unknown"]
RulePhase: TypeAlias = Literal["calm", "short", "urgent", "acting", "resting", "held"]
PolicyMode: TypeAlias = Literal["act", "observe"]
EventKind: TypeAlias = Literal[
    "reset", "refusal", "mark", "state", "policy", "baseline", "recovery", "incident", "snapshot", "growth"
]
Trigger: TypeAlias = Literal["policy", "reclaim", "drop-in"]
Outcome: TypeAlias = Literal["done", "refused", "failed", "observed"]
# The outcome of a remedy that a rule started; `ineffective`: done, and it freed less than it had to.
ActionOutcome: TypeAlias = Literal["done", "ineffective", "refused", "failed", "observed"]
# The reason why a control call was allowed: the admin token, or a loopback address where trust_loopback is set.
Credential: TypeAlias = Literal["token", "loopback"]
Mode: TypeAlias = Literal["safe", "now"]
# `nothing`: the remedy runs beside requests; `gate`: new requests were held, and those under way had ended.
QuiescedBy: TypeAlias = Literal["nothing", "gate"]
# A rank's reading comes from its response to our call, or from its recorder.
ReadingSource: TypeAlias = Literal["rpc", "recorder"]
ProgressVerdict: TypeAlias = Literal["progressing", "idle", "busy", "stuck", "unknown"]
# The verdict on a series of memory between requests: app/highwater/growth/judging.py.
GrowthKind: TypeAlias = Literal["flat", "plateau", "step", "leak", "not_known"]
# A leak is proportional to one of these.
GrowthDriver: TypeAlias = Literal["request", "image", "new_image", "1k_tokens", "hour"]
GrowthUnit: TypeAlias = Literal["bytes", "count"]

# --- what follows from the engine's state ---


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTraits:
    """The consequences of a state of the engine: no other module keeps a list of states.

    Attributes:
        level: How bad it is, as people are shown it.
        serves: A request that is sent now will be served.
        is_up: The engine runs, as far as is known.
        answers: It responded to the last requests in time.
        takes_remedies: Its workers respond to calls soon. A busy one would run a remedy after what keeps it busy.
        is_late: It goes on, and responds late.
        is_held: Somebody paused it or put it to sleep: no step is to be expected.
        is_absent: No engine runs: it has not started yet, or it has ended.
        is_hung: It runs, and no call is answered or no step ends.
        is_lost: It will not go on by itself: to restart it costs nothing more.
        lacks_weights: Its weights are not on the device, as intended: its memory says nothing of how it works.
    """

    level: Literal["good", "warn", "bad"]
    serves: bool = False
    is_up: bool = False
    answers: bool = False
    takes_remedies: bool = False
    is_late: bool = False
    is_held: bool = False
    is_absent: bool = False
    is_hung: bool = False
    is_lost: bool = False
    lacks_weights: bool = False


STATES: Mapping[EngineState, StateTraits] = MappingProxyType(
    {
        "starting": StateTraits(level="warn", is_absent=True, lacks_weights=True),
        "ready": StateTraits(level="good", serves=True, is_up=True, answers=True, takes_remedies=True),
        "paused": StateTraits(level="warn", is_up=True, answers=True, takes_remedies=True, is_held=True),
        "sleeping": StateTraits(level="warn", is_up=True, answers=True, is_held=True, lacks_weights=True),
        "busy": StateTraits(level="warn", serves=True, is_up=True, is_late=True),
        "slow": StateTraits(level="warn", serves=True, is_up=True, is_late=True, takes_remedies=True),
        "stuck": StateTraits(level="bad", is_hung=True, is_lost=True),
        "not_answering": StateTraits(level="bad", is_hung=True),
        "gone": StateTraits(level="bad", is_absent=True, is_lost=True),
    }
)


# --- one worker's memory (op `memory`; worker_ext/README.md is the contract) ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device that a worker computes on.

    Attributes:
        type: ``npu``, ``cuda``, ``xpu`` or ``cpu``; ``None`` where the worker does not name its device.
        index: As the worker's process numbers it; ``None`` on CPU.
        physical_index: As the machine numbers it.
        uuid: The vendor's own identity of it.
    """

    type: str | None = None
    index: int | None = None
    physical_index: int | None = None
    name: str | None = None
    uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMemory:
    """The caching allocator's own statistics (``torch.<device>.memory_stats``); all ``None`` on CPU."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    inactive_split_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCacheTotals:
    """The encoder cache over all ranks.

    Attributes:
        entries: Images and other items of the rank that holds most: every tensor-parallel rank holds a full copy.
        device_bytes: Summed over the ranks, as ``host_bytes``.
        capacity_embeds: The scheduler's budget, in embeddings; vLLM evicts lazily and stays near it.
        oldest_age_seconds: Since the oldest entry of any rank was first seen by us: a lower bound.
        spills: Entries moved to host memory so far, of the rank with the most, one that moved twice counted twice;
            likewise ``restores`` and the time that they took.
    """

    entries: int
    device_bytes: int
    host_bytes: int = 0
    capacity_embeds: int | None = None
    oldest_age_seconds: float | None = None
    spills: int = 0
    restores: int = 0
    restore_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCache(EncoderCacheTotals):
    """Those of one worker; storages shared by several entries count once.

    Attributes:
        host_entries: Entries in host memory.
        embeds: The number of cached embeddings, also on the host; ``None`` from older worker extensions.
    """

    host_entries: int = 0
    embeds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBudget:
    """The memory that vLLM took for itself at start (``gpu_memory_utilization`` times total)."""

    gpu_memory_utilization: float | None = None
    requested_bytes: int | None = None
    init_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPhase:
    """One phase of a worker's start, as the worker package's plugin saw it; bytes are as of its end.

    Attributes:
        name: ``before``, ``init``, ``weights``, ``profile``, ``kv_cache``, ``graphs`` or ``warm_up``.
        at: When it began, in Unix seconds.
        error: The exception that ended it, in one line; ``None`` where it succeeded.
    """

    name: str
    at: float
    seconds: float
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory as the worker's process sees it.

    Attributes:
        pinned_bytes: Locked in place for copies to and from the device.
        cgroup_oom_kills: The processes of its container that the kernel has killed for memory.
    """

    rss_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    node_total_bytes: int | None = None
    node_available_bytes: int | None = None
    pinned_bytes: int | None = None
    cgroup_oom_kills: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that could not be read or attributed, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's memory at one moment; ``WorkerMemory`` is it as reported, ``RankReading`` as accounted for.

    Attributes:
        pid_started: When its process was started, in the kernel's ticks since boot.
        taken_at: By the clock of the rank's own machine, which may differ from ours.
        releasable_bytes: The device would gain so much by a ``release`` now.
        trimmable_bytes: Likewise by a trim without a target; ``None`` also where the worker would refuse to trim.
        asleep_tags: The parts of the engine that are asleep (``weights``, ``kv_cache``).
        start: The phases of its start; empty where nobody saw them.
    """

    rank: int | None = None
    local_rank: int | None = None
    dp_rank: int | None = None
    tp_rank: int | None = None
    pp_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    pid_started: int | None = None
    taken_at: float
    device: Device
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    torch: TorchMemory = TorchMemory()
    releasable_bytes: int | None = None
    trimmable_bytes: int | None = None
    asleep_tags: tuple[str, ...] | None = None
    encoder_cache: EncoderCache | None = None
    start: tuple[StartPhase, ...] = ()
    host_memory: HostMemory = HostMemory()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory(RankMemory):
    """One worker's response to op ``memory``."""

    rank: int | None
    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    budget: WorkerBudget = WorkerBudget()


# --- the report of the sidecar ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Exclusive parts of ``used_bytes``; the known ones sum to it exactly. Their meanings: accounting/components.py."""

    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    encoder_cache_bytes: int | None = None
    other_tensors_bytes: int | None = None
    torch_cached_bytes: int | None = None
    non_torch_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """vLLM's share of the device.

    Attributes:
        headroom_bytes: The device's free bytes.
    """

    gpu_memory_utilization: float | None = None
    requested_bytes: int | None = None
    headroom_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading(RankMemory):
    """One rank's memory, accounted for.

    Attributes:
        age_seconds: At the time of the report, whatever the rank's clock says.
    """

    used_ratio: float | None = None
    components: Components = Components()
    budget: Budget = Budget()
    age_seconds: float = 0.0
    source: ReadingSource = "rpc"


def are_recorded(ranks: Sequence[RankReading]) -> bool:
    """Return whether the recorders show every rank, so that no worker need be called to watch it."""
    return bool(ranks) and all(rank.source == "recorder" for rank in ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRank:
    """The progress of one worker in a start that failed.

    Attributes:
        status: By its recorder: ``dead`` or ``ended``.
        phases: The phases of its start; the last one has the error, where an exception ended it.
    """

    rank: int | None
    dp_rank: int | None
    host: str | None
    pid: int | None
    status: str
    phases: tuple[StartPhase, ...] = ()

    @property
    def is_over(self) -> bool:
        """True if the last phase has succeeded."""
        return any(phase.name == "warm_up" and phase.error is None for phase in self.phases)

    @property
    def error(self) -> str | None:
        """The exception that ended its start; ``None`` without one."""
        return self.phases[-1].error if self.phases else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """A start of the engine that failed, as its workers' recorders show it.

    Attributes:
        at: When the sidecar saw that it had failed.
        recorder_instance: The name of its recorders' files.
        summary: One sentence: which rank, in which phase, with which error.
    """

    at: float
    recorder_instance: str
    summary: str
    ranks: tuple[StartedRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRank:
    """A worker that should be there and was not heard of at the last poll.

    Attributes:
        status: ``never seen``; ``unheard``: it was there before, or its recorder has written nothing yet; or
            by its recorder: ``silent``, ``stopped`` (by a signal or a debugger), ``dead`` (its process has
            ended), ``ended`` (in order).
        last_seen_at: The time of its last reading; ``used_bytes``: its device memory then.
    """

    dp_rank: int
    pp_rank: int
    tp_rank: int
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    status: str
    last_seen_at: float | None = None
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of the ranks by their recorders.

    Attributes:
        verdict: ``progressing``: steps begin and end. ``idle``: nothing to do. ``busy``: a long step or call of ours.
            ``stuck``: it will not go on by itself. ``unknown``: the records do not show it.
        since_seconds: For how long at least that has been so.
        ranks: One sentence for each rank.
        summary: One sentence for an operator.
    """

    verdict: ProgressVerdict
    since_seconds: float | None
    ranks: tuple[str, ...]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCounts:
    """The engine's work since its start, by its own counters; ``None`` where it does not count that.

    Attributes:
        requests: Requests that ended.
        images: Images and other multimodal items that were looked up in its processor cache; ``new_images``: those of
            them that were not in it.
        tokens: Prompt and generated tokens.
    """

    requests: float | None = None
    images: float | None = None
    new_images: float | None = None
    tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's own ``/metrics``, summed over its engines.

    Attributes:
        kv_cache_usage_ratio: Of the fullest engine.
        sleeping: Whether any engine has its weights offloaded or discarded.
        work_done: Tokens and requests counted so far; the same number twice means that nothing ran in between.
        work: Its parts, with images.
        mm_cache_queries: Items looked up in the processor cache so far; ``mm_cache_hits``: those that were in it.
    """

    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_cache_usage_ratio: float | None = None
    sleeping: bool | None = None
    work_done: float | None = None
    work: WorkCounts = WorkCounts()
    mm_cache_queries: int | None = None
    mm_cache_hits: int | None = None

    @property
    def is_idle(self) -> bool:
        """True if nothing is known to run or wait."""
        return self.requests_running == 0 and self.requests_waiting == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The engine as of the last poll; figures of its load as in ``EngineLoad``.

    Attributes:
        state: The verdict (app/highwater/engine/verdict.py).
        since: When that began, in Unix seconds; ``None`` before the first poll.
        started_at: When its first process was started, in Unix seconds.
        restarts: How many lives of it before this one the sidecar has seen.
        version: vLLM's.
        hint: Why it is in that state, or what to do; ``None`` where there is nothing to say.
        is_loading: Whether its workers' recorders show a start under way; ``None`` where they would not show it.
        extension_versions: Those of the worker package, by the workers' recorders.
    """

    url: str
    state: EngineState
    since: float | None = None
    started_at: float | None = None
    restarts: int = 0
    version: str | None = None
    model: str | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_cache_usage_ratio: float | None = None
    work_done: float | None = None
    work: WorkCounts = WorkCounts()
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    hint: str | None = None
    is_loading: bool | None = None
    extension_versions: tuple[str, ...] = ()

    @property
    def traits(self) -> StateTraits:
        """The consequences of the state."""
        return STATES[self.state]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrowth:
    """The rate at which one rank's device fills.

    Attributes:
        bytes_per_second: The slope of its used bytes over the last minute; ``None`` where that is too short to know.
        seconds_to_full: When its device is full at that rate; ``None`` where that is noise, or not within a day.
    """

    rank: int | None
    dp_rank: int | None
    bytes_per_second: float | None = None
    seconds_to_full: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRate:
    """The rate of a leak.

    Attributes:
        per_driver: Bytes, or descriptors or threads, for each unit of the driver: a request, an hour. ``low`` and
            ``high`` are the ends of its 95 % interval.
        per_hour: For each hour of the window, idle times included.
        also: Other drivers that explain the growth as well.
    """

    driver: GrowthDriver
    per_driver: float
    low: float
    high: float
    per_hour: float | None = None
    also: tuple[GrowthDriver, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesGrowth:
    """The verdict on one series of memory, and its evidence.

    Attributes:
        series: Its name: ``rank 0 other_tensors_bytes``, ``API server anonymous_bytes``.
        owner: The rank or process whose memory it is; ``measure``: the part of it.
        verdict: ``flat``; ``plateau``: it levelled off, or grows to a bound that it has by design; ``step``: it rose
            once; ``leak``; ``not_known``.
        text: One sentence: what was seen, why, and what would settle it.
        value: At the last idle floor, in ``unit``; ``grown``: since the first floor that counts.
        rate: ``None`` where it does not leak.
        bound: The limit of a plateau by design; ``bound_by``: whose limit that is.
        step: The size of a step; ``step_at``: the Unix time of the first floor after it; ``step_by``: the event
            nearest to it.
        exhausted_at: When a leak has used up what is left, in Unix seconds; ``limit_by``: what it uses up.
        floors: The number of idle floors; ``window_seconds``: from the first to the last.
        since: Since when the verdict is this one, in Unix seconds.
        is_over: Whether the process has ended.
    """

    series: str
    owner: str
    measure: str
    place: Literal["device", "host"]
    unit: GrowthUnit
    verdict: GrowthKind
    text: str
    value: float | None = None
    grown: float | None = None
    rate: GrowthRate | None = None
    bound: float | None = None
    bound_by: str | None = None
    step: float | None = None
    step_at: float | None = None
    step_by: str | None = None
    exhausted_at: float | None = None
    limit_by: str | None = None
    floors: int = 0
    window_seconds: float = 0.0
    since: float | None = None
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The change of used bytes, summed over the ranks that were there at both ends.

    Attributes:
        since_ready_bytes: Since the first reading after the engine became ready, taken at ``baseline_taken_at``.
        bytes_per_second: The slope over the last minute.
        host_since_ready_bytes: The growth of the workers' resident set size (RSS) since then.
        reason: Why growth since then is unknown; ``None`` where it is known, or nothing has been read yet.
        seconds_to_full: When the first device is full at the rate of the last minute; ``None`` where none fills.
        series: The verdict on each series of memory, the leaks first.
    """

    since_ready_bytes: int | None = None
    bytes_per_second: float | None = None
    host_since_ready_bytes: int | None = None
    baseline_taken_at: float | None = None
    reason: str | None = None
    seconds_to_full: float | None = None
    ranks: tuple[RankGrowth, ...] = ()
    series: tuple[SeriesGrowth, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFreed:
    """The bytes that a remedy freed on one rank, of what it can free; never negative."""

    rank: int | None
    dp_rank: int | None
    freed_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyState:
    """A remedy of a rule: its last run, and when it may run again.

    Attributes:
        unavailable: Why it could not run here now; ``None`` where nothing is known against it.
        last_run_at: When it ended last; ``None`` if it never ran for this rule in this engine's life.
        last_reason: Why it did not run, or what the engine reported.
        last_freed_bytes: What it freed of what it can free, over all ranks; ``last_freed_ranks``: by rank.
        rest_until: When it may run again, in Unix seconds; ``None`` if nothing but its figures holds it back.
    """

    name: str
    unavailable: str | None = None
    last_run_at: float | None = None
    last_outcome: ActionOutcome | None = None
    last_reason: str | None = None
    last_freed_bytes: int | None = None
    last_freed_ranks: tuple[RankFreed, ...] = ()
    rest_until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPressure:
    """One rank as measured by a rule, in bytes of its device; ``None``: unknown, or the rule does not watch bytes.

    Attributes:
        high_free_bytes: With less than that free the rule acts.
        low_free_bytes: With that much free the rule is satisfied.
        short_bytes: What is missing to ``low_free_bytes`` once less than ``high_free_bytes`` is free; else 0.
        can_release_bytes: What ``release`` could give back; ``can_trim_bytes``: what ``trim_encoder_cache`` could.
        seconds_to_high_water: When it comes under ``high_free_bytes`` at the rate of the last minute; ``None`` where
            that is not within a day, or where it is under it.
        note: Why this rank is left out, or what is odd about it.
    """

    rank: int | None
    dp_rank: int | None
    free_bytes: int | None = None
    high_free_bytes: int | None = None
    low_free_bytes: int | None = None
    short_bytes: int | None = None
    can_release_bytes: int | None = None
    can_trim_bytes: int | None = None
    seconds_to_high_water: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleStatus:
    """One rule's present state.

    Attributes:
        signal: What it watches; ``value``: the signal on the rank that is worst off.
        phase: ``calm``; ``short`` or ``urgent``: over high water; ``acting``: a remedy runs; ``resting``: after a
            relief that did not reach low water; ``held``: it does not act, see ``reason``.
        high_water: Where the rule acts, in the signal's unit; of that rank, where each has its own.
        low_water: Where it is satisfied.
        reason: One sentence on why it is in this phase; ``None`` where it is calm.
        since: The start of this phase, in Unix seconds; ``rest_until``: the end of the rest.
        ranks: Each rank's own figures, for rules about device memory.
        is_dormant: Whether it is held although the engine is at work, so that an operator should look after it. On CPU
            the default rule has nothing to watch: it is not dormant.
    """

    name: str
    signal: str
    phase: RulePhase
    value: float | None = None
    high_water: float | None = None
    low_water: float | None = None
    reason: str | None = None
    since: float | None = None
    rest_until: float | None = None
    ranks: tuple[RankPressure, ...] = ()
    remedies: tuple[RemedyState, ...] = ()
    is_dormant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """The policy's present state.

    Attributes:
        mode: ``act``, or ``observe``: decide and record, and do nothing.
        level: That of the rule that is worst off.
        summary: One sentence.
        actions_last_hour: Remedies that it started within the last hour, over all engine lives.
    """

    mode: PolicyMode
    level: PolicyLevel
    summary: str
    rules: tuple[RuleStatus, ...] = ()
    actions_last_hour: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSummary:
    """Host memory in a few figures; ``GET /memory/host`` has all of it. ``None``: could not be read.

    Attributes:
        processes: The number of the engine's processes that are seen.
        used_bytes: Charged to the engine's container, page cache included.
        kept_bytes: The part of it that the kernel cannot drop, of the group whose limit is met first.
        limit_bytes: That limit; ``None``: unlimited.
        seconds_to_limit: When it is reached at the rate of the last minutes; ``None``: not within a week.
        largest: The largest part that the kernel cannot drop.
        warnings: One sentence each.
    """

    processes: int = 0
    used_bytes: int | None = None
    kept_bytes: int | None = None
    limit_bytes: int | None = None
    seconds_to_limit: float | None = None
    largest: str | None = None
    largest_bytes: int | None = None
    shm_used_bytes: int | None = None
    shm_size_bytes: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report that ``GET /memory`` shows.

    Attributes:
        taken_at: When the oldest of the workers' readings was taken, by this machine's clock; ``None`` until the first.
        age_seconds: Since then.
        stale: Whether that is too long ago to act on.
        progress: ``None`` without recorders.
        start_failure: The last start that failed; ``None`` once the engine is up.
        host: ``None`` where no process of the engine is seen.
    """

    schema: int = SCHEMA
    taken_at: float | None = None
    age_seconds: float | None = None
    stale: bool = True
    engine: EngineStatus
    ranks_expected: int | None = None
    ranks_reported: int = 0
    ranks: tuple[RankReading, ...] = ()
    ranks_missing: tuple[MissingRank, ...] = ()
    progress: Progress | None = None
    start_failure: StartFailure | None = None
    encoder_cache: EncoderCacheTotals | None = None
    growth: Growth = Growth()
    policy: PolicyStatus | None = None
    host: HostSummary | None = None


# --- actions and events ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The bound of a trim, on every rank; at most one of them. None: all that no running request still needs.

    Attributes:
        free_bytes: Device bytes to free.
        keep_bytes: Device bytes of encoder outputs to keep at most.
        idle_seconds: Free what was not used for so long.
    """

    free_bytes: int | None = None
    keep_bytes: int | None = None
    idle_seconds: float | None = None


UNNEEDED = Target()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDelta:
    """The difference between two readings of one rank; its maker defines the sign.

    ``card`` is the same for ranks on one device: used bytes are the whole device's on each of them.
    """

    rank: int | None
    dp_rank: int | None
    card: str | None = None
    used_bytes: int | None
    components: Components


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyResult:
    """The outcome of one remedy.

    Attributes:
        reason: Why it was not done, or what the engine reported.
        seconds: From start to the reading after it.
        freed_bytes: Used bytes before less after, summed over ranks; negative when traffic took more meanwhile.
        credited_bytes: The part of it that the remedy can free (app/highwater/accounting/freed.py), as in ``/policy``
            and in the metric; ``None`` where that was not measured, as in ``credited_components``.
        frees: What this remedy can free, in words; ``does_not_free``: what it cannot.
        quiesced_by: What kept requests away from it; ``None`` where it did not come to that.
        held_seconds: How long new requests waited for it at the gate.
        detail: The workers' responses, rank by rank.
    """

    remedy: str
    outcome: Outcome
    reason: str | None = None
    seconds: float = 0.0
    freed_bytes: int | None = None
    freed_components: Components = Components()
    ranks: tuple[RankDelta, ...] = ()
    credited_bytes: int | None = None
    credited_components: Components = Components()
    frees: str = ""
    does_not_free: str = ""
    quiesced_by: QuiescedBy | None = None
    held_seconds: float | None = None
    detail: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a control path.

    Attributes:
        address: The peer's, as the socket shows it: a reverse proxy's own, where the call came through one.
        by: Why the call was allowed.
    """

    address: str
    by: Credential


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event; ``caller``: whose control call it was, ``None`` where the sidecar acted, or saw it, by itself."""

    id: int
    at: float
    kind: EventKind
    summary: str
    trigger: Trigger | None = None
    rule: str | None = None
    result: RemedyResult | None = None
    caller: Caller | None = None
