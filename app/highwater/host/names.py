"""Display names of the engine's processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from highwater.host.reading import ROLES, ProcessMemory, Role
from highwater.readings.rank import rank_title

# Of the same container, and of no engine.
_FOREIGN: Final = frozenset({"sidecar", "other"})
# Other roles' titles are their names.
_TITLES: dict[Role, str] = {"api_server": "API server", "engine_core": "EngineCore", "coordinator": "DP coordinator"}


def name_of(
    role: Role,
    *,
    index: int | None = None,
    rank: int | None = None,
    dp_rank: int | None = None,
    command: str | None = None,
) -> str:
    """Return a process's name: ``EngineCore 1``, ``worker rank 2.1``, ``other python3``."""
    title = _TITLES.get(role, role.replace("_", " "))
    if role == "worker" and rank is not None:
        return f"{title} rank {rank_title(dp_rank, rank)}"
    if role == "engine_core" and index is None and dp_rank:
        return f"{title} {dp_rank}"
    if role == "other" and command:
        return f"{title} {command}"
    return title if index is None else f"{title} {index}"


def named_apart(processes: Iterable[ProcessMemory]) -> tuple[ProcessMemory, ...]:
    ordered = sorted(processes, key=lambda one: (ROLES.index(one.role), _natural(one.name), one.host or "", one.pid))
    counts = Counter(one.name for one in ordered)
    return tuple(one if counts[one.name] == 1 else replace(one, name=f"{one.name} (pid {one.pid})") for one in ordered)


def bare_name(name: str) -> str:
    return name.partition(" (pid ")[0]


def of_engine(processes: Iterable[ProcessMemory]) -> int:
    return sum(one.role not in _FOREIGN for one in processes)


def _natural(name: str) -> tuple[object, ...]:
    head, _, tail = name.rpartition(" ")
    numbers = tail.split(".")
    return (head, 0, *map(int, numbers)) if all(part.isascii() and part.isdigit() for part in numbers) else (name, 1)
