"""Sentences for an operator: why the engine cannot be read, and what to change. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from highwater.engine.capabilities import EXTENSION, Capabilities
from highwater.engine.life import EndedStart
from highwater.model.engine import MissingRank, missing_text
from highwater.model.rank import StartPhase
from highwater.model.units import span_text
from highwater.process.errors import EngineError, EngineNotListening, EngineUnreachable, EngineUntrusted

SEEMS_LOADING: Final = "the engine seems to be loading"
STARTS_ENDED: Final = "the engine's last "  # and how it ended
NOT_KNOWN_WHY: Final = "whether it was stopped or failed is not known without engine_log"

# What a worker does after a phase of its start (`model.rank.StartPhase`).
_NEXT_PHASE: Final = {
    "before": "setting up the device",
    "init": "loading weights",
    "weights": "measuring what a step needs",
    "profile": "allocating the KV cache",
    "kv_cache": "capturing graphs",
    "graphs": "warming up",
}


def loading_phase(done: Sequence[StartPhase]) -> str:
    """Return what a start does now, in a few words, by the phases that the slowest worker has done."""
    return _NEXT_PHASE.get(done[-1].name, "starting its API server") if done else "starting its processes"


def failure_text(failure: EngineError, url: str, *, is_up: bool, was_there: bool) -> str:
    """``is_up``: at the poll before; ``was_there``: an engine has responded at the URL before."""
    is_absent = isinstance(failure, EngineUnreachable) and not isinstance(failure, EngineUntrusted)
    if not is_absent or (is_up and not isinstance(failure, EngineNotListening)):
        return str(failure)
    if was_there:
        return f"nothing answers any more at {url} ({failure})"
    return f"nothing answers yet at {url} ({failure}); is vLLM running there, and is engine_url right?"


def stopped_text(at: float) -> str:
    """``at``: when the engine was seen to have ended in order, in Unix seconds."""
    return f"stopped in order at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}; start it again"


def dead_text(failure: str, seconds: float, *, was_seen: bool) -> str:
    """``seconds``: since the engine ended; ``was_seen``: it responded."""
    left = "" if was_seen else " by the files that it left"
    return f"dead for {span_text(seconds)}{left}, and no restart of it is seen: {failure}"


def kv_blocks_held(connector: str | None, usage: float | None) -> str:
    """Return who may hold KV blocks while no request runs; ``connector``: as ``Capabilities``."""
    who = "whether a KV connector holds them is not known (in development mode GET /server_info names it)"
    if connector is not None:
        ended = f"the KV connector {connector} may hold those of requests that have ended, or that it loads"
        who = ended if connector else "no KV connector is configured, and what holds them is not known"
    return f"KV blocks are in use{f' ({usage:.1%})' if usage else ''} though no request runs: {who}"


def starting_text(process: str, failure: EngineError, url: str, earlier: str = "") -> str:
    """``process``: name and pid of one that runs; ``earlier``: how the engine's earlier starts ended."""
    text = f"{SEEMS_LOADING}: a process of it runs ({process}). Nothing answers yet at {url} ({failure})"
    return f"{text}; before, {earlier}" if earlier else f"{text}; if that lasts, is engine_url right?"


def ended_starts_text(last: EndedStart, count: int, now: float) -> str:
    memory = f", at {last.end.memory}" if last.end.memory else ""
    doubt = f"; {NOT_KNOWN_WHY}" if last.is_by_itself else ""
    end = f"{last.end.how} {span_text(max(now - last.at, 0.0))} ago{memory}{doubt}"
    several = f"{count} starts ended before it was ready; the last one"
    return f"{STARTS_ENDED}{'start' if count == 1 else several} {end}"


def loading_text(phases: Sequence[StartPhase], url: str) -> str:
    done = f"phases done: {', '.join(phase.name for phase in phases)}" if phases else "no phase is done yet"
    return f"the engine is loading ({done}); nothing answers yet at {url}"


def missing_hint(missing: Sequence[MissingRank], expected: int, recorders_problem: str | None) -> str:
    """Return a sentence on the missing ranks; ``recorders_problem``: empty if none, ``None`` without recorders."""
    there = f"{expected - len(missing)} of {expected} ranks"
    if recorders_problem is None:
        return (
            f"{there} answer: vLLM's collective_rpc returns only the first data-parallel engine's results; with "
            "recorder_dir the others report too"
        )
    problem = f"; {recorders_problem}" if recorders_problem else ""
    return f"{there} report; missing: {missing_text(missing)}{problem}"


def setup_hint(capabilities: Capabilities) -> str | None:
    """Return what to add to the engine's environment and command line, so that the workers' memory can be read.

    ``None`` where it can, and where it could: recorders that are silent are there.
    """
    if capabilities.collective_rpc or capabilities.has_recorders:
        return None
    flag = f"--worker-extension-cls {EXTENSION} (with the folder that holds highwater_worker on its PYTHONPATH)"
    if not capabilities.dev_mode:
        return (
            f"start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment and {flag}; to only watch it, run `highwater "
            "extension --copy-to DIR`, start vLLM with DIR on its PYTHONPATH and HIGHWATER_RECORDER_DIR=FOLDER in its "
            "environment, and the sidecar with recorder_dir=FOLDER"
        )
    if capabilities.extension is None and capabilities.server_info:
        return f"start vLLM with {flag}"
    if capabilities.extension is None:
        return (
            f"vLLM does not report its worker extension class (GET /server_info); if it was started with {flag}, "
            "set engine_has_extension=true"
        )
    return (
        f"vLLM was started with --worker-extension-cls {capabilities.extension}; if that class inherits from "
        f"{EXTENSION}, set engine_has_extension=true"
    )
