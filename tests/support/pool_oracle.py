"""Pools of random layers compared with vLLM's own functions, which are called in an interpreter that has vLLM.

Nothing of vLLM is imported here: `pool_oracle_script` runs in the other interpreter, for a bounded time, and a bounded
part of its output is read. Every figure that differs is returned as a sentence.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvplan import PlanError
from kvplan.flags import Limits
from kvplan.pool import KvPool
from kvplan.specs import Layers

_SCRIPT: Final = Path(__file__).with_name("pool_oracle_script.py")
_MAX_ANSWER_BYTES: Final = 1 << 24
# Importing torch and vLLM takes ten seconds or more; a question takes milliseconds.
_TIMEOUT_SECONDS: Final = 120.0


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
    environ: Mapping[str, str] | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> Answers:
    """Size pools with the vLLM that an interpreter can import; ``environ`` is added to its environment.

    ``timeout_seconds`` include the import of vLLM. Raises PlanError: it could not be started, took too long, or did not
    answer every question.
    """
    try:
        # The script is handed over as text: run by its path, the modules beside it would hide others of their names.
        done = subprocess.run(
            [str(python), "-c", _SCRIPT.read_text()],
            input="".join(question.as_json() + "\n" for question in questions).encode(),
            capture_output=True,
            cwd="/",
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **(environ or {})},
            timeout=timeout_seconds,
            check=False,
        )
    except OSError as exc:
        raise PlanError(f"oracle: {python} could not be started ({exc.strerror}); must be a Python with vLLM") from exc
    except subprocess.TimeoutExpired as exc:
        raise PlanError(f"oracle: {python} did not answer within {timeout_seconds:.0f} s") from exc
    lines = done.stdout[:_MAX_ANSWER_BYTES].decode(errors="replace").splitlines()
    if len(lines) != len(questions) + 1:
        last = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1] or "it said nothing"
        raise PlanError(f"oracle: {python} answered {max(len(lines) - 1, 0)} of {len(questions)} questions: {last}")
    try:
        head, *answers = map(json.loads, lines)
        return Answers(head["vllm_version"], answers)
    except (ValueError, LookupError, TypeError) as exc:
        raise PlanError(f"oracle: {python} answered something else than JSON: {lines[0][:120]!r}") from exc


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
