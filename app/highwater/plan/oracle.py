"""A plan compared with vLLM's own answer to its command line, which `highwater_worker.plan` gives where vLLM is."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvplan.errors import PlanError
from kvplan.pool import KvPool

_MODULE: Final = "highwater_worker.plan"
_FIGURES: Final = (
    *("fits", "blocks", "bytes_per_block", "tokens", "max_concurrency", "needed_bytes"),
    "max_model_len_that_fits",
)


def ask_vllm(
    python: str | Path, command: Sequence[str], *, card: str, kv_cache_bytes: int, path: Sequence[Path]
) -> Mapping[str, Any]:
    """Return what the vLLM of an interpreter says to a command line, on a card that it is made to believe in.

    ``card`` is a name or a compute capability; ``path`` has `highwater_worker`, and goes before `PYTHONPATH`. Raises
    PlanError: the interpreter cannot be started, or its vLLM cannot be asked.
    """
    own = ("--card", card, "--kv-cache-bytes", str(kv_cache_bytes))
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, path), os.environ.get("PYTHONPATH")])),
    }
    try:
        # The module has deadlines of its own.
        done = subprocess.run(  # noqa: S603 - the interpreter is the operator's choice; nothing passes through a shell
            [str(python), "-m", _MODULE, *own, "--", *command], capture_output=True, env=environ, check=False
        )
    except OSError as exc:
        raise PlanError(f"oracle: {python} could not be started ({exc.strerror}); must be a Python with vLLM") from exc
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as exc:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "it said nothing"
        raise PlanError(f"oracle: {python} did not answer: {last}") from exc
    if "kv_cache" not in answer:
        why = answer.get("error") or answer.get("refusal", {}).get("message")
        raise PlanError(f"oracle: vLLM gives no plan ({answer['status']}): {why} {answer.get('help') or ''}".rstrip())
    return answer


def differences(planned: KvPool, answer: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each figure of a plan that differs from vLLM's answer."""
    theirs = answer["kv_cache"]
    figures = [(name, getattr(planned, name), theirs.get(name)) for name in _FIGURES]
    return tuple(
        f"{name} is {ours} in the plan and {vllms} in vLLM"
        for name, ours, vllms in figures
        if vllms is not None and ours != vllms
    )
