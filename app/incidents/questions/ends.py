"""Whether a process was ended from outside: by the kernel for memory, or by a signal that is known. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from app.incidents import advice as known
from app.incidents.incident import Evidence, Finding
from app.incidents.latest import Latest


def killed_by_kernel(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether the kernel counted a kill for memory at that time."""
    del ranks
    kills = evidence.oom_kills
    if kills is None or kills.count == 0:
        return None
    return Finding(
        name="killed_by_kernel",
        weight="clue" if evidence.kind == "out_of_memory" else "likely",
        title="the kernel killed a process of this container for memory",
        text=(
            f"Within the last minute the kernel's counter oom_kill rose by {kills.count} ({kills.where}). It "
            "kills when host memory runs out, at the container's limit or the machine's, and what it kills leaves "
            "no last words."
        ),
        figures={"oom_kills": kills.count},
        advice=(known.MEMORY_LIMIT, known.MM_PROCESSOR_CACHE, known.TRIM_HOST_BUDGET),
    )


def ended_by_signal(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether the log tells by which signal a process was ended."""
    del ranks
    number = evidence.ended_by_signal
    if number is None:
        return None
    text = (
        f"The log tells that a process was ended by signal {number}; shells and containers show that as {number + 128}."
    )
    if number == signal.SIGKILL:
        text += (
            " Nobody can catch SIGKILL, so there are no last words. The kernel sends it when host memory has run out, "
            "container runtimes when a stop takes too long, and people with kill -9."
        )
        if evidence.oom_kills is not None and evidence.oom_kills.count == 0:
            text += f" The kernel counted no kill for memory ({evidence.oom_kills.where})."
    return Finding(
        name="ended_by_signal",
        weight="clue",
        title=f"a process of it was ended by {_name(number)}",
        text=text,
        figures={"signal": number},
        advice=(known.WHO_KILLED,) if number == signal.SIGKILL else (),
    )


def _name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
