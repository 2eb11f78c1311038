"""The workers' memory, from our extension inside them."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine
from highwater.errors import EngineGarbled
from highwater.flaws import flaw
from highwater.memory.engine_budgets import EngineBudgets
from highwater.memory.sources.source import Observation, Source
from highwater.readings.rank import WorkerMemory
from highwater.readings.schema import SCHEMA
from highwater.text.table import rank_title

_WIRE = TypeAdapter(tuple[WorkerMemory, ...])


class Workers(Source):
    """Op ``memory`` on every worker that the API server reaches; ``budgets`` then calls new workers for their start."""

    name = "workers"
    reach = "workers"

    def __init__(self, engine: Engine, budgets: EngineBudgets | None = None) -> None:
        super().__init__(engine)
        self._budgets = budgets

    def available(self, capabilities: Capabilities) -> bool:
        return capabilities.collective_rpc

    async def read(self) -> Observation:
        responses = await self._engine.rpc("memory")
        for response in responses:
            if not response.get("ok"):
                where = f"rank {rank_title(response.get('dp_rank'), response.get('rank'))}"
                raise EngineGarbled(f"{where} could not read its memory: {response.get('error')}")
            if response.get("schema") != SCHEMA:
                raise EngineGarbled(
                    f"the worker extension speaks schema {response.get('schema')}, the sidecar {SCHEMA}"
                )
        try:
            workers = _WIRE.validate_python(responses)
        except ValidationError as exc:
            raise EngineGarbled(f"worker call memory: {flaw(exc.errors())}") from exc
        if self._budgets is not None:
            await self._budgets.learn(workers)
        return Observation(workers=workers)
