"""The budgets that workers without recorder files report, asked once for each start of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from highwater.accounting.engine_budget import EngineBudget
from highwater.engine.client import Engine
from highwater.errors import EngineError
from highwater.readings import StartPhase, WorkerMemory
from highwater.text.printable import cleaned

_Process = tuple[str | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Started:
    """One worker's start.

    Attributes:
        engine_budget: What it left in the worker's attributes.
        start: Its phases; empty where nobody saw them.
    """

    engine_budget: EngineBudget
    start: tuple[StartPhase, ...] = ()


_STARTED = TypeAdapter(Started)


class EngineBudgets:
    """The last engine's budgets by worker process.

    Args:
        engine: Whose workers are called (op ``budget``), when another process has answered than before.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: Mapping[_Process, Started | None] = {}

    def of(self, host: str | None, pid: int | None, pid_started: int | None) -> Started | None:
        """Return one worker's; ``None`` where it has not said it."""
        return self._known.get((host, pid, pid_started))

    async def learn(self, workers: Sequence[WorkerMemory]) -> None:
        """Ask the workers, if any of them is new; those that cannot say it are not asked again.

        Args:
            workers: All that have just answered a call.
        """
        present = {(worker.host, worker.pid, worker.pid_started) for worker in workers}
        if not present - self._known.keys():
            return
        try:
            answers = await self._engine.rpc("budget")
        except EngineError:
            return  # an engine that does not answer is reported where its memory is read; asked again next time
        self._known = dict.fromkeys(present) | dict(map(_started, answers))


def _started(answer: Mapping[str, Any]) -> tuple[_Process, Started | None]:
    process = answer.get("host"), answer.get("pid"), answer.get("pid_started")
    if not answer.get("ok"):  # an older package does not know the operation
        return process, None
    try:
        reported = {key: answer.get(key) for key in ("engine_budget", "start")}
        return process, _STARTED.validate_python(cleaned(reported))
    except ValidationError:
        return process, None
