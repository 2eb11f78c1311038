"""The workers' memory, from our extension inside them."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine
from highwater.errors import EngineGarbled, flaw
from highwater.memory.engine_budgets import EngineBudgets
from highwater.memory.sources.source import Observation, Reach
from highwater.readings import SCHEMA, WorkerMemory

_WIRE = TypeAdapter(tuple[WorkerMemory, ...])


class Workers:
    """Op ``memory`` on every worker that the API server reaches.

    Args:
        engine: The engine.
        budgets: Asks workers that are new for their start; None: they are not asked.
    """

    name = "workers"
    reach: Reach = "workers"

    def __init__(self, engine: Engine, budgets: EngineBudgets | None = None) -> None:
        self._engine = engine
        self._budgets = budgets

    def available(self, capabilities: Capabilities) -> bool:
        """Only where our extension is known to be loaded."""
        return capabilities.collective_rpc

    async def read(self) -> Observation:
        """Ask every worker.

        Raises:
            EngineError: No good answer.
        """
        answers = await self._engine.rpc("memory")
        for answer in answers:
            if not answer.get("ok"):
                raise EngineGarbled(f"rank {answer.get('rank')} could not read its memory: {answer.get('error')}")
            if answer.get("schema") != SCHEMA:
                raise EngineGarbled(f"the worker extension speaks schema {answer.get('schema')}, the sidecar {SCHEMA}")
        try:
            workers = _WIRE.validate_python(answers)
        except ValidationError as exc:
            raise EngineGarbled(f"worker call memory: {flaw(exc.errors(include_url=False))}") from exc
        if self._budgets is not None:
            await self._budgets.learn(workers)
        return Observation(workers=workers)
