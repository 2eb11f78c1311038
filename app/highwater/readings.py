"""The frozen values that every layer speaks: what a worker said, what a report says, what happened.

Bytes are integers, times are Unix seconds, ratios are 0 to 1; absent knowledge is ``None``, never 0. Nothing here
reads, decides or formats anything.
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
# How the memory stands by the policy's rules, the worst of them; `unknown`: no fresh reading, so nothing is done.
PolicyLevel: TypeAlias = Literal["calm", "short", "urgent", "held", "unknown"]
RulePhase: TypeAlias = Literal["calm", "short", "urgent", "acting", "resting", "held"]
PolicyMode: TypeAlias = Literal["act", "observe"]
EventKind: TypeAlias = Literal[
    "reset", "refusal", "mark", "state", "policy", "baseline", "recovery", "incident", "snapshot", "growth"
]
Trigger: TypeAlias = Literal["policy", "reclaim", "drop-in"]
Outcome: TypeAlias = Literal["done", "refused", "failed", "observed"]
# What became of a remedy that a rule had run; `ineffective`: done, and it gave less than it had to.
ActionOutcome: TypeAlias = Literal["done", "ineffective", "refused", "failed", "observed"]
# What let a control call in: the admin token, or a loopback address where trust_loopback is set.
Credential: TypeAlias = Literal["token", "loopback"]
Mode: TypeAlias = Literal["safe", "now"]
# What kept requests away from a remedy: nothing, which it does not need; or the gate, until those under way had ended.
QuiescedBy: TypeAlias = Literal["nothing", "gate"]
# Where a rank's reading is from: its answer to our call, or its recorder.
ReadingSource: TypeAlias = Literal["rpc", "recorder"]
ProgressVerdict: TypeAlias = Literal["progressing", "idle", "busy", "stuck", "unknown"]
# What became of a series of memory between requests; app/highwater/growth/judging.py decides it.
GrowthKind: TypeAlias = Literal["flat", "plateau", "step", "leak", "not_known"]
# What a growth goes along with.
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
        answers: It answered the last questions in time.
        takes_remedies: Its workers answer calls soon. A busy one would run a remedy after what keeps it busy.
        is_late: It goes on, and answers late.
        is_held: Somebody paused it or put it to sleep: no step is to be expected.
        is_absent: No engine is there: it has not come yet, or it has ended.
        is_hung: It is there, and no call is answered or no step ends.
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


# --- what one worker says over the wire (op `memory`; worker_ext/README.md is the contract) ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device that a worker computes on.

    Attributes:
        type: ``npu``, ``cuda``, ``xpu`` or ``cpu``; ``None`` where the worker does not name its device.
        index: The device's index as the worker's process numbers it; ``None`` on CPU.
        physical_index: As the machine numbers it; ``None`` where that is not known.
        name: The vendor's product name.
        uuid: The vendor's own identity of it; ``None`` where it is not known.
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
class EncoderCache:
    """Totals of one worker's multimodal encoder cache; storages shared by several entries count once.

    Attributes:
        entries: How many images (or other items) are cached.
        device_bytes: What they hold on the device.
        host_bytes: What was spilled to host memory.
        host_entries: How many entries lie there.
        capacity_embeds: The scheduler's budget, in embeddings; vLLM evicts lazily and stays near it.
        embeds: How many are cached, wherever they lie; ``None`` where a worker's extension does not tell yet.
        oldest_age_seconds: Since the oldest entry was first seen by us: a lower bound.
        spills: Entries moved to host memory so far, one that moved twice counted twice; likewise ``restores``.
        restore_seconds: What bringing them back has taken in all.
    """

    entries: int
    device_bytes: int
    host_bytes: int = 0
    host_entries: int = 0
    capacity_embeds: int | None = None
    embeds: int | None = None
    oldest_age_seconds: float | None = None
    spills: int = 0
    restores: int = 0
    restore_seconds: float = 0.0


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
        seconds: How long it took.
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

    ``pinned_bytes`` of it are locked in place for copies to and from the device; ``None`` where that is not known.
    ``cgroup_oom_kills`` counts the processes of its container that the kernel has killed for memory.
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
    """Something that could not be known or placed, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """One worker's answer to op ``memory``, as it came."""

    rank: int | None
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
    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    encoder_cache: EncoderCache | None = None
    budget: WorkerBudget = WorkerBudget()
    start: tuple[StartPhase, ...] = ()
    host_memory: HostMemory = HostMemory()
    notes: tuple[Note, ...] = ()


# --- what the sidecar makes of it ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Exclusive parts of ``used_bytes``; the ones that are known sum to it exactly.

    Attributes:
        weights_bytes: The model's parameters and buffers.
        kv_cache_bytes: The preallocated KV pool.
        encoder_cache_bytes: Encoder outputs kept on the device.
        other_tensors_bytes: Allocated by PyTorch and none of the above: buffers, workspaces and graphs' inputs at
            rest, and activations while a step runs.
        torch_cached_bytes: Reserved by PyTorch's allocator and not allocated: fragments, captured graphs' pools, and
            what ``release`` can give back (``RankReading.releasable_bytes``).
        non_torch_bytes: The rest: contexts, collectives, graphs, workspaces, other processes; on CPU the
            interpreter, its libraries and the heap.
    """

    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    encoder_cache_bytes: int | None = None
    other_tensors_bytes: int | None = None
    torch_cached_bytes: int | None = None
    non_torch_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """vLLM's share of the device, and how much of it is left.

    Attributes:
        gpu_memory_utilization: The engine's setting.
        requested_bytes: That share in bytes.
        headroom_bytes: What the device still has free.
    """

    gpu_memory_utilization: float | None = None
    requested_bytes: int | None = None
    headroom_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """One worker's memory, accounted for.

    Attributes:
        pid_started: When its process was started, in the kernel's ticks since boot.
        taken_at: By the clock of the rank's own machine, which may be set otherwise than ours.
        age_seconds: How old it was when the report was made, whatever that clock says.
        releasable_bytes: What the device would gain by a ``release`` now; ``None`` where that is not known.
        trimmable_bytes: What it would gain by a trim without a target; ``None`` likewise, and where the worker would
            refuse to trim.
        asleep_tags: What of the engine is asleep (``weights``, ``kv_cache``); ``None`` where that is not known.
        start: The phases of its start; empty where nobody saw them.
    """

    rank: int | None
    local_rank: int | None
    dp_rank: int | None
    tp_rank: int | None
    pp_rank: int | None
    host: str | None
    pid: int | None
    taken_at: float
    device: Device
    total_bytes: int | None
    free_bytes: int | None
    used_bytes: int | None
    used_ratio: float | None
    torch: TorchMemory
    components: Components
    pid_started: int | None = None
    age_seconds: float = 0.0
    releasable_bytes: int | None = None
    trimmable_bytes: int | None = None
    asleep_tags: tuple[str, ...] | None = None
    encoder_cache: EncoderCache | None
    budget: Budget
    start: tuple[StartPhase, ...] = ()
    host_memory: HostMemory
    notes: tuple[Note, ...] = ()
    source: ReadingSource = "rpc"


def are_recorded(ranks: Sequence[RankReading]) -> bool:
    """Return whether there are ranks, and the recorders show each of them: no worker need be called to watch it."""
    return bool(ranks) and all(rank.source == "recorder" for rank in ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRank:
    """How far one worker came in a start that failed.

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
    """A start of the engine that failed, as its workers' recorders tell.

    Attributes:
        at: When it was seen to have failed.
        recorder_instance: The name of its recorders' files.
        summary: One sentence: which rank, in which phase, with which error.
        ranks: How far each worker came.
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
            by its recorder: ``silent``, ``stopped`` (by a signal or a debugger), ``dead`` (its process is
            gone), ``ended`` (in order).
        last_seen_at: Of its last reading.
        used_bytes: Device memory in that reading.
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
    """The progress of the ranks, by what their recorders say.

    Attributes:
        verdict: ``progressing``: steps begin and end. ``idle``: nothing to do. ``busy``: one long step or call of ours.
            ``stuck``: it will not go on by itself. ``unknown``: the records do not tell.
        since_seconds: For how long at least that has been so; ``None`` where it is not known.
        ranks: What each rank is doing, in words.
        summary: One sentence for an operator.
    """

    verdict: ProgressVerdict
    since_seconds: float | None
    ranks: tuple[str, ...]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCounts:
    """What the engine has done since its start, by its own counters; ``None`` where it does not count that.

    Attributes:
        requests: Requests that ended.
        images: Images and other multimodal items that its processor cache was asked for.
        new_images: Those of them that the cache did not hold.
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
        requests_running: Requests in the running batch.
        requests_waiting: Requests queued in the scheduler.
        kv_cache_usage_ratio: Of the fullest engine.
        sleeping: Whether any engine has its weights offloaded or discarded.
        work_done: Tokens and requests counted so far; the same number twice means that nothing ran in between.
        work: The same one by one, with images.
        mm_cache_queries: Items looked up in the processor cache so far.
        mm_cache_hits: Those that were found.
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
    """The engine as the last poll found it.

    Attributes:
        url: Where it is.
        state: The verdict (app/highwater/engine/verdict.py).
        since: When that began, in Unix seconds; ``None`` before the first poll.
        started_at: When its first process was started, in Unix seconds; ``None`` where that is not known.
        restarts: How many lives of it before this one the sidecar has seen.
        version: vLLM's.
        model: The one it serves.
        requests_running: Requests in the running batch.
        requests_waiting: Requests queued in the scheduler.
        kv_cache_usage_ratio: Of the fullest engine.
        capabilities: What it can do.
        hint: Why it is in that state, or what to do; ``None`` where there is nothing to say.
        work_done: Tokens and requests counted so far: the same number twice means that nothing ran in between.
        work: The same one by one, with images.
        is_loading: Whether its workers' recorders show a start under way; ``None`` where they would not show one.
        extension_versions: Those of the worker package, by the workers' recorders; empty without any.
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
class EncoderCacheTotals:
    """The encoder cache over all ranks.

    Attributes:
        entries: Of the rank that holds most: every tensor-parallel rank holds a full copy.
        device_bytes: Summed over the ranks.
        host_bytes: Summed over the ranks.
        capacity_embeds: Of one rank.
        oldest_age_seconds: Of the oldest entry of any rank; a lower bound.
        spills: Of the rank with the most; likewise ``restores`` and ``restore_seconds``.
    """

    entries: int
    device_bytes: int
    host_bytes: int
    capacity_embeds: int | None = None
    oldest_age_seconds: float | None = None
    spills: int = 0
    restores: int = 0
    restore_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrowth:
    """How one rank's device fills.

    Attributes:
        rank: The rank, and the data-parallel engine that numbers it.
        bytes_per_second: The slope of its used bytes over the last minute; ``None`` where that is too short to know.
        seconds_to_full: When its device is full at that pace; ``None`` where that is noise, or not within a day.
    """

    rank: int | None
    dp_rank: int | None
    bytes_per_second: float | None = None
    seconds_to_full: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRate:
    """How fast a series leaks.

    Attributes:
        driver: What it goes along with.
        per_driver: Bytes, or descriptors or threads, for each of the driver's unit: a request, an hour.
        low: The lower end of the 95 % interval of that.
        high: Its upper end.
        per_hour: The same for each hour of the window, with its own rests and bursts.
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
    """The verdict on one series of memory, and what it is based on.

    Attributes:
        series: Its name: ``rank 0 other_tensors_bytes``, ``API server anonymous_bytes``.
        owner: Whose memory it is: a rank or a process.
        measure: What of it.
        place: ``device`` or ``host``.
        unit: Of ``value``.
        verdict: ``flat``; ``plateau``: it levelled off, or grows to a bound that it has by design; ``step``: it made
            one; ``leak``; ``not_known``.
        text: One sentence: what was seen, why, and what would settle it.
        value: At the last idle floor.
        grown: Since the first one that counts.
        rate: How fast it leaks; ``None`` for other verdicts.
        bound: What a plateau may grow to by design; ``None`` where none is known.
        bound_by: Whose limit that is.
        step: The size of a step; ``None`` for other verdicts.
        step_at: When it was made, in Unix seconds: between the floor before and this one.
        step_by: The event nearest to it; ``None`` where none is known.
        exhausted_at: When a leak has used up what is left, in Unix seconds; ``None`` where no limit is known.
        limit_by: What it uses up, in words.
        floors: How many idle floors the verdict rests on.
        window_seconds: From the first of them to the last.
        since: Since when the verdict is this one, in Unix seconds.
        is_over: Whether the process has ended: the verdict is about the past.
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
    """How used bytes moved, summed over the ranks that were there at both ends.

    Attributes:
        since_ready_bytes: Since the first reading after the engine became ready.
        bytes_per_second: The slope over the last minute.
        host_since_ready_bytes: The workers' resident set size (RSS) since then.
        baseline_taken_at: When that first reading was taken.
        reason: Why growth since then is not known; ``None`` where it is, or where there is nothing to say yet.
        seconds_to_full: When the first device is full if all goes on as in the last minute; ``None`` where none fills.
        ranks: How each rank's device fills.
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
    """A remedy of a rule: how it went last, and when it may run again.

    Attributes:
        name: Its name.
        unavailable: Why it could not run here now, in words; ``None`` where nothing is known against it.
        last_run_at: When it ended last; ``None`` if it never ran for this rule in this engine's life.
        last_outcome: What became of it then; ``ineffective`` where it gave less than it had to.
        last_reason: Why not, or what the engine said.
        last_freed_bytes: What it freed of what it can free, over all ranks.
        last_freed_ranks: The same by rank.
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
    """How one rank stands to a rule, in bytes of its device; ``None`` where that is not known or no matter of bytes.

    Attributes:
        rank: The rank, and the data-parallel engine that numbers it.
        free_bytes: What its device has free.
        high_free_bytes: With less than that free the rule acts.
        low_free_bytes: With that much free the rule is satisfied.
        short_bytes: What is missing to ``low_free_bytes`` once less than ``high_free_bytes`` is free; else 0.
        can_release_bytes: What ``release`` could give back.
        can_trim_bytes: What ``trim_encoder_cache`` could.
        seconds_to_high_water: When it comes under ``high_free_bytes`` at the pace of the last minute; ``None`` where
            that is not within a day, or where it is under it.
        note: Why this rank is left out, or what is odd about it; ``None`` where nothing is.
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
    """One rule as it stands.

    Attributes:
        name: Its name.
        signal: What it watches.
        phase: ``calm``; ``short`` or ``urgent``: over high water; ``acting``: a remedy runs; ``resting``: after a
            relief that did not reach low water; ``held``: it does not act, see ``reason``.
        value: The signal, on the rank that is worst off.
        high_water: Where the rule acts, in the signal's unit; of that rank, where each has its own.
        low_water: Where it is satisfied.
        reason: One sentence on why it stands as it does; ``None`` where it is calm.
        since: Since when it is in this phase, in Unix seconds.
        rest_until: When the rest after the last relief ends, likewise; ``None`` where it does not rest.
        ranks: Each rank's own figures, for rules about device memory.
        remedies: Its remedies, in order.
        is_dormant: Whether it is held although the engine is at work: somebody should look after it. On CPU the default
            rule has nothing to watch, and that is as it should be.
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
    """The policy as it stands.

    Attributes:
        mode: ``act``, or ``observe``: decide and record, and do nothing.
        level: That of the rule that is worst off.
        summary: One sentence.
        rules: Its rules, in order.
        actions_last_hour: Remedies that it started within the last hour, over all engine lives.
    """

    mode: PolicyMode
    level: PolicyLevel
    summary: str
    rules: tuple[RuleStatus, ...] = ()
    actions_last_hour: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSummary:
    """Host memory in a few figures; ``GET /memory/host`` has all of it. ``None`` is what could not be read.

    Attributes:
        processes: How many of the engine's processes are seen.
        used_bytes: Charged to the engine's container, page cache included.
        kept_bytes: Of the group whose limit is met first, what the kernel cannot drop.
        limit_bytes: That limit; ``None``: there is none.
        seconds_to_limit: When it is reached at the pace of the last minutes; ``None``: not within a week.
        largest: The largest part that the kernel cannot drop.
        largest_bytes: Its size.
        shm_used_bytes: Of ``/dev/shm``, which has ``shm_size_bytes``.
        warnings: What is wrong, one sentence each.
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
        ranks_missing: Those that should be there and are not.
        progress: Whether the ranks make progress; ``None`` without recorders.
        start_failure: The last start that failed; ``None`` once the engine is up, and where none was seen.
        host: Host memory in a few figures; ``None`` where no process of the engine is seen.
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


# --- what was done, and what happened ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How far a trim goes, on every rank; at most one of them. None: all that no running request still needs.

    Attributes:
        free_bytes: Device bytes to let go.
        keep_bytes: Device bytes of encoder outputs to keep at most.
        idle_seconds: Let go what was not used for so long.
    """

    free_bytes: int | None = None
    keep_bytes: int | None = None
    idle_seconds: float | None = None


UNNEEDED = Target()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDelta:
    """The difference between two readings of one rank; who makes it says which way round.

    ``card`` is the same for ranks on one device: used bytes are the whole device's on each of them.
    """

    rank: int | None
    dp_rank: int | None
    card: str | None = None
    used_bytes: int | None
    components: Components


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyResult:
    """One remedy, run or not, and what it gave back.

    Attributes:
        remedy: Its name.
        outcome: ``done``, ``refused``, ``failed`` or (policy in observe mode) ``observed``.
        reason: Why not, or what the engine said.
        seconds: From start to the reading after it.
        freed_bytes: Used bytes before less after, summed over ranks; negative when traffic took more meanwhile.
        freed_components: The same by component.
        ranks: The same by rank.
        credited_bytes: What it freed of what it can free (app/highwater/accounting/freed.py), as in ``/policy`` and in
        the metric; ``None``
            where that was not measured.
        credited_components: The same by component; ``None`` for those that it cannot free.
        frees: What this remedy can free, in words.
        does_not_free: What it cannot, in words.
        quiesced_by: What kept requests away from it; ``None`` where it did not come to that.
        held_seconds: How long new requests waited for it at the gate.
        detail: What the workers said of it, rank by rank.
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
        by: What let the call in.
    """

    address: str
    by: Credential


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, newest last in the ring.

    ``caller`` is who asked for it by a control call; ``None`` where the sidecar acted, or saw it, by itself.
    """

    id: int
    at: float
    kind: EventKind
    summary: str
    trigger: Trigger | None = None
    rule: str | None = None
    result: RemedyResult | None = None
    caller: Caller | None = None
