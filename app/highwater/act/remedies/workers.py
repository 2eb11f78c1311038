"""The remedies that call the workers, where their answers are the result.

A worker's call stops its engine while it runs. So a call that moves much ends early and says what is left
(worker_ext/README.md, `max_seconds`), and the rest follows in further calls, after a pause as long as the call was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from highwater.act.remedies.remedy import Remedy, RunOptions, RunResult, connector_refusal
from highwater.engine.capabilities import Capabilities, no_extension
from highwater.engine.client import Engine
from highwater.model.engine import EngineStatus
from highwater.model.rank import rank_title
from highwater.model.remedies import TRAITS, Mode
from highwater.model.units import mib
from highwater.process.errors import EngineError, EngineGarbled
from highwater.process.untrusted import part

MAX_SECONDS = 30.0
MAX_PAUSE_SECONDS = 0.2

Answers: TypeAlias = Sequence[Mapping[str, Any]]

_ADDED_UP = (
    *("spilled_entries", "spilled_bytes", "host_bytes_added", "restored_entries", "restored_bytes"),
    *("copy_seconds", "elapsed_ms"),
)
_WHY_KEPT = {
    "needed_entries": "are needed by requests",
    "over_budget_entries": "do not fit into the host's budget",
    "unspillable_entries": "cannot be copied",
}
_ASLEEP = "the engine is asleep: its pools are unmapped"


class Release(Remedy):
    """Garbage collection, then ``empty_cache`` on every worker (on CPU: free heap back to the system).

    While the engine sleeps it takes nothing and touches no pool: it gives back what the sleep left behind.
    """

    traits = TRAITS["release"]

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        del mode, status
        return no_extension(capabilities)

    async def run(self, engine: Engine, options: RunOptions) -> RunResult:
        del options
        return await call_workers(engine, "release")


class TrimEncoderCache(Remedy):
    """Moves least recently used encoder outputs to host memory; the next access brings each back.

    The scheduler never notices. ``host_budget_bytes`` is for each rank; None: half of what the host has free.
    """

    traits = TRAITS["trim_encoder_cache"]

    def __init__(self, *, host_budget_bytes: int | None = None) -> None:
        self._host_budget_bytes = host_budget_bytes

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Refuse where the cache is not the workers' own. Each worker refuses for reasons that only it can see."""
        del mode
        return _ASLEEP if status.state == "sleeping" else no_extension(capabilities) or connector_refusal(capabilities)

    async def run(self, engine: Engine, options: RunOptions) -> RunResult:
        """Call op ``trim`` on every worker, with the same target: all ranks hold the same outputs and choose alike."""
        wanted = {**asdict(options.target), "host_budget_bytes": self._host_budget_bytes}
        payload = {key: value for key, value in wanted.items() if value is not None}
        run = await call_workers_in_rounds(engine, "trim", payload, again=_for_the_rest)
        return replace(run, reason=_fell_short(run.detail)) if run.ok and run.reason is None else run


def _fell_short(answers: Answers) -> str | None:
    """Return how much less than asked for the rank moved that moved least of it, and why it was not more.

    ``None`` where it was enough, to the decimal that is shown, or where no answer says how much was moved.
    """
    telling = [answer for answer in answers if _number(answer, "spilled_bytes") is not None]
    if not telling:
        return None
    worst = max(
        telling, key=lambda answer: (_number(answer, "asked_bytes") or 0) - (_number(answer, "spilled_bytes") or 0)
    )
    asked, moved, kept = _number(worst, "asked_bytes"), _number(worst, "spilled_bytes") or 0, part(worst, "kept")
    if moved >= (1 if asked is None else asked):  # without a target all is moved that can be
        return None
    if mib(moved) == mib(asked):
        return None
    wanted = "" if asked is None else f" of the {mib(asked)} MiB asked for"
    why = [f"{kept[name]} entries {what}" for name, what in _WHY_KEPT.items() if kept.get(name)]
    if not why and _number(part(worst, "encoder_cache"), "device_bytes") == 0:
        why = [f"its device holds no {'more ' if moved else ''}encoder outputs"]
    because = f": {', '.join(why)}" if why else ""
    name = rank_title(worst.get("dp_rank"), worst.get("rank"))
    return f"rank {name} could move {f'only {mib(moved)} MiB' if moved else 'nothing'}{wanted}{because}"


def _for_the_rest(payload: Mapping[str, Any], answers: Answers) -> Mapping[str, Any]:
    """Bytes to let go become bytes to keep: ranks that came further than others then end where the others do.

    Raises EngineGarbled where an answer does not say what it holds or has left: the same request would move too much.
    """
    if "free_bytes" not in payload:
        return payload
    keep = 0
    for answer in answers:
        if answer.get("complete", True):
            continue
        held, remaining = _number(part(answer, "encoder_cache"), "device_bytes"), _number(answer, "remaining_bytes")
        if held is None or remaining is None:
            raise EngineGarbled("a worker does not say how much is left")
        keep = max(keep, held - remaining)
    return {**{key: value for key, value in payload.items() if key != "free_bytes"}, "keep_bytes": keep}


def _number(answer: Mapping[str, Any], name: str) -> int | None:
    """Return a figure of an answer; ``None`` where a worker package of another version has none."""
    value = answer.get(name)
    return value if isinstance(value, int) else None


async def call_workers(engine: Engine, op: str, payload: Mapping[str, Any] | None = None) -> RunResult:
    """Run one operation on every worker. Raises EngineError where the engine gave no usable response."""
    answers = await engine.rpc(op, payload)
    failed = [answer for answer in answers if not answer.get("ok")]
    if not failed:
        return RunResult(ok=True, detail=tuple(answers))
    errors = [error if isinstance(error := answer.get("error"), dict) else {} for answer in failed]
    return RunResult(
        ok=False,
        reason=f"{len(failed)} of {len(answers)} ranks: {errors[0].get('message', 'no reason given')}",
        # With one rank that did it, something was done.
        refused=len(failed) == len(answers) and all(error.get("code") == "refused" for error in errors),
        detail=tuple(answers),
    )


async def call_workers_in_rounds(
    engine: Engine,
    op: str,
    payload: Mapping[str, Any],
    *,
    again: Callable[[Mapping[str, Any], Answers], Mapping[str, Any]] = lambda payload, _: payload,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> RunResult:
    """Call every worker until none has anything left, or ``MAX_SECONDS`` have passed; return what all calls moved.

    ``again`` returns the next call's payload, from the last one's payload and answers. Raises EngineError where the
    engine gave no usable response to the first call; later, what was done until then is returned.
    """
    until = clock() + MAX_SECONDS
    run = await call_workers(engine, op, payload)
    done: Answers = run.detail
    while run.ok and (left := [answer for answer in run.detail if not answer.get("complete", True)]):
        if clock() >= until:
            entries, size = (
                max(int(answer.get(f"remaining_{of}", 0)) for answer in left) for of in ("entries", "bytes")
            )
            rest = f"up to {entries} entries ({mib(size)} MiB) a rank are left; ask again"
            return RunResult(ok=True, reason=f"stopped after {MAX_SECONDS:.0f} s: {rest}", detail=tuple(done))
        await pause(min(MAX_PAUSE_SECONDS, max(float(answer.get("elapsed_ms", 0)) for answer in run.detail) / 1000))
        try:
            payload = again(payload, run.detail)
            run = await call_workers(engine, op, payload)
        except EngineError as exc:
            return RunResult(ok=False, reason=f"after a part of it: {exc}", detail=tuple(done))
        if not run.ok:
            # Refused or failed now, as where the host's budget is used up: what went before it is done.
            return RunResult(ok=run.refused, reason=f"after a part of it: {run.reason}", detail=tuple(done))
        done = _added_up(done, run.detail)
    return run if not run.ok else RunResult(ok=True, detail=tuple(done))


def _added_up(before: Answers, last: Answers) -> Answers:
    if len(before) != len(last):  # a worker that came or went in between
        return last
    # The requested bytes are the first call's; everything else that is no sum is the last one's.
    return [
        {
            **new,
            **{key: old[key] + new[key] for key in _ADDED_UP if key in old and key in new},
            **{key: old[key] for key in ("asked_bytes",) if key in old},
        }
        for old, new in zip(before, last, strict=True)
    ]
