"""A sweep: configurations x flags, put to vLLM on meta and to the built-in planner, and where the two differ.

`python -m tests.support.asked_sweep [VERSION]` prints how many cases each answers, and every difference.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from highwater.explain.command_line import Line
from highwater.terminal.demo.engine import DEFAULT_VERSION
from kvplan import EngineFlags, PlanError
from kvplan.generations import NEWEST_KNOWN, generation_of, text_of
from kvplan.pool import plan_pool
from tests.support.asked_starts import Asked, asked, completed, model_folder
from tests.support.plan_models import CONFIGS as SHAPES
from tests.support.printed_pools import CONFIGS, GIB

FIGURES = (
    *("fits", "blocks", "bytes_per_block", "tokens", "max_concurrency", "needed_bytes"),
    "max_model_len_that_fits",
)
REAL = ("llama-3.1-8b", "qwen2.5-7b", "qwen3-14b", "phi-2", "gemma-2-2b", "gpt-oss-20b", "qwen1.5-moe-a2.7b")
FLAGS: Mapping[str, tuple[Any, ...]] = {
    # What a sweep takes for each flag; None: not given.
    "tensor_parallel_size": (None, 2, 4, 8),
    "pipeline_parallel_size": (None, 2),
    "max_model_len": (4096, 1024, 2048, "auto"),
    "kv_cache_dtype": (None, "fp8"),
    "max_num_batched_tokens": (None, 1024, 16384),
    "enable_prefix_caching": (None, False),
    "disable_hybrid_kv_cache_manager": (None, True),
}
SMALL, LARGE = 64 << 20, 9 * GIB

Figures = Mapping[str, Any]
"""Of a pool, by the names of `FIGURES`; or `refused`, with vLLM's words."""


class Case(NamedTuple):
    """A model's configuration, a command line's flags, and the bytes of each rank's KV cache."""

    model: str
    config: Mapping[str, Any]
    flags: Mapping[str, Any]
    kv_cache_bytes: int

    def __str__(self) -> str:
        flags = ", ".join(f"{name}={value}" for name, value in self.flags.items())
        return f"{self.model} ({flags or 'defaults'}; {self.kv_cache_bytes} bytes)"


Planner = Callable[[Case], Figures | None]
"""Returns the figures of a case; None: it gives no answer to it."""


class Outcome(NamedTuple):
    """How many cases both answered, and what they differ in."""

    answered: int
    differences: tuple[str, ...]


def cases(*, sample: int | None = None, seed: int = 7) -> list[Case]:
    """Return every flag of every model alone, and every pair of flags; or so many of these, the same for a seed."""
    models = {name: json.loads((CONFIGS / f"{name}.json").read_text()) for name in REAL} | dict(SHAPES)
    chosen = [dict(zip(FLAGS, (values[0] for values in FLAGS.values()), strict=True))]
    for first, second in itertools.combinations(FLAGS, 2):
        pairs = itertools.product(FLAGS[first], FLAGS[second])
        chosen += [chosen[0] | {first: one, second: other} for one, other in pairs]
    unique = {json.dumps(flags): {k: v for k, v in flags.items() if v is not None} for flags in chosen}
    found = [
        Case(name, config, flags, size)
        for name, config in models.items()
        for flags in unique.values()
        for size in (SMALL, LARGE)
    ]
    return found if sample is None else random.Random(seed).sample(found, sample)  # noqa: S311 - no secret


def compare(chosen: Iterable[Case], ours: Planner, vllms: Planner) -> Outcome:
    """Return where two planners that both answer give different figures; vLLM is asked only where ours answers."""
    answered, found = 0, []
    for case in chosen:
        planned = ours(case)
        theirs = None if planned is None else vllms(case)
        if planned is None or theirs is None:
            continue
        answered += 1
        if "refused" in theirs:
            found.append(f"{case}: it is planned, and refused by vLLM: {theirs['refused']}")
            continue
        found += [
            f"{case}: {name} is {planned.get(name)}, and {theirs[name]} in vLLM"
            for name in FIGURES
            if theirs.get(name) is not None and planned.get(name) != theirs[name]
        ]
    return Outcome(answered, tuple(found))


def vllm_of(process: Asked, root: Path) -> Planner:
    """Return the planner that asks a kept vLLM; models' folders are made in `root`."""

    def ask(case: Case) -> Figures | None:
        folder = model_folder(root, case.model, case.config)
        answer = process.ask(str(Line((str(folder),), {}).changed(case.flags)), kv_cache_bytes=case.kv_cache_bytes)
        if answer["status"] in ("refused", "invalid"):
            return {"refused": answer.get("error") or answer["refusal"]["message"]}
        found: Figures | None = answer.get("kv_cache")
        return found

    return ask


def builtin(case: Case) -> Figures | None:
    """Return the figures of `kvplan.builtin`; None: it refuses the case."""
    start_of = importlib.import_module("kvplan.builtin").read_start
    flags = {name: -1 if value == "auto" else value for name, value in case.flags.items()}
    try:
        start = start_of(completed(dict(case.config)), EngineFlags(**flags))
        available = [case.kv_cache_bytes] * len(start.workers)
        pool = plan_pool(start.workers, available, start.limits, generation_of(text_of(NEWEST_KNOWN)))
    except PlanError:
        return None
    found = {name: getattr(pool, name) for name in FIGURES}
    return found if pool.fits else {name: found[name] for name in ("fits", "needed_bytes", "max_model_len_that_fits")}


def main(version: str) -> None:
    chosen = cases()
    with asked(version) as process, tempfile.TemporaryDirectory() as folder:
        outcome = compare(chosen, builtin, vllm_of(process, Path(folder)))
    both = f"{outcome.answered} of {len(chosen)} cases answered by both, {len(outcome.differences)} differences"
    sys.stdout.writelines(f"{line}\n" for line in (*outcome.differences, both))


if __name__ == "__main__":
    main(*(sys.argv[1:] or [DEFAULT_VERSION]))
