"""Worker calls that are repeated until all is done: each moves bytes for a bounded time, and the engine steps between.

A worker's call stops its engine while it runs. So one that moves much ends early and says what is left
(worker_ext/README.md, `max_seconds`), and the rest is asked for again, with a rest as long as the call was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from highwater.engine.client import Engine
from highwater.errors import EngineError
from highwater.relief.remedies.remedy import Run, tell_workers
from highwater.units import mib

MAX_SECONDS = 30.0
MAX_REST_SECONDS = 0.2

Answers: TypeAlias = Sequence[Mapping[str, Any]]

_ADDED_UP = (
    *("spilled_entries", "spilled_bytes", "host_bytes_added", "restored_entries", "restored_bytes"),
    *("copy_seconds", "elapsed_ms"),
)


async def tell_workers_in_rounds(
    engine: Engine,
    op: str,
    payload: Mapping[str, Any],
    *,
    again: Callable[[Mapping[str, Any], Answers], Mapping[str, Any]] = lambda payload, _: payload,
    clock: Callable[[], float] = time.monotonic,
    rest: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Run:
    """Ask every worker again until none has anything left, or ``MAX_SECONDS`` have passed.

    Args:
        engine: The engine.
        op: The operation.
        payload: Of the first call.
        again: What the next call asks for, from what the last one asked for and the answers to it.
        clock: Seconds that only grow.
        rest: Waits for so many seconds; replaced in tests.

    Returns:
        With one answer for each worker: the last, with what all of them moved.

    Raises:
        EngineError: The engine gave no good answer to the first call. Later, what was done until then is returned.
    """
    until = clock() + MAX_SECONDS
    run = await tell_workers(engine, op, payload)
    done: Answers = run.detail
    while run.ok and (left := [answer for answer in run.detail if not answer.get("complete", True)]):
        if clock() >= until:
            return Run(ok=True, reason=_left(left), detail=tuple(done))
        await rest(min(MAX_REST_SECONDS, max(float(answer.get("elapsed_ms", 0)) for answer in run.detail) / 1000))
        payload = again(payload, run.detail)
        try:
            run = await tell_workers(engine, op, payload)
        except EngineError as exc:
            return Run(ok=False, reason=f"after a part of it: {exc}", detail=tuple(done))
        if not run.ok:
            # Refused or failed now, as where the host's budget is used up: what went before it is done.
            return Run(ok=run.refused, reason=f"after a part of it: {run.reason}", detail=tuple(done))
        done = _added_up(done, run.detail)
    return run if not run.ok else Run(ok=True, detail=tuple(done))


def _left(answers: Answers) -> str:
    entries = max(int(answer.get("remaining_entries", 0)) for answer in answers)
    size = max(int(answer.get("remaining_bytes", 0)) for answer in answers)
    return f"stopped after {MAX_SECONDS:.0f} s: up to {entries} entries ({mib(size)} MiB) a rank are left; ask again"


def _added_up(before: Answers, last: Answers) -> Answers:
    if len(before) != len(last):  # a worker that came or went in between
        return last
    return [
        {**new, **{key: old[key] + new[key] for key in _ADDED_UP if key in old and key in new}, **_first(old)}
        for old, new in zip(before, last, strict=True)
    ]


def _first(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that belong to the request as it came, rather than to one of its calls."""
    return {"asked_bytes": answer["asked_bytes"]} if "asked_bytes" in answer else {}
