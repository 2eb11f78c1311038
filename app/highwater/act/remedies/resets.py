"""The remedies that are vLLM's own resets: ``POST /NAME``, with the engine's response as the result."""

from __future__ import annotations

from dataclasses import replace

from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

from highwater.act.remedies.remedy import Remedy, RunOptions, RunResult, connector_refusal
from highwater.engine.capabilities import EVERY_RESET_SAFE_SINCE, RESETS_SINCE, Capabilities
from highwater.engine.client import Engine
from highwater.model.engine import EngineLoad, EngineStatus
from highwater.model.remedies import TRAITS, Mode
from highwater.watch.recorder.progress import kv_blocks_held
from highwater.watch.sources import read_load

RETRY_SECONDS = 0.25
_IN_USE = "not done by the engine: KV blocks are in use"


class _Reset(Remedy):
    """One of vLLM's resets, which in safe mode waits for running requests unless a subclass knows better."""

    @property
    def path(self) -> str:
        return f"/{self.name}"

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        del status, mode
        if getattr(capabilities, self.name):
            return None
        since = RESETS_SINCE[self.name]
        if capabilities.at_least(since) and not capabilities.dev_mode:
            return f"this engine has no {self.path}: it needs VLLM_SERVER_DEV_MODE=1 in its environment"
        return f"this engine has no {self.path}; vLLM {since} and newer with VLLM_SERVER_DEV_MODE=1 have it"

    def needs_gate(self, capabilities: Capabilities, mode: Mode) -> bool:
        del capabilities
        return mode == "safe"

    async def run(self, engine: Engine, options: RunOptions) -> RunResult:
        answer = await engine.post(self.path, options.query)
        if answer.status >= 400:  # noqa: PLR2004 - HTTP's errors
            return RunResult(ok=False, reason=f"the engine answered {answer.status}", answer=answer)
        return RunResult(ok=True, answer=answer)


class ResetEncoderCache(_Reset):
    """Empties the encoder cache, scheduler and workers together.

    The scheduler forgets first, in order with its queued steps, which makes it consistent under live traffic
    (vllm/v1/core/encoder_cache_manager.py ``reset``). Clearing the workers' side alone would kill the engine.
    """

    traits = TRAITS["reset_encoder_cache"]

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        if (missing := super().refusal(capabilities, status, mode)) is not None:
            return missing
        if status.state == "sleeping":
            return "the engine is asleep"
        return connector_refusal(capabilities) if mode == "safe" else None

    def needs_gate(self, capabilities: Capabilities, mode: Mode) -> bool:
        """Hold requests only where a decoder attends to the encoder's outputs throughout: their budget would be off."""
        return capabilities.encoder_decoder and mode == "safe"


class ResetMmCache(_Reset):
    """Clears the multimodal processor caches on the host. Their two sides differ if a request is rendered in between.

    A later use of an image that only one side knows then fails: vllm/v1/engine/core.py, "we don't attempt to re-sync";
    with 500, or from 0.28 on with an error to be retried. So requests are held in safe mode.

    Afterwards every image is new, and of two requests that bring the same new image one can overtake the other within
    vLLM: the sides differ again, though the slower request heals that. So requests are paced.
    """

    traits = TRAITS["reset_mm_cache"]
    # Before, a request that did not pass the gate would fail with 500 as long as one side knows its image.
    automatic_since = EVERY_RESET_SAFE_SINCE
    paces_after = True

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Refuse where it can hang the engine: at once, or when it is reset with requests under way."""
        if (missing := super().refusal(capabilities, status, mode)) is not None:
            return missing
        version = f"vLLM {capabilities.version or 'of unknown version'}"
        if not capabilities.at_least("0.14"):
            # The thread that takes requests in dies of the first difference (vllm/v1/engine/core.py,
            # `process_input_sockets`), also when the reset itself found the engine idle.
            return (
                f"{version} can hang without end when requests use the images that this makes new (upstream issue "
                "31404); 0.25.1 and newer do not. ?force=true calls it all the same, and may end the engine"
            )
        if not capabilities.at_least("0.25"):
            # A request between the two clearings leaves a key without an item behind (vllm/utils/cache.py, `touch`),
            # on which the next reset loops without end.
            return (
                f"{version} can hang without end when this is called with requests under way, and fails some that use "
                "the images that it makes new; 0.25.1 and newer do not hang. ?force=true calls it all the same, and "
                "may end the engine"
            )
        return None


class ResetPrefixCache(_Reset):
    """Drops the cached prefixes from the KV pool. It fails silently while any block is in use; 0.26 and newer say so.

    Running requests use blocks, so they are waited for in safe mode. Blocks in use while none runs, as those that a
    connector holds, come free no sooner where requests are held.
    """

    traits = TRAITS["reset_prefix_cache"]

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        missing, usage = super().refusal(capabilities, status, mode), status.kv_cache_usage_ratio
        if missing is not None or mode != "safe" or status.requests_running != 0 or not usage:
            return missing
        return f"the engine would not do it: {kv_blocks_held(capabilities.kv_connector, usage)}"

    async def run(self, engine: Engine, options: RunOptions) -> RunResult:
        tries = AsyncRetrying(
            retry=retry_if_result(lambda result: result.reason == _IN_USE),
            stop=stop_after_delay(options.patience_seconds),
            wait=wait_fixed(RETRY_SECONDS),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        result: RunResult = await tries(self._once, engine, options)
        load = await read_load(engine) if result.reason == _IN_USE else EngineLoad()
        if load.requests_running != 0:
            return result
        held = kv_blocks_held(options.kv_connector, load.kv_cache_usage_ratio)
        return replace(result, reason=f"not done by the engine: {held}")

    async def _once(self, engine: Engine, options: RunOptions) -> RunResult:
        before = await read_load(engine)
        result = await super().run(engine, options)
        if not result.ok or result.answer is None:
            return result
        success = result.answer.json_object().get("success")
        if success is None:
            # It refuses if and only if a block is in use (vllm/v1/core/block_pool.py, `reset_prefix_cache`). Its counts
            # around the call show that, unless requests came or went; those that wait have no blocks yet.
            after = await read_load(engine)
            free = {load.requests_running == 0 and load.kv_cache_usage_ratio == 0 for load in (before, after)}
            is_known = None not in (before.kv_cache_usage_ratio, after.kv_cache_usage_ratio)
            if len(free) > 1 or not is_known or before.work_done != after.work_done:
                unknown = "this vLLM does not tell whether it worked (0.26 does), and requests came or went meanwhile"
                return RunResult(ok=True, reason=unknown, answer=result.answer)
            success = True in free
        return RunResult(ok=success, reason=None if success else _IN_USE, answer=result.answer)
