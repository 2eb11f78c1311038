"""Which stopped processes hold every request, and of whom that cannot be said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.host.process_lives import StoppedEngine
from highwater.host.reading import ProcessMemory, Role


def process(role: Role, pid: int, parent: int, rank: int | None = None) -> ProcessMemory:
    return ProcessMemory(role=role, name=role, pid=pid, parent_pid=parent, started=pid, rank=rank, source="proc")


ENGINE = [process("api_server", 10, 9), process("engine_core", 11, 10), process("worker", 12, 11, rank=0)]
NEIGHBOUR = [process("api_server", 20, 9), process("engine_core", 21, 20), process("worker", 22, 21)]
SHELL = process("other", 9, 1)
WRAPPER = process("api_server", 9, 1)
SERVERS = [process("launcher", 10, 9), process("api_server", 13, 10), process("api_server", 14, 10), *ENGINE[1:]]


def held_by(processes: list[ProcessMemory], *stopped: int) -> str | None:
    """Return the sentence of six seconds after these processes were first seen stopped."""
    now = 0.0
    looked = StoppedEngine(lambda: now)
    rows = [one for one in processes if one.pid in stopped]
    assert looked.look(processes, rows) is None
    now = 6.0
    return looked.look(processes, rows)


STOPPED = {
    "EngineCore": (ENGINE, [11], "kill -CONT 11,"),
    "the API server": (ENGINE, [10], "kill -CONT 10,"),
    "nothing": (ENGINE, [], None),
    "one API server of two": (SERVERS, [13], None),
    "both": (SERVERS, [13, 14], "kill -CONT 13 14,"),
    "EngineCore and one of two": (SERVERS, [13, 11], "kill -CONT 13 11,"),
    "a shell that waits for vLLM": ([WRAPPER, *ENGINE], [9], None),
    "the API server below a shell": ([WRAPPER, *ENGINE], [10], "kill -CONT 10,"),
    "the neighbour's EngineCore": ([SHELL, *ENGINE, *NEIGHBOUR], [21], None),
    "the neighbour's API server": ([SHELL, *ENGINE, *NEIGHBOUR], [20], None),
    "ours beside a neighbour": ([SHELL, *ENGINE, *NEIGHBOUR], [11], "kill -CONT 11,"),
    "known by its file": ([replace(one, source="file") for one in NEIGHBOUR], [21], "kill -CONT 21,"),
}


@pytest.mark.parametrize(("processes", "stopped", "told"), STOPPED.values(), ids=STOPPED)
def test_what_every_request_waits_for_is_told(processes, stopped, told):
    said = held_by(processes, *stopped)
    assert said is None if told is None else said is not None and told in said


def test_another_process_under_the_same_number_starts_from_zero():
    now = 0.0
    looked = StoppedEngine(lambda: now)
    looked.look(ENGINE, [ENGINE[1]])
    now = 6.0
    assert looked.look(ENGINE, [replace(ENGINE[1], started=99)]) is None
