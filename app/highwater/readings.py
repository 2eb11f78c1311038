"""The frozen values that all layers share: a worker's memory, the report, and what happened.

Bytes are integers, times are Unix seconds, ratios are 0 to 1; an unknown figure is ``None``, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

SCHEMA = 1
RESPONSE_SCHEMA: Final = {"json_schema_serialization_defaults_required": True}
"""For pydantic: a response has every field, and its schema says so, also of fields that a default fills in."""

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
# `nothing`: the remedy runs beside requests; `gate`: new requests were held, and running ones had ended.
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
    """The consequences of a state of the engine: no other module keeps a list of states."""

    level: Literal["good", "warn", "bad"]  # how bad it is, as people are shown it
    serves: bool = False  # a request that is sent now will be served
    is_up: bool = False  # the engine runs, as far as is known
    answers: bool = False  # it responded to the last requests in time
    # Its workers respond to calls soon. A busy one would run a remedy after what keeps it busy.
    takes_remedies: bool = False
    is_late: bool = False  # it goes on, and responds late
    is_held: bool = False  # somebody paused it or put it to sleep: no step is to be expected
    is_absent: bool = False  # no engine runs: it has not started yet, or it has ended
    is_hung: bool = False  # it runs, and no call is answered or no step ends
    is_lost: bool = False  # it will not go on by itself: to restart it costs nothing more
    # Its weights are not on the device, as intended: its memory says nothing of how it works.
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
    """The device that a worker computes on."""

    type: str | None = None  # `npu`, `cuda`, `xpu` or `cpu`; `None` where the worker does not name its device
    index: int | None = None  # as the worker's process numbers it; `None` on CPU
    physical_index: int | None = None  # as the machine numbers it
    name: str | None = None
    uuid: str | None = None  # the vendor's own identity of it


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
    """The encoder cache over all ranks."""

    __pydantic_config__ = RESPONSE_SCHEMA

    entries: int  # images and other items of the rank that holds most: every tensor-parallel rank holds a full copy
    device_bytes: int  # summed over the ranks, as `host_bytes`
    host_bytes: int = 0
    capacity_embeds: int | None = None  # the scheduler's budget, in embeddings; vLLM evicts lazily and stays near it
    oldest_age_seconds: float | None = None  # since the oldest entry of any rank was first seen by us: a lower bound
    # Entries moved to host memory so far, of the rank with the most, one that moved twice counted twice; likewise
    # `restores` and the time that they took.
    spills: int = 0
    restores: int = 0
    restore_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCache(EncoderCacheTotals):
    """One worker's encoder cache; storages shared by several entries count once."""

    host_entries: int = 0  # entries in host memory
    embeds: int | None = None  # the number of cached embeddings, also on the host; `None` from older worker extensions


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBudget:
    """The memory that vLLM took for itself at start (``gpu_memory_utilization`` times total)."""

    gpu_memory_utilization: float | None = None
    requested_bytes: int | None = None
    init_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPhase:
    """One phase of a worker's start, as the worker package's plugin saw it; bytes are as of its end."""

    name: str  # `before`, `init`, `weights`, `profile`, `kv_cache`, `graphs` or `warm_up`
    at: float  # when it began, in Unix seconds
    seconds: float
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = None
    error: str | None = None  # the exception that ended it, in one line; `None` where it succeeded


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory as the worker's process sees it."""

    rss_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    node_total_bytes: int | None = None
    node_available_bytes: int | None = None
    pinned_bytes: int | None = None  # locked in place for copies to and from the device
    cgroup_oom_kills: int | None = None  # the processes of its container that the kernel has killed for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that could not be read or attributed, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's memory at one moment; ``WorkerMemory`` is it as reported, ``RankReading`` as accounted for."""

    rank: int | None = None
    local_rank: int | None = None
    dp_rank: int | None = None
    tp_rank: int | None = None
    pp_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    pid_started: int | None = None  # when its process was started, in the kernel's ticks since boot
    taken_at: float  # by the clock of the rank's own machine, which may differ from ours
    device: Device
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    torch: TorchMemory = TorchMemory()
    releasable_bytes: int | None = None  # the device would gain so much by a `release` now
    # Likewise by a trim without a target; `None` also where the worker would refuse to trim.
    trimmable_bytes: int | None = None
    asleep_tags: tuple[str, ...] | None = None  # the parts of the engine that are asleep (`weights`, `kv_cache`)
    encoder_cache: EncoderCache | None = None
    start: tuple[StartPhase, ...] = ()  # the phases of its start; empty where nobody saw them
    host_memory: HostMemory = HostMemory()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory(RankMemory):
    """One worker's response to op ``memory``."""

    rank: int | None
    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    budget: WorkerBudget = WorkerBudget()


# --- one rank's memory, accounted for ---


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
    """vLLM's share of the device."""

    gpu_memory_utilization: float | None = None
    requested_bytes: int | None = None
    headroom_bytes: int | None = None  # the device's free bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading(RankMemory):
    """One rank's memory, accounted for."""

    __pydantic_config__ = RESPONSE_SCHEMA

    used_ratio: float | None = None
    components: Components = Components()
    budget: Budget = Budget()
    age_seconds: float = 0.0  # at the time of the report, whatever the rank's clock says
    source: ReadingSource = "rpc"


def are_recorded(ranks: Sequence[RankReading]) -> bool:
    """Return whether the recorders show every rank, so that no worker need be called to watch it."""
    return bool(ranks) and all(rank.source == "recorder" for rank in ranks)


# --- the engine and its ranks ---


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRank:
    """The progress of one worker in a start that failed."""

    rank: int | None
    dp_rank: int | None
    host: str | None
    pid: int | None
    status: str  # by its recorder: `dead` or `ended`
    # The phases of its start; the last one has the error, where an exception ended it.
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
    """A start of the engine that failed, as its workers' recorders show it."""

    at: float  # when the sidecar saw that it had failed
    recorder_instance: str  # the name of its recorders' files
    summary: str  # one sentence: which rank, in which phase, with which error
    ranks: tuple[StartedRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRank:
    """A worker that should be there and was not heard of at the last poll."""

    dp_rank: int
    pp_rank: int
    tp_rank: int
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    # `never seen`; `unheard`: it was there before, or its recorder has written nothing yet; or by its recorder:
    # `silent`, `stopped` (by a signal or a debugger), `dead` (its process has ended), `ended` (in order).
    status: str
    last_seen_at: float | None = None  # the time of its last reading; `used_bytes`: its device memory then
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of the ranks by their recorders."""

    # `progressing`: steps begin and end. `idle`: nothing to do. `busy`: a long step or call of ours. `stuck`: it will
    # not go on by itself. `unknown`: the records do not show it.
    verdict: ProgressVerdict
    since_seconds: float | None  # for how long at least that has been so
    ranks: tuple[str, ...]  # one sentence for each rank
    summary: str  # one sentence for an operator


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCounts:
    """The engine's work since its start, by its own counters; ``None`` where it does not count that."""

    requests: float | None = None  # requests that ended
    # Images and other multimodal items that were looked up in its processor cache; `new_images`: those of them that
    # were not in it.
    images: float | None = None
    new_images: float | None = None
    tokens: float | None = None  # prompt and generated tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's own ``/metrics``, summed over its engines."""

    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_cache_usage_ratio: float | None = None  # of the fullest engine
    sleeping: bool | None = None  # whether any engine has its weights offloaded or discarded
    # Tokens and requests counted so far; the same number twice means that nothing ran in between.
    work_done: float | None = None
    work: WorkCounts = WorkCounts()  # its parts, with images
    # Items looked up in the processor cache so far; `mm_cache_hits`: those that were in it.
    mm_cache_queries: int | None = None
    mm_cache_hits: int | None = None

    @property
    def is_idle(self) -> bool:
        """True if nothing is known to run or wait."""
        return self.requests_running == 0 and self.requests_waiting == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The engine as of the last poll; figures of its load as in ``EngineLoad``."""

    url: str
    state: EngineState  # the verdict (app/highwater/engine/verdict.py)
    since: float | None = None  # when that began, in Unix seconds; `None` before the first poll
    started_at: float | None = None  # when its first process was started, in Unix seconds
    restarts: int = 0  # how many lives of it before this one the sidecar has seen
    version: str | None = None  # vLLM's
    model: str | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_cache_usage_ratio: float | None = None
    work_done: float | None = None
    work: WorkCounts = WorkCounts()
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    hint: str | None = None  # why it is in that state, or what to do; `None` where there is nothing to say
    # Whether its workers' recorders show a start under way; `None` where they would not show it.
    is_loading: bool | None = None
    extension_versions: tuple[str, ...] = ()  # those of the worker package, by the workers' recorders

    @property
    def traits(self) -> StateTraits:
        """The consequences of the state."""
        return STATES[self.state]


# --- growth ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrowth:
    """The rate at which one rank's device fills."""

    rank: int | None
    dp_rank: int | None
    # The slope of its used bytes over the last minute; `None` where that is too short to know.
    bytes_per_second: float | None = None
    # When its device is full at that rate; `None` where that is noise, or not within a day.
    seconds_to_full: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRate:
    """The rate of a leak."""

    driver: GrowthDriver
    # Bytes, or descriptors or threads, for each unit of the driver: a request, an hour. `low` and `high` are the ends
    # of its 95 % interval.
    per_driver: float
    low: float
    high: float
    per_hour: float | None = None  # for each hour of the window, idle times included
    also: tuple[GrowthDriver, ...] = ()  # other drivers that explain the growth as well


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesGrowth:
    """The verdict on one series of memory, and its evidence."""

    series: str  # its name: `rank 0 other_tensors_bytes`, `API server anonymous_bytes`
    owner: str  # the rank or process whose memory it is; `measure`: the part of it
    measure: str
    place: Literal["device", "host"]
    unit: GrowthUnit
    # `flat`; `plateau`: it levelled off, or grows to a bound that it has by design; `step`: it rose once; `leak`;
    # `not_known`.
    verdict: GrowthKind
    text: str  # one sentence: what was seen, why, and what would settle it
    value: float | None = None  # at the last idle floor, in `unit`; `grown`: since the first floor that counts
    grown: float | None = None
    rate: GrowthRate | None = None  # `None` where it does not leak
    bound: float | None = None  # the limit of a plateau by design; `bound_by`: whose limit that is
    bound_by: str | None = None
    # The size of a step; `step_at`: the Unix time of the first floor after it; `step_by`: the event nearest to it.
    step: float | None = None
    step_at: float | None = None
    step_by: str | None = None
    # When a leak has used up what is left, in Unix seconds; `limit_by`: what it uses up.
    exhausted_at: float | None = None
    limit_by: str | None = None
    floors: int = 0  # the number of idle floors; `window_seconds`: from the first to the last
    window_seconds: float = 0.0
    since: float | None = None  # since when the verdict is this one, in Unix seconds
    is_over: bool = False  # whether the process has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The change of used bytes, summed over the ranks that were there at both ends."""

    # Since the first reading after the engine became ready, taken at `baseline_taken_at`.
    since_ready_bytes: int | None = None
    bytes_per_second: float | None = None  # the slope over the last minute
    host_since_ready_bytes: int | None = None  # the growth of the workers' resident set size (RSS) since then
    baseline_taken_at: float | None = None
    # Why growth since then is unknown; `None` where it is known, or nothing has been read yet.
    reason: str | None = None
    # When the first device is full at the rate of the last minute; `None` where none fills.
    seconds_to_full: float | None = None
    ranks: tuple[RankGrowth, ...] = ()
    series: tuple[SeriesGrowth, ...] = ()  # the verdict on each series of memory, the leaks first


# --- the policy ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFreed:
    """The bytes that a remedy freed on one rank, of what it can free; never negative."""

    rank: int | None
    dp_rank: int | None
    freed_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyState:
    """A remedy of a rule: its last run, and when it may run again."""

    name: str
    unavailable: str | None = None  # why it could not run here now; `None` where nothing is known against it
    last_run_at: float | None = None  # when it ended last; `None` if it never ran for this rule in this engine's life
    last_outcome: ActionOutcome | None = None
    last_reason: str | None = None  # why it did not run, or what the engine reported
    # What it freed of what it can free, over all ranks; `last_freed_ranks`: by rank.
    last_freed_bytes: int | None = None
    last_freed_ranks: tuple[RankFreed, ...] = ()
    # When it may run again, in Unix seconds; `None` if nothing but its figures holds it back.
    rest_until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPressure:
    """One rank as measured by a rule, in bytes of its device; ``None``: unknown, or the rule does not watch bytes."""

    rank: int | None
    dp_rank: int | None
    free_bytes: int | None = None
    high_free_bytes: int | None = None  # with less than that free the rule acts
    low_free_bytes: int | None = None  # with that much free the rule is satisfied
    # What is missing to `low_free_bytes` once less than `high_free_bytes` is free; else 0.
    short_bytes: int | None = None
    # What `release` could give back; `can_trim_bytes`: what `trim_encoder_cache` could.
    can_release_bytes: int | None = None
    can_trim_bytes: int | None = None
    # When it comes under `high_free_bytes` at the rate of the last minute; `None` where that is not within a day, or
    # where it is under it.
    seconds_to_high_water: float | None = None
    note: str | None = None  # why this rank is left out, or what is odd about it


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleStatus:
    """One rule's present state."""

    name: str
    signal: str  # what it watches; `value`: the signal on the rank that is worst off
    # `calm`; `short` or `urgent`: over high water; `acting`: a remedy runs; `resting`: after a relief that did not
    # reach low water; `held`: it does not act, see `reason`.
    phase: RulePhase
    value: float | None = None
    high_water: float | None = None  # where the rule acts, in the signal's unit; of that rank, where each has its own
    low_water: float | None = None  # where it is satisfied
    reason: str | None = None  # one sentence on why it is in this phase; `None` where it is calm
    since: float | None = None  # the start of this phase, in Unix seconds; `rest_until`: the end of its cooldown
    rest_until: float | None = None
    ranks: tuple[RankPressure, ...] = ()  # each rank's own figures, for rules about device memory
    remedies: tuple[RemedyState, ...] = ()
    # Whether it is held although the engine is at work, so that an operator should look after it. On CPU the default
    # rule has nothing to watch: it is not dormant.
    is_dormant: bool = False

    def is_short(self, level: PolicyLevel) -> bool:
        """Return whether memory is short by this rule; one that is resting leaves that to the policy's ``level``."""
        return (level if self.phase == "resting" else self.phase) in {"short", "urgent", "acting"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """The policy's present state."""

    mode: PolicyMode  # `act`, or `observe`: decide and record, and do nothing
    level: PolicyLevel  # that of the rule that is worst off
    summary: str  # one sentence
    rules: tuple[RuleStatus, ...] = ()
    actions_last_hour: int = 0  # remedies that it started within the last hour, over all engine lives


# --- the report ---


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSummary:
    """Host memory in a few figures; ``GET /memory/host`` has all of it. ``None``: could not be read."""

    processes: int = 0  # the number of the engine's processes that are seen
    used_bytes: int | None = None  # charged to the engine's container, page cache included
    kept_bytes: int | None = None  # the part of it that the kernel cannot drop, of the group whose limit is met first
    limit_bytes: int | None = None  # that limit; `None`: unlimited
    # When it is reached at the rate of the last minutes; `None`: not within a week.
    seconds_to_limit: float | None = None
    largest: str | None = None  # the largest part that the kernel cannot drop
    largest_bytes: int | None = None
    shm_used_bytes: int | None = None
    shm_size_bytes: int | None = None
    warnings: tuple[str, ...] = ()  # one sentence each


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report that ``GET /memory`` shows."""

    schema: int = SCHEMA
    # When the oldest of the workers' readings was taken, by this machine's clock; `None` until the first.
    taken_at: float | None = None
    age_seconds: float | None = None  # since then
    stale: bool = True  # whether that is too long ago to act on
    engine: EngineStatus
    ranks_expected: int | None = None
    ranks_reported: int = 0
    ranks: tuple[RankReading, ...] = ()
    ranks_missing: tuple[MissingRank, ...] = ()
    progress: Progress | None = None  # `None` without recorders
    start_failure: StartFailure | None = None  # the last start that failed; `None` once the engine is up
    encoder_cache: EncoderCacheTotals | None = None
    growth: Growth = Growth()
    policy: PolicyStatus | None = None
    host: HostSummary | None = None  # `None` where no process of the engine is seen


# --- actions and events ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The bound of a trim, on every rank; at most one of them. None: all that no running request still needs."""

    free_bytes: int | None = None  # device bytes to free
    keep_bytes: int | None = None  # device bytes of encoder outputs to keep at most
    idle_seconds: float | None = None  # free what was not used for so long


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
    """The outcome of one remedy."""

    remedy: str
    outcome: Outcome
    reason: str | None = None  # why it was not done, or what the engine reported
    seconds: float = 0.0  # from start to the reading after it
    # Used bytes before less after, summed over ranks; negative when traffic took more meanwhile.
    freed_bytes: int | None = None
    freed_components: Components = Components()
    ranks: tuple[RankDelta, ...] = ()
    # The part of it that the remedy can free (app/highwater/accounting/freed.py), as in `/policy` and in the metric;
    # `None` where that was not measured, as in `credited_components`.
    credited_bytes: int | None = None
    credited_components: Components = Components()
    frees: str = ""  # what this remedy can free, in words; `does_not_free`: what it cannot
    does_not_free: str = ""
    quiesced_by: QuiescedBy | None = None  # what kept requests away from it; `None` where it did not come to that
    held_seconds: float | None = None  # how long new requests waited for it at the gate
    detail: tuple[Mapping[str, Any], ...] = ()  # the workers' responses, rank by rank


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a control path."""

    address: str  # the peer's, as the socket shows it: a reverse proxy's own, where the call came through one
    by: Credential  # why the call was allowed


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
