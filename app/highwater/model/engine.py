"""The engine: its state and what follows from it, its load, its start, its lives, and its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from highwater.model.rank import Process, Ranked, StartPhase

# When each one holds: app/highwater/watch/round.py. What follows from it: STATES, below.
EngineState: TypeAlias = Literal[
    "starting", "ready", "paused", "sleeping", "busy", "slow", "stuck", "not_answering", "gone"
]
ProgressVerdict: TypeAlias = Literal["progressing", "idle", "busy", "stuck", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTraits:
    """The consequences of a state of the engine, so that no other module lists the states that have one in common."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRank(Ranked):
    """The progress of one worker in its start."""

    rank: int | None
    dp_rank: int | None
    host: str | None
    pid: int | None
    status: str  # by its recorder: `alive`, `silent`, `stopped`, `dead` or `ended`
    # The phases of its start; the last one has the error, where an exception ended it.
    phases: tuple[StartPhase, ...] = ()

    @property
    def is_over(self) -> bool:
        return any(phase.name == "warm_up" and phase.error is None for phase in self.phases)

    @property
    def error(self) -> str | None:
        return self.phases[-1].error if self.phases else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """A start of the engine that failed, as its workers' recorders show it, or its processes' files."""

    at: float  # when the sidecar saw that it had failed
    recorder_instance: str  # the name of its recorders' files; of a silent start one of its processes
    summary: str  # one sentence: which rank, in which phase, with which error
    ranks: tuple[StartedRank, ...]
    is_silent: bool = False  # whether its processes ended without a word


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRank(Ranked):
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


def missing_text(ranks: Iterable[MissingRank]) -> str:
    """Missing ranks by their place, which is known of those too that never reported: ``dp 1 pp 0 tp 0 (dead)``."""
    return ", ".join(f"dp {rank.dp_rank} pp {rank.pp_rank} tp {rank.tp_rank} ({rank.status})" for rank in ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    # `progressing`: steps begin and end. `idle`: nothing to do. `busy`: a long step or call of ours. `stuck`: it will
    # not go on by itself. `unknown`: the records do not show it.
    verdict: ProgressVerdict
    since_seconds: float | None  # for how long at least that has been so
    ranks: tuple[str, ...]  # one sentence for each rank
    summary: str  # one sentence for an operator
    # Whether it is stuck although its loop runs: no request is scheduled, which may end by itself.
    is_starved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCounts:
    """The engine's work since its start, by its own counters; ``None`` where it does not count that."""

    requests: float | None = None  # requests that ended
    # Images and other multimodal items that were looked up in its processor cache; `new_images`: those of them that
    # were not in it.
    images: float | None = None
    new_images: float | None = None
    tokens: float | None = None  # prompt and generated tokens
    sleeps: float | None = None  # times that it was put to sleep, of readings while it sleeps, as the sidecar counts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's own ``/metrics``, summed over its engines."""

    requests_running: int | None = None
    requests_waiting: int | None = None
    waiting_by_reason: Mapping[str, int] = field(default_factory=dict)  # in vLLM's words; empty where it gives none
    kv_cache_usage_ratio: float | None = None  # of the fullest engine
    sleeping: bool | None = None  # whether any engine has its weights offloaded or discarded
    # Tokens and requests counted so far; the same number twice means that nothing ran in between.
    work_done: float | None = None
    work: WorkCounts = WorkCounts()  # its parts, with images
    engines: Mapping[str, EngineLoad] = field(default_factory=dict)  # of several, each one's, by vLLM's number

    @property
    def is_idle(self) -> bool:
        return self.requests_running == 0 and self.requests_waiting == 0


LOAD_FIGURES: Final = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
"""The figures of ``EngineLoad`` that ``EngineStatus`` has as well, and that the history keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The engine as of the last poll; figures of its load as in ``EngineLoad``."""

    url: str
    state: EngineState  # the verdict (app/highwater/watch/round.py)
    since: float | None = None  # when that began, in Unix seconds; `None` before the first poll
    started_at: float | None = None  # when its first process was started, in Unix seconds
    restarts: int = 0  # how many lives of it before this one the sidecar has seen, starts that failed included
    version: str | None = None  # vLLM's
    model: str | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_cache_usage_ratio: float | None = None
    work_done: float | None = None
    work: WorkCounts = WorkCounts()
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    # When the last one was seen to have ended in order, by its log or its workers' files, with no other started since.
    stopped_at: float | None = None
    hint: str | None = None  # why it is in that state, or what to do; `None` where there is nothing to say
    # A sentence for each of its data-parallel engines that schedules nothing of what waits there, while others work.
    starved: tuple[str, ...] = ()
    # Whether its workers' recorders show a start under way; `None` where they would not show it.
    is_loading: bool | None = None
    # Of a start under way the phase that it is in, and how long the last one took until its workers were ready, in
    # seconds; `None` where recorders do not show that. Both from the start of its first process, or else from when it
    # was seen first, as `loading_since`, which is `None` where no start is seen.
    loading_phase: str | None = None
    loading_since: float | None = None
    last_start_seconds: float | None = None
    # Of an engine that does not answer yet, or has ended: a process that seems to load, or is newer than the end; and
    # how its last starts ended.
    loading_process: str | None = None
    ended_starts: str | None = None
    extension_versions: tuple[str, ...] = ()  # those of the worker package, by the workers' recorders

    @property
    def traits(self) -> StateTraits:
        """The consequences of its state; an end in order is nothing bad."""
        traits = STATES[self.state]
        return traits if self.stopped_at is None else replace(traits, level="warn")

    @property
    def named(self) -> str:
        return f"vLLM {self.version or '(version unknown)'} {self.model or ''}".rstrip()

    @property
    def state_text(self) -> str:
        return self.state.replace("_", " ") if self.stopped_at is None else "stopped in order"

    @property
    def in_words(self) -> str:
        if self.stopped_at is not None and self.hint:
            return f"the engine was {self.hint}"
        return f"the engine is {self.state_text}" + (f": {self.hint}" if self.hint else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLife:
    """The end of a life of the engine that was never ready, in words that a sentence goes on with."""

    how: str  # ``was killed by the kernel for memory``, ``ended without a word``
    memory: str = ""  # its container's against the limit: ``1,250.0 of 1,250.0 MiB``; empty where it is not known
    processes: str = ""  # those that it left, with the most that each had resident; empty where none is known
    oom_kills: int = 0  # those that the kernel counted in its container while it ran


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLife:
    """One life of the engine by its processes' files."""

    processes: frozenset[Process]  # all that are known of it, whether they run or not
    last_at: float  # when one of them wrote last, in Unix seconds
    is_running: bool  # one of them runs, as far as is known, and not only what a killed API server left
    has_server: bool  # one of them, ended or not, is an API server, a launcher or a container's first process
    is_serving: bool  # such a process wrote just now; of a life without one, any process did
    end: EndedLife  # how it ended, if it has
    started_at: float | None = None  # when its first process was started, in Unix seconds


class SeenProcess(NamedTuple):
    name: str  # with its pid
    started_at: float | None = None  # in Unix seconds
