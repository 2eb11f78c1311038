"""One worker's steps and calls, by its last sample or heartbeat. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias

from highwater.recorder.untrusted import count, number, short_text

_MAX_STACK = 8
# A frame as Python's faulthandler writes it: `  File "/usr/lib/python3/a.py", line 12 in run`.
_FRAME = re.compile(r'  File "(?:.*/)?([^"]*)", line ([0-9]+) in (.*)')

# Functions in which a step makes what it runs next: torch.compile (torch/_dynamo/convert_frame.py, _inductor), Triton's
# compiler and its tuning, and the capture of graphs (vLLM's model runners).
_COMPILES = frozenset({"_compile", "compile", "compile_fx", "do_bench", "capture_model", "_capture_cudagraphs"})

# alive: it writes. silent: it should have written by now. dead: its process has ended. stopped: a signal or a debugger
# holds its process. ended: it wrote that it would write no more.
RankStatus: TypeAlias = Literal["alive", "silent", "dead", "stopped", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """A worker's last record of its steps and of our calls in it; seconds as of then."""

    steps_begun: int = 0
    calls: int = 0  # the number of calls of the engine, steps or other, and operations of the sidecar that have begun
    # Whether the last step had no tokens: the engine runs one after its last request has ended, or was aborted; `None`
    # where the recorder does not say.
    is_out_of_work: bool | None = None
    tokens_age_seconds: float | None = None  # since a step with tokens ended, or none has; `None` where it does not say
    step_seconds: float | None = None  # the age of the current step; `None` outside of steps
    last_step_age_seconds: float | None = None  # since a step began or ended last; `None` before the first
    # How long the engine has waited for what a step returned, with asynchronous scheduling.
    output_seconds: float | None = None
    rpc: str | None = None  # our operation that runs, for `rpc_seconds`
    rpc_seconds: float | None = None
    # The engine's call outside of a step: to load weights, an adapter, to wake up; for at least `call_seconds`.
    call: str | None = None
    call_seconds: float | None = None
    is_compiling: bool = False  # whether what lasts is seen to compile or to capture graphs
    stack: tuple[str, ...] = ()  # where its thread is, innermost first; empty where nothing has lasted for long


def parse_progress(mono: float, body: Mapping[str, Any]) -> RankProgress | None:
    moving, dump = body.get("moving"), body.get("dump")
    if not isinstance(moving, dict):
        return None
    tokens_at = number(moving.get("tokens_mono"))
    last_step, is_out_of_work = number(moving.get("last_step_mono")), moving.get("last_step_empty")
    return RankProgress(
        steps_begun=count(moving.get("steps_begun")) or 0,
        calls=count(body.get("calls")) or 0,
        is_out_of_work=is_out_of_work if isinstance(is_out_of_work, bool) else None,
        tokens_age_seconds=None if tokens_at is None else max(mono - tokens_at, 0.0),
        last_step_age_seconds=None if last_step is None else max(mono - last_step, 0.0),
        step_seconds=number(moving.get("step_seconds")),
        output_seconds=number(moving.get("output_seconds")),
        rpc=short_text(moving.get("rpc")),
        rpc_seconds=number(moving.get("rpc_seconds")),
        call=short_text(moving.get("call")),
        call_seconds=number(moving.get("call_seconds")),
        is_compiling=isinstance(dump, str) and _is_compiling(dump),
        stack=parse_stack(dump, None) if isinstance(dump, str) else (),
    )


def parse_stack(dump: str, thread: int | None) -> tuple[str, ...]:
    """Return one thread's innermost frames as ``file.py:line function``, of a dump by Python's ``faulthandler``.

    Without a thread of that number the first is taken.
    """
    threads = dump.split("\n\n")
    mark = "" if thread is None else f"0x{thread:016x}"
    lines = next((text for text in threads if mark in text), threads[0]).splitlines()
    frames = islice((frame for line in lines if (frame := _FRAME.fullmatch(line))), _MAX_STACK)
    return tuple(text for frame in frames if (text := short_text(f"{frame[1]}:{frame[2]} {frame[3]}")))


def _is_compiling(dump: str) -> bool:
    """Return whether the first thread of a dump, the one that lasts longest, compiles or captures graphs."""
    frames = map(_FRAME.fullmatch, dump.partition("\n\n")[0].splitlines())
    return any(frame is not None and frame[3] in _COMPILES for frame in frames)
