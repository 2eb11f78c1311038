"""Pools of random layers compared with vLLM's own functions, which are called in an interpreter that has vLLM.

Nothing of vLLM is imported here: `pool_oracle_script` runs in the other interpreter, for a bounded time. Every figure
that differs is returned as a sentence.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvplan import Limits, PlanError
from kvplan.pool import KvPool
from kvplan.specs import Layers

_SCRIPT: Final = Path(__file__).with_name("pool_oracle_script.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    workers: Sequence[Layers]
    available_bytes: Sequence[int]
    limits: Limits

    def as_json(self) -> str:
        workers = [
            {name: {"kind": spec.kind, **asdict(spec)} for name, spec in worker.items()} for worker in self.workers
        ]
        available = list(self.available_bytes)
        return json.dumps({"workers": workers, "available_bytes": available, "limits": asdict(self.limits)})


@dataclass(frozen=True, slots=True)
class Answers:
    """The version of vLLM, and an answer of `pool_oracle_script` for each question."""

    vllm_version: str
    answers: Sequence[Mapping[str, Any]]


def ask_oracle(
    python: str | Path,
    questions: Sequence[Question],
    *,
    environ: Mapping[str, str],
    timeout_seconds: float,
) -> Answers:
    """Size pools with the vLLM that an interpreter can import; ``environ`` is added to its environment."""
    # The script is handed over as text: run by its path, the modules beside it would hide others of their names.
    done = subprocess.run(
        [str(python), "-c", _SCRIPT.read_text()],
        input="".join(question.as_json() + "\n" for question in questions),
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **environ},
        timeout=timeout_seconds,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(questions) + 1, f"{max(len(lines) - 1, 0)} of {len(questions)} answered: {done.stderr}"
    head, *answers = map(json.loads, lines)
    return Answers(head["vllm_version"], answers)


def differences(planned: KvPool | PlanError, answer: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each figure of a plan, or of its refusal, that differs from vLLM's answer."""
    if "unanswerable" in answer:
        return (f"vLLM could not be asked: {answer['unanswerable']}",)
    if isinstance(planned, PlanError):
        if answer["fits"] or (answer["refused_by_check"] and not answer["checked_before_grouping"]):
            return (f"the plan refuses these layers ({planned}), vLLM does not",)
        return ()
    if not answer["fits"] and not answer["refused_by_check"] and planned.blocks > 0:
        return (f"the plan is a pool, vLLM ends with {answer['error']}",)
    return tuple(
        f"{name} is {ours} in the plan and {theirs} in vLLM"
        for name, ours, theirs in _figures(planned, answer)
        if ours != theirs
    )


def _figures(pool: KvPool, answer: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    figures: list[tuple[str, object, object]] = [("fits", pool.fits, answer["fits"])]
    if pool.refusal is not None and answer["checks"]:
        last = answer["checks"][-1]
        if len(answer["checks"]) > 1:
            figures.append(("worker of the refusal", pool.refusal.worker, len(answer["checks"]) - 1))
        figures += [
            ("needed_bytes", pool.refusal.needed_bytes, last["needed_bytes"]),
            ("available bytes compared", pool.refusal.available_bytes, last["available_bytes"]),
            ("estimated maximum length", pool.refusal.max_model_len, last["max_model_len"]),
        ]
    if answer["fits"]:
        checks = answer["checks"]
        figures += [
            ("blocks", pool.blocks, answer["blocks"]),
            ("tokens", pool.tokens, answer["tokens"]),
            ("max_concurrency", pool.max_concurrency, answer["max_concurrency"]),
            ("needed_bytes", pool.needed_bytes, checks[min(pool.binding_worker, len(checks) - 1)]["needed_bytes"]),
            ("groups", len(pool.groups), len(answer["groups"])),
            (
                "block sizes",
                [group.block_size for group in pool.groups],
                [group["block_size"] for group in answer["groups"]],
            ),
        ]
    return figures
