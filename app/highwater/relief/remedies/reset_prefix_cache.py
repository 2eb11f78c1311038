"""Drop the cached prefixes from the KV pool."""

from __future__ import annotations

from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine
from highwater.memory.sources.engine_metrics import parse_load
from highwater.readings import EngineLoad, EngineStatus, Mode
from highwater.relief.remedies.remedy import Ask, Run, missing, post

RETRY_SECONDS = 0.25
_IN_USE = "not done by the engine: KV blocks are in use"


class ResetPrefixCache:
    """The engine's ``/reset_prefix_cache``. It fails silently while any block is in use; 0.26 and newer say so."""

    name = "reset_prefix_cache"
    frees = "KV blocks that hold cached prefixes, for new requests"
    does_not_free = "device memory: the KV pool is preallocated and keeps its size"
    needs_release = False
    path = "/reset_prefix_cache"
    automatic_since = None
    paces_after = False

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Harmless to traffic on every version."""
        del status, mode
        return None if capabilities.reset_prefix_cache else missing(self.path, "0.11")

    def needs_gate(self, capabilities: Capabilities, mode: Mode) -> bool:
        """In safe mode: running requests use blocks."""
        del capabilities
        return mode == "safe"

    async def run(self, engine: Engine, ask: Ask) -> Run:
        """POST it, again while blocks are in use and patience lasts, and return whether it worked.

        Raises:
            EngineError: The engine gave no good answer.
        """
        tries = AsyncRetrying(
            retry=retry_if_result(lambda run: run.reason == _IN_USE),
            stop=stop_after_delay(ask.patience_seconds),
            wait=wait_fixed(RETRY_SECONDS),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        run: Run = await tries(self._once, engine, ask)
        return run

    async def _once(self, engine: Engine, ask: Ask) -> Run:
        before = await _load(engine)
        run = await post(engine, self.path, ask.query)
        if not run.ok or run.answer is None:
            return run
        success = run.answer.json_object().get("success")
        if success is None:
            success = _was_possible(before, await _load(engine))
        if success is None:
            unknown = "this vLLM does not tell whether it worked (0.26 does), and requests came or went meanwhile"
            return Run(ok=True, reason=unknown, answer=run.answer)
        return Run(ok=success, reason=None if success else _IN_USE, answer=run.answer)


async def _load(engine: Engine) -> EngineLoad:
    return parse_load(await engine.get_text("/metrics"))


def _was_possible(before: EngineLoad, after: EngineLoad) -> bool | None:
    """Return whether no block was in use, by the engine's counts around the call; ``None`` where they do not show it.

    The engine refuses if and only if one was (vllm/v1/core/block_pool.py, ``reset_prefix_cache``).
    """
    # Requests that wait have no blocks yet.
    free = [load.requests_running == 0 and load.kv_cache_usage_ratio == 0 for load in (before, after)]
    if before.work_done != after.work_done or any(load.kv_cache_usage_ratio is None for load in (before, after)):
        return None
    return True if all(free) else False if not any(free) else None
