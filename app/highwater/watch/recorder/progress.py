"""The progress of the ranks: one verdict over all their recorders. Pure; no I/O, no clock.

It prefers "unknown" to a false alarm: a long step is busy until its limit, a request that no step follows does not
count while the engine's loop responds to calls, and an engine without requests is never stuck.

Steps without tokens, which vLLM's loop makes for ever while a request waits, are no progress. What vLLM defers may take
its time, and it does not say for what (vllm 0.32.0 v1/metrics/loggers.py:549): it counts where a connector is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from highwater.model.engine import Progress, ProgressVerdict
from highwater.model.units import counted
from highwater.watch.recorder.contents import RankProgress, RankStatus
from highwater.watch.recorder.rank import RankRecord

LOST_SECONDS = 5.0
"""A rank's process may be dead or stopped for so long: the engine may be about to end, or a debugger to let go."""
UNHEARD_SECONDS = 30.0
"""A rank whose process runs may write nothing for so long: a machine that swaps holds it up for many seconds."""
NO_STEP_SECONDS = 10.0
"""The loop may take so long to begin a step, or to respond to a call."""
LONG_SECONDS = 1.0
"""A step or a call that lasts longer is reported; the recorder then adds a stack."""
DEFERRED_SECONDS = 600.0
"""A deferred request may wait so long: connectors give a transfer up after 480 s (VLLM_NIXL_ABORT_REQUEST_TIMEOUT)."""
MAX_STEP_SECONDS = 120.0
FIRST_STEPS = 10
FIRST_STEP_FACTOR = 5.0
"""A recorder's first steps, and steps that compile or capture, may last longer by this factor: kernels and graphs are
made at the first use of a shape, which takes minutes on some devices."""

LOST: frozenset[RankStatus] = frozenset({"silent", "dead", "stopped"})
_WHY_LOST = {
    "silent": "has written nothing",
    "dead": "is dead: its process is gone, and it has written nothing",
    "stopped": "is stopped by a signal or a debugger, and has written nothing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    requests_running: int | None = None  # by the engine's counts; `None` where it does not report them
    requests_waiting: int | None = None
    waiting_by_reason: Mapping[str, int] = field(default_factory=dict)  # as `EngineLoad`, with the next
    kv_cache_usage_ratio: float | None = None
    kv_connector: str | None = None  # as `Capabilities`
    # Under way through this sidecar. They count only where the engine reports none: the API server may spend a minute
    # on a request, downloading its images, before the engine receives it.
    proxied_requests: int = 0
    # How long a worker call, or another request to the engine's loop, has waited for its response.
    unanswered_seconds: float | None = None
    answer_age_seconds: float | None = None  # since the loop responded last; `None` if it never did
    is_held: bool = False  # whether the engine is paused or asleep on purpose: requests may wait then


@dataclass(frozen=True, slots=True)
class SilentCore:
    """An EngineCore whose process file is old, while its API server's is not; ``has_workers``: in other processes."""

    name: str
    seconds: float
    has_workers: bool


_Finding: TypeAlias = tuple[ProgressVerdict | Literal["starved"], float | None, str]


def requested_since(before: float | None, demand: Demand, now: float) -> float | None:
    """``before`` is the last return value, ``now`` of any monotonic clock; ``None``: there are no requests."""
    if _requests(demand) is None:
        return None
    return now if before is None else before


def judge(
    ranks: Sequence[RankRecord],
    demand: Demand,
    *,
    requested_seconds: float = 0.0,
    max_step_seconds: float = MAX_STEP_SECONDS,
) -> Progress:
    """There have been requests without a break for ``requested_seconds`` (``requested_since``).

    ``max_step_seconds`` is the longest normal step, or call of ours.
    """
    verdict, since, summary = (
        _lost(ranks)
        or _held_up(ranks, max_step_seconds)
        or _unreported(ranks)
        or _starved(ranks, demand, requested_seconds)
        or _without_step(ranks, demand, requested_seconds)
    )
    is_starved = verdict == "starved"
    verdict = "stuck" if verdict == "starved" else verdict
    if verdict == "stuck" and demand.is_held and not any(rank.status == "dead" for rank in ranks):
        verdict = "busy"  # asleep, paused, or on its way there or back: nobody waits for a step
    return Progress(
        verdict=verdict,
        since_seconds=since,
        ranks=tuple(f"{rank.title} {_doing(rank)}" for rank in ranks),
        summary=summary,
        is_starved=is_starved,
    )


def beside_silent(
    progress: Progress | None,
    core: SilentCore,
    ranks: Sequence[RankRecord],
    *,
    requested_seconds: float,
    max_step_seconds: float,
) -> Progress | None:
    """Return the verdict where an EngineCore is silent, of an engine that is not held; ``progress`` is the ranks'.

    The thread that writes its file writes whatever its loop does, unless a call holds Python's lock or it is stopped.
    Where it is the worker as well, a compilation may hold the lock. There have been requests without a break for
    ``requested_seconds``, by vLLM's counts or through the sidecar: a silent EngineCore counts none that come.
    """
    may_compile = any(_may_compile(rank.progress) for rank in ranks)
    limit = UNHEARD_SECONDS if core.has_workers else max_step_seconds * (FIRST_STEP_FACTOR if may_compile else 1.0)
    if core.seconds < UNHEARD_SECONDS or (
        progress is not None and progress.verdict in {"progressing", "busy", "stuck"}
    ):
        return progress
    is_waited_for = requested_seconds >= NO_STEP_SECONDS and core.seconds >= limit
    waits = f"requests have waited for {_seconds(requested_seconds)}" if is_waited_for else "no request is seen to wait"
    return Progress(
        verdict="stuck" if is_waited_for else "busy",
        since_seconds=core.seconds,
        ranks=() if progress is None else progress.ranks,
        summary=f"{core.name} has written nothing for {_seconds(core.seconds)} while the API server does: it is "
        f"stopped, or one call holds it; {waits}",
    )


# --- findings, in order; the first that applies is the verdict ---


def _lost(ranks: Sequence[RankRecord]) -> _Finding | None:
    alive = [rank for rank in ranks if rank.status == "alive"]
    limits = {status: UNHEARD_SECONDS if status == "silent" else LOST_SECONDS for status in LOST}
    lost = [rank for rank in ranks if rank.status in limits and rank.age_seconds >= limits[rank.status]]
    # Where no rank writes, the engine has ended, or its files have moved: the polls show which. A process that is held
    # is a fact by itself.
    if lost and (alive or any(rank.status == "stopped" for rank in lost)):
        beside = f"; {counted(len(alive), 'other rank')} alive" if alive else ""
        named = "; ".join(f"{rank.title} {_doing(rank)}" for rank in lost)
        stopped = [rank.pid for rank in lost if rank.status == "stopped"]
        to_do = f"; {how_to_continue(stopped)}" if stopped else ""
        return "stuck", max(rank.age_seconds for rank in lost), named + beside + to_do
    if not alive:
        named = "; ".join(f"{rank.title} {_doing(rank)}" for rank in ranks)
        return "unknown", None, f"no rank writes: {named}" if ranks else "no rank has a recorder"
    return None


def how_to_continue(pids: Iterable[int | None]) -> str:
    return f"run kill -CONT {' '.join(map(str, pids))}, or detach the debugger"


def command_to_continue(told: str) -> str | None:
    """Return the command in a sentence with ``how_to_continue``; ``None`` in any other."""
    command = re.search(r"run (kill -CONT [\d ]+), or", told)
    return command and command[1]


def _held_up(ranks: Sequence[RankRecord], max_step_seconds: float) -> _Finding | None:
    holds = [(hold[1], hold[0], rank) for rank in ranks if rank.status == "alive" and (hold := _hold(rank.progress))]
    if not holds:
        return None
    seconds, what, rank = max(holds, key=lambda hold: hold[0])
    place = f"{rank.title} has been {what} for {_seconds(seconds)}{_place(rank.progress)}"
    limit = max_step_seconds * (FIRST_STEP_FACTOR if _may_compile(rank.progress) else 1.0)
    # The engine's own calls of the worker, and a compilation, end by themselves: a restart would only begin them again.
    may_last = rank.progress is not None and (rank.progress.call is not None or rank.progress.is_compiling)
    if seconds > limit and not may_last:
        return "stuck", seconds, f"{place}: longer than the {_seconds(limit)} limit"
    if seconds >= LONG_SECONDS:
        return "busy", seconds, place
    return "progressing", None, f"steps begin and end; {rank.title} is in one"


def _may_compile(progress: RankProgress | None) -> bool:
    if progress is None or (progress.step_seconds is None and progress.output_seconds is None):
        return False
    return progress.is_compiling or progress.steps_begun <= FIRST_STEPS


def _unreported(ranks: Sequence[RankRecord]) -> _Finding | None:
    unreported = [rank for rank in ranks if rank.status != "alive" or rank.progress is None]
    if not unreported:
        return None
    named = "; ".join(f"{rank.title} {_doing(rank)}" for rank in unreported)
    return "unknown", None, f"not every rank reports progress: {named}"


def _starved(ranks: Sequence[RankRecord], demand: Demand, requested_seconds: float) -> _Finding | None:
    ages = (rank.progress.tokens_age_seconds or 0.0 for rank in ranks if rank.progress is not None)
    seconds, running, usage = min(requested_seconds, *ages), demand.requests_running, demand.kv_cache_usage_ratio
    is_looping = _quiet_seconds(ranks) < NO_STEP_SECONDS and bool(running or demand.requests_waiting)
    if not is_looping or demand.is_held or seconds < LONG_SECONDS:
        return None
    reasons = ", ".join(f"{name} {count}" for name, count in demand.waiting_by_reason.items() if count)
    why = f" (vLLM's reasons: {reasons})" if reasons else ""
    held = f"; {kv_blocks_held(demand.kv_connector, usage)}" if usage and not running else ""
    text = f"no request is scheduled: {_requests(demand)}{why} for {_seconds(seconds)}, in steps without tokens{held}"
    # Older versions give no reasons. What is deferred may hold the room that the others wait for, and give it back: a
    # connector loads it, or its client has yet to send the rest.
    capacity, deferred = (demand.waiting_by_reason.get(name) for name in ("capacity", "deferred"))
    may_end = DEFERRED_SECONDS if demand.kv_connector or capacity or not demand.waiting_by_reason else math.inf
    limit = NO_STEP_SECONDS if running or (capacity and not deferred) else may_end
    return ("starved" if seconds >= limit else "unknown"), seconds, text


def _without_step(ranks: Sequence[RankRecord], demand: Demand, requested_seconds: float) -> _Finding:
    quiet = _quiet_seconds(ranks)
    requests, call_seconds = _requests(demand), demand.unanswered_seconds or 0.0
    last = "no step has begun yet" if quiet == math.inf else f"the last step was {_seconds(quiet)} ago"
    if quiet >= NO_STEP_SECONDS and call_seconds >= NO_STEP_SECONDS:
        waits = f"a call has waited for {_seconds(call_seconds)}"
        return _no_work(min(quiet, call_seconds), f"{waits} and {requests}" if requests else waits, last)
    if requests is None:
        return _without_requests(ranks, demand, quiet, last)
    if quiet < NO_STEP_SECONDS:
        return "progressing", None, f"{last}, with {requests}"
    asked = f"{requests} for {_seconds(requested_seconds)}"
    excused = _excused(ranks, demand, requested_seconds, f"{last}, with {asked}")
    return excused or _no_work(min(quiet, requested_seconds), asked, last)


def _excused(ranks: Sequence[RankRecord], demand: Demand, requested_seconds: float, what: str) -> _Finding | None:
    # The counts are as of the last step, and stay where they were when the last requests were aborted.
    if _are_out_of_work(ranks):
        return "idle", _quiet_seconds(ranks), f"{what}, but that step had nothing to do: the engine's counts may be old"
    if requested_seconds < NO_STEP_SECONDS:
        return "unknown", None, f"{what}: too early to tell"
    # No step is made for a request that waits for the rest of its client's input, which counts as deferred (vllm 0.32.0
    # v1/core/sched/scheduler.py:2810).
    deferred = demand.waiting_by_reason.get("deferred")
    if deferred and deferred == demand.requests_waiting and not demand.requests_running:
        return "unknown", None, f"{what}, which vLLM has put off (deferred): it may wait for its client"
    if _loop_answers(demand):  # vLLM's loop makes a step between two calls wherever it has a request
        return "unknown", None, f"{what}, but the engine's loop answers calls: its counts may be old"
    return None


def _without_requests(ranks: Sequence[RankRecord], demand: Demand, quiet: float, last: str) -> _Finding:
    since = None if quiet == math.inf else quiet
    if demand.is_held:
        return "idle", since, f"the engine is paused or asleep; {last}"
    if demand.requests_running is not None and demand.requests_waiting is not None:
        return "idle", since, f"no requests; {last}"
    if _are_out_of_work(ranks):
        return "idle", since, f"{last} and had nothing to do"
    if quiet < NO_STEP_SECONDS:
        return "progressing", None, f"{last}; the engine does not report its requests"
    if _loop_answers(demand):
        return "idle", since, f"{last}, and the engine's loop answers calls"
    return "unknown", None, f"{last}; the engine does not report its requests"


def _no_work(seconds: float, asked: str, last: str) -> _Finding:
    return "stuck", seconds, f"the engine's loop schedules no work: {asked}, no rank is in a step, and {last}"


# --- facts about records and demand ---


def kv_blocks_held(connector: str | None, usage: float | None) -> str:
    """Return who may hold KV blocks while no request runs; ``connector``: as ``Capabilities``."""
    who = "whether a KV connector holds them is not known (in development mode GET /server_info names it)"
    if connector is not None:
        ended = f"the KV connector {connector} may hold those of requests that have ended, or that it loads"
        who = ended if connector else "no KV connector is configured, and what holds them is not known"
    return f"KV blocks are in use{f' ({usage:.1%})' if usage else ''} though no request runs: {who}"


def _requests(demand: Demand) -> str | None:
    """Return the requests of the engine's loop in words; ``None`` where it has none, or may let them wait."""
    if demand.is_held:
        return None
    running, waiting = demand.requests_running, demand.requests_waiting
    if running or waiting:
        return f"{running or 0} running and {counted(waiting or 0, 'waiting request')}"
    if (running is None or waiting is None) and demand.proxied_requests:
        return f"{counted(demand.proxied_requests, 'request')} under way through the sidecar"
    return None


def _loop_answers(demand: Demand) -> bool:
    age = demand.answer_age_seconds
    return age is not None and age < NO_STEP_SECONDS


def _are_out_of_work(ranks: Sequence[RankRecord]) -> bool:
    return all(rank.progress is not None and rank.progress.is_out_of_work for rank in ranks)


def _quiet_seconds(ranks: Sequence[RankRecord]) -> float:
    ages = [rank.progress.last_step_age_seconds for rank in ranks if rank.progress is not None]
    return min((age for age in ages if age is not None), default=math.inf)


def _hold(progress: RankProgress | None) -> tuple[str, float] | None:
    """Return what a rank is in, and for how long. A short call of ours does not count: every poll makes one."""
    if progress is None:
        return None
    holds = [] if progress.step_seconds is None else [("in one step", progress.step_seconds)]
    if progress.output_seconds is not None:
        holds.append(("waiting for a step's output", progress.output_seconds))
    if progress.rpc is not None and (progress.rpc_seconds or 0.0) >= LONG_SECONDS:
        holds.append((f"in our call {progress.rpc}", progress.rpc_seconds or 0.0))
    if progress.call is not None:
        holds.append((f"in the engine's call {progress.call}", progress.call_seconds or 0.0))
    return max(holds, key=lambda hold: hold[1], default=None)


def activity(progress: RankProgress) -> str:
    """Return what a worker's main thread is in, and for how long."""
    hold, age = _hold(progress), progress.last_step_age_seconds
    if hold is not None:
        return f"{hold[0]} for {_seconds(hold[1])}"
    return "in no step yet" if age is None else f"in no step, the last one {_seconds(age)} ago"


def _doing(rank: RankRecord) -> str:
    if rank.status in _WHY_LOST:
        return f"{_WHY_LOST[rank.status]} for {_seconds(rank.age_seconds)}{_place(rank.progress)}"
    if rank.status == "ended":
        return f"ended its recorder {_seconds(rank.age_seconds)} ago"
    if rank.progress is None:
        return "has written no sample yet"
    return f"is {activity(rank.progress)}{_place(rank.progress)}"


def _place(progress: RankProgress | None) -> str:
    return f", at {progress.stack[0]}" if progress is not None and progress.stack else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= NO_STEP_SECONDS else f"{seconds:.1f} s"
