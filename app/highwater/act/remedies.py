"""The remedies, which give memory back: when each is refused, and what it sends to the engine.

A new one is a row in ``model/remedies.py``, a class here and its place in ``all_remedies``. What they have in common
comes first, then those that call the workers, and vLLM's own resets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

from highwater.engine.capabilities import EVERY_RESET_SAFE_SINCE, RESETS_SINCE, Capabilities, no_extension
from highwater.engine.client import Engine, EngineResponse, WorkerAnswer
from highwater.model.engine import EngineLoad, EngineStatus
from highwater.model.remedies import TRAITS, UNNEEDED, Mode, RemedyTraits, Target
from highwater.model.units import gib_text
from highwater.process.errors import EngineError, EngineGarbled
from highwater.process.untrusted import part
from highwater.watch.recorder.progress import kv_blocks_held
from highwater.watch.sources import read_load

# The longest that calls of the workers go on, and the longest pause between two of them.
MAX_SECONDS = 30.0
MAX_PAUSE_SECONDS = 0.2
# Between two tries of a reset that the engine puts off.
RETRY_SECONDS = 0.25
_IN_USE = "not done by the engine: KV blocks are in use"
_ASLEEP = "the engine is asleep: its pools are unmapped"

Answers: TypeAlias = Sequence[WorkerAnswer]

_ADDED_UP = (
    *("spilled_entries", "spilled_bytes", "host_bytes_added", "restored_entries", "restored_bytes"),
    *("copy_seconds", "elapsed_ms"),
)
_WHY_KEPT = {
    "needed_entries": "are needed by requests",
    "over_budget_entries": "do not fit into the host's budget",
    "unspillable_entries": "cannot be copied",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    query: str = ""  # the client's query string, passed on unchanged on the drop-in paths
    target: Target = UNNEEDED  # the end of a trim; other remedies ignore it
    patience_seconds: float = 0.0  # for how long a remedy that the engine puts off may be repeated
    kv_connector: str | None = None  # as ``Capabilities``


NO_OPTIONS = RunOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    ok: bool  # the engine did it, as far as it reports that
    reason: str | None = None  # what went wrong, or what the engine did not report
    refused: bool = False  # nothing was done, on purpose
    answer: EngineResponse | None = None  # the engine's own, for the drop-in paths
    detail: tuple[WorkerAnswer, ...] = ()  # each worker's answer, in rank order


class Remedy:
    """One way of giving memory back."""

    traits: RemedyTraits
    automatic_since: str | None = None  # the vLLM version from which on the policy may run it; None: every version
    parameters: tuple[str, ...] = ()  # the query's keys that vLLM takes on the remedy's path, from 0.11 to 0.33
    paces_after = False  # requests are let through one by one for a while after they were held for it

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


# --- remedies that call the workers, where their answers are the result ---
#
# A worker's call stops its engine while it runs. So a call that moves much ends early and says what is left
# (worker_ext/README.md, `max_seconds`), and the rest follows in further calls, after a pause as long as the call was.


class Release(Remedy):
    """Garbage collection, then ``empty_cache`` on every worker (on CPU: free heap back to the system).

    While the engine sleeps it takes nothing and touches no pool: it gives back what the sleep left behind.
    """

    traits = TRAITS["release"]

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        del mode, status
        return no_extension(capabilities)

    async def run(self, engine: Engine, options: RunOptions) -> RunResult:
        del options
        return await call_workers(engine, "release")


class TrimEncoderCache(Remedy):
    """Moves least recently used encoder outputs to host memory; the next access brings each back.

    The scheduler never notices. ``host_budget_bytes`` is for each rank; None: half of what the host has free.
    """

    traits = TRAITS["trim_encoder_cache"]

    def __init__(self, *, host_budget_bytes: int | None = None) -> None:
        self._host_budget_bytes = host_budget_bytes

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Refuse where the cache is not the workers' own. Each worker refuses for reasons that only it can see."""
        del mode
        return _ASLEEP if status.state == "sleeping" else no_extension(capabilities) or connector_refusal(capabilities)

    async def run(self, engine: Engine, options: RunOptions) -> RunResult:
        """Call op ``trim`` on every worker, with the same target: all ranks hold the same outputs and choose alike."""
        wanted = {**asdict(options.target), "host_budget_bytes": self._host_budget_bytes}
        payload = {key: value for key, value in wanted.items() if value is not None}
        run = await call_workers_in_rounds(engine, "trim", payload, again=_for_the_rest)
        return replace(run, reason=_fell_short(run.detail)) if run.ok and run.reason is None else run


def _fell_short(answers: Answers) -> str | None:
    """Return how much less than asked for the rank moved that moved least of it, and why it was not more.

    ``None`` where it was enough, to the decimal that is shown, or where no answer says how much was moved.
    """
    telling = [answer for answer in answers if _number(answer, "spilled_bytes") is not None]
    if not telling:
        return None
    worst = max(
        telling, key=lambda answer: (_number(answer, "asked_bytes") or 0) - (_number(answer, "spilled_bytes") or 0)
    )
    asked, moved, kept = _number(worst, "asked_bytes"), _number(worst, "spilled_bytes") or 0, part(worst, "kept")
    if moved >= (1 if asked is None else asked):  # without a target all is moved that can be
        return None
    if gib_text(moved) == gib_text(asked):
        return None
    wanted = "" if asked is None else f" of the {gib_text(asked)} asked for"
    why = [f"{kept[name]} entries {what}" for name, what in _WHY_KEPT.items() if kept.get(name)]
    if not why and _number(part(worst, "encoder_cache"), "device_bytes") == 0:
        why = [f"its device holds no {'more ' if moved else ''}encoder outputs"]
    because = f": {', '.join(why)}" if why else ""
    return f"{worst.rank_name} could move {f'only {gib_text(moved)}' if moved else 'nothing'}{wanted}{because}"


def _for_the_rest(payload: Mapping[str, Any], answers: Answers) -> Mapping[str, Any]:
    """Bytes to let go become bytes to keep: ranks that came further than others then end where the others do.

    Raises EngineGarbled where an answer does not say what it holds or has left: the same request would move too much.
    """
    if "free_bytes" not in payload:
        return payload
    keep = 0
    for answer in answers:
        if answer.get("complete", True):
            continue
        held, remaining = _number(part(answer, "encoder_cache"), "device_bytes"), _number(answer, "remaining_bytes")
        if held is None or remaining is None:
            raise EngineGarbled("a worker does not say how much is left")
        keep = max(keep, held - remaining)
    return {**{key: value for key, value in payload.items() if key != "free_bytes"}, "keep_bytes": keep}


def _number(answer: Mapping[str, Any], name: str) -> int | None:
    """Return a figure of an answer; ``None`` where a worker package of another version has none."""
    value = answer.get(name)
    return value if isinstance(value, int) else None


async def call_workers(engine: Engine, op: str, payload: Mapping[str, Any] | None = None) -> RunResult:
    """Run one operation on every worker. Raises EngineError where the engine gave no usable response."""
    answers = await engine.rpc(op, payload)
    failed = [answer for answer in answers if not answer.is_ok]
    if not failed:
        return RunResult(ok=True, detail=tuple(answers))
    return RunResult(
        ok=False,
        reason=f"{len(failed)} of {len(answers)} ranks: {failed[0].message}",
        # With one rank that did it, something was done.
        refused=len(failed) == len(answers) and all(answer.code == "refused" for answer in failed),
        detail=tuple(answers),
    )


async def call_workers_in_rounds(
    engine: Engine,
    op: str,
    payload: Mapping[str, Any],
    *,
    again: Callable[[Mapping[str, Any], Answers], Mapping[str, Any]] = lambda payload, _: payload,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> RunResult:
    """Call every worker until none has anything left, or ``MAX_SECONDS`` have passed; return what all calls moved.

    ``again`` returns the next call's payload, from the last one's payload and answers. Raises EngineError where the
    engine gave no usable response to the first call; later, what was done until then is returned.
    """
    until = clock() + MAX_SECONDS
    run = await call_workers(engine, op, payload)
    done: Answers = run.detail
    while run.ok and (left := [answer for answer in run.detail if not answer.get("complete", True)]):
        if clock() >= until:
            entries, size = (
                max(int(answer.get(f"remaining_{of}", 0)) for answer in left) for of in ("entries", "bytes")
            )
            rest = f"up to {entries} entries ({gib_text(size)}) a rank are left; ask again"
            return RunResult(ok=True, reason=f"stopped after {MAX_SECONDS:.0f} s: {rest}", detail=tuple(done))
        await pause(min(MAX_PAUSE_SECONDS, max(float(answer.get("elapsed_ms", 0)) for answer in run.detail) / 1000))
        try:
            payload = again(payload, run.detail)
            run = await call_workers(engine, op, payload)
        except EngineError as exc:
            return RunResult(ok=False, reason=f"after a part of it: {exc}", detail=tuple(done))
        if not run.ok:
            # Refused or failed now, as where the host's budget is used up: what went before it is done.
            return RunResult(ok=run.refused, reason=f"after a part of it: {run.reason}", detail=tuple(done))
        done = _added_up(done, run.detail)
    return run if not run.ok else RunResult(ok=True, detail=tuple(done))


def _added_up(before: Answers, last: Answers) -> Answers:
    if len(before) != len(last):  # a worker that came or went in between
        return last
    # The requested bytes are the first call's; everything else that is no sum is the last one's.
    kept = ("asked_bytes",)
    return [
        WorkerAnswer(
            new
            | {key: old[key] + new[key] for key in _ADDED_UP if key in old and key in new}
            | {key: old[key] for key in kept if key in old}
        )
        for old, new in zip(before, last, strict=True)
    ]


# --- vLLM's own resets: ``POST /NAME``, with the engine's response as the result ---


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
    parameters = ("reset_running_requests", "reset_external")

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


def all_remedies(*, host_budget_bytes: int | None = None) -> tuple[Remedy, ...]:
    trim = TrimEncoderCache(host_budget_bytes=host_budget_bytes)
    return (Release(), trim, ResetEncoderCache(), ResetMmCache(), ResetPrefixCache())


REMEDIES = all_remedies()
"""The remedies as they are without settings."""
