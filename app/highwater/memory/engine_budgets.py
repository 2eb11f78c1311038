"""The workers' reports on their start: from recorder files; a worker without one is called for it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from highwater.accounting.engine_budget import EngineBudget
from highwater.engine.client import Engine
from highwater.errors import EngineError
from highwater.readings.rank import RankReading, StartPhase, WorkerMemory
from highwater.recorder.recorders import Recorders
from highwater.text.printable import cleaned

_Process = tuple[str | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Started:
    """One worker's start; without phases where none were recorded."""

    engine_budget: EngineBudget
    start: tuple[StartPhase, ...] = ()


_STARTED = TypeAdapter(Started)


class EngineBudgets:
    def __init__(self, engine: Engine, recorders: Recorders | None = None) -> None:
        self._engine = engine
        self._recorders = recorders
        self._known: Mapping[_Process, Started | None] = {}

    def of(self, host: str | None, pid: int | None, pid_started: int | None) -> Started | None:
        return self._known.get((host, pid, pid_started))

    def budget_of(self, reading: RankReading) -> EngineBudget | None:
        for record in self._recorders.records if self._recorders is not None else ():
            is_this = record.identity.pid == reading.pid and record.identity.host == reading.host
            if is_this and record.table is not None and record.table.engine_budget is not None:
                return record.table.engine_budget
        reported = self.of(reading.host, reading.pid, reading.pid_started)
        return None if reported is None else reported.engine_budget

    async def learn(self, workers: Sequence[WorkerMemory]) -> None:
        """Call the workers (op ``budget``) if any of these, which have just responded, is new."""
        present = {(worker.host, worker.pid, worker.pid_started) for worker in workers}
        if not present - self._known.keys():
            return
        try:
            responses = await self._engine.rpc("budget")
        except EngineError:
            return  # it is reported where its memory is read, and tried again at the next poll
        self._known = dict.fromkeys(present) | dict(map(_started, responses))


def _started(response: Mapping[str, Any]) -> tuple[_Process, Started | None]:
    process = response.get("host"), response.get("pid"), response.get("pid_started")
    try:
        reported = {key: response.get(key) for key in ("engine_budget", "start")}
        # An older package does not know the operation.
        return process, _STARTED.validate_python(cleaned(reported)) if response.get("ok") else None
    except ValidationError:
        return process, None
