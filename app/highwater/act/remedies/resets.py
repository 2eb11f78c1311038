"""The remedies that are vLLM's own resets: ``POST /NAME``, with the engine's response as the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

from highwater.engine.capabilities import EVERY_RESET_SAFE_SINCE, RESETS_SINCE, Capabilities
from highwater.engine.client import Engine, EngineResponse
from highwater.engine.hints import kv_blocks_held
from highwater.model.engine import EngineLoad, EngineStatus
from highwater.model.remedies import TRAITS, UNNEEDED, Mode, RemedyTraits, Target
from highwater.watch.sources import parse_load


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of one run.

    Attributes:
        query: The client's query string, passed on unchanged on the drop-in paths.
        target: The end of a trim; other remedies ignore it.
        patience_seconds: The time for which a remedy that the engine puts off may be repeated.
        kv_connector: As ``Capabilities``.
    """

    query: str = ""
    target: Target = UNNEEDED
    patience_seconds: float = 0.0
    kv_connector: str | None = None


NO_OPTIONS = RunOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of one run.

    Attributes:
        ok: True if the engine did it, as far as it reports that.
        reason: What went wrong, or what the engine did not report.
        refused: True if nothing was done, on purpose.
        answer: The engine's own response, for the drop-in paths.
        detail: Each worker's answer, in rank order.
    """

    ok: bool
    reason: str | None = None
    refused: bool = False
    answer: EngineResponse | None = None
    detail: tuple[Mapping[str, Any], ...] = ()


class Remedy:
    """One way of giving memory back.

    Attributes:
        traits: What it frees, and what it is credited with.
        automatic_since: The vLLM version from which on the policy may run it; ``None``: every version.
        paces_after: True if requests are let through one by one for a while after they were held for it.
    """

    traits: RemedyTraits
    automatic_since: str | None = None
    paces_after: bool = False

    @property
    def name(self) -> str:
        return self.traits.name

    @property
    def path(self) -> str | None:
        return None

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Return why it must not run now, or ``None``.

        ``safe`` must harm no request; with ``now`` an operator wants it, and only what can hang or kill the engine is
        refused.
        """
        raise NotImplementedError

    def needs_gate(self, capabilities: Capabilities, mode: Mode) -> bool:
        del capabilities, mode
        return False

    async def run(self, engine: Engine, options: RunOptions) -> RunResult:
        """Do it once. Raises EngineError where the engine gave no usable response."""
        raise NotImplementedError


def operators_only(remedy: Remedy, capabilities: Capabilities, status: EngineStatus) -> str | None:
    since = remedy.automatic_since
    if status.state == "sleeping":
        return "the engine is asleep: rules leave it alone, and an operator may ask for a release"
    if since is None or capabilities.at_least(since):
        return None
    return f"before vLLM {since} only an operator may ask for it: a request that does not pass here would be harmed"


def connector_refusal(capabilities: Capabilities) -> str | None:
    if not capabilities.ec_connector:
        return None
    return "an encoder-cache connector is configured, which keeps references into the cache"


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
        load = await _load(engine) if result.reason == _IN_USE else EngineLoad()
        if load.requests_running != 0:
            return result
        held = kv_blocks_held(options.kv_connector, load.kv_cache_usage_ratio)
        return replace(result, reason=f"not done by the engine: {held}")

    async def _once(self, engine: Engine, options: RunOptions) -> RunResult:
        before = await _load(engine)
        result = await super().run(engine, options)
        if not result.ok or result.answer is None:
            return result
        success = result.answer.json_object().get("success")
        if success is None:
            # It refuses if and only if a block is in use (vllm/v1/core/block_pool.py, `reset_prefix_cache`). Its counts
            # around the call show that, unless requests came or went; those that wait have no blocks yet.
            after = await _load(engine)
            free = {load.requests_running == 0 and load.kv_cache_usage_ratio == 0 for load in (before, after)}
            is_known = None not in (before.kv_cache_usage_ratio, after.kv_cache_usage_ratio)
            if len(free) > 1 or not is_known or before.work_done != after.work_done:
                unknown = "this vLLM does not tell whether it worked (0.26 does), and requests came or went meanwhile"
                return RunResult(ok=True, reason=unknown, answer=result.answer)
            success = True in free
        return RunResult(ok=success, reason=None if success else _IN_USE, answer=result.answer)


async def _load(engine: Engine) -> EngineLoad:
    return parse_load(await engine.get_text("/metrics"))
