"""Command lines that are planned and then started on a real CPU engine, and what each of the two says about them.

Some of them start; the others vLLM refuses because the KV cache is too small. The plan has to name the engine's own
numbers both times.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from highwater.demo.engine import SHIM_FOLDER
from tests.support.plan_models import write_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from highwater.demo.environment import EngineEnvironment

ENGINE_STARTS = Path(__file__).parent.absolute() / "engine_starts.py"
GIB = 1024**3
# What CPUs have otherwise than the card that a plan pretends; a block size of a command line's own stands behind it.
AS_ON_A_CARD = ("--block-size", "128", "--no-async-scheduling")
# Up to 0.19 the CPU worker passes over --kv-cache-memory-bytes and takes whole GiB from the environment.
WHOLE_GIB_ONLY = frozenset({"0.12.0"})
BASE_ARGUMENTS = ("--load-format", "dummy", "--enforce-eager", "--skip-tokenizer-init")
START_SECONDS = 240.0
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")
_REFUSAL = re.compile(
    r"max seq len \((?P<length>\d+)\).*?\((?P<needed>[\d.]+) GiB KV cache is needed"
    r".*?available KV cache memory \((?P<available>[\d.]+) GiB\)"
    r"(?:.*?estimated maximum model length is (?P<estimate>\d+))?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Start:
    """One command line.

    Attributes:
        shape: The model: a key of `tests.support.plan_models.CONFIGS`.
        kv_bytes: The bytes of the KV cache.
        flags: What else is on the command line, as vLLM and `highwater plan` read it.
        fits: Whether the engine is to start.
    """

    shape: str
    kv_bytes: int
    flags: tuple[str, ...]
    fits: bool

    @property
    def name(self) -> str:
        """A name for reports."""
        return " ".join((self.shape, "--kv-cache-memory-bytes", str(self.kv_bytes), *self.flags))


def _start(shape: str, flags: str, kv_bytes: int = 64 * 1024**2, *, fits: bool = True) -> Start:
    return Start(shape, kv_bytes, tuple(flags.split()), fits)


_CURRENT = (
    _start("full", "--max-model-len 8192 --max-num-seqs 16 --max-num-batched-tokens 2048"),
    _start("full", "--max-model-len 5000 --max-num-seqs 7 --block-size 32", 50_000_000),
    _start("full", "--max-model-len 4096 --max-num-seqs 4 --num-gpu-blocks-override 100"),
    _start("sliding", "--max-model-len 8192 --max-num-seqs 16 --max-num-batched-tokens 2048"),
    _start("sliding", "--max-model-len 20000 --max-num-seqs 3 --max-num-batched-tokens 512", 100_000_000),
    _start("full", "--max-model-len 100000 --max-num-seqs 16", fits=False),
    _start("full", "--max-model-len 30001 --max-num-seqs 1 --block-size 32", 50_000_000, fits=False),
    _start("full", "--max-model-len 1048576 --block-size 64", 1_000_000_000, fits=False),
    _start("sliding", "--max-model-len 200000 --max-num-batched-tokens 2048", fits=False),
    _start(
        "sliding", "--max-model-len 60000 --max-num-batched-tokens 4096 --disable-hybrid-kv-cache-manager", fits=False
    ),
)
STARTS = {
    "0.12.0": (
        _start("full", "--max-model-len 8192 --max-num-seqs 16 --max-num-batched-tokens 2048", GIB),
        _start("full", "--max-model-len 5000 --max-num-seqs 7 --block-size 32", GIB),
        _start("full", "--max-model-len 4096 --max-num-seqs 4 --num-gpu-blocks-override 100", GIB),
        _start("sliding", "--max-model-len 8192 --max-num-seqs 16 --max-num-batched-tokens 2048", GIB),
        _start("sliding", "--max-model-len 20000 --max-num-seqs 3 --max-num-batched-tokens 512", GIB),
        _start("sliding", "--max-model-len 16384 --max-num-seqs 5 --no-enable-prefix-caching", GIB),
        _start("sliding", "--max-model-len 6000 --max-num-seqs 2 --disable-hybrid-kv-cache-manager", GIB),
        # 0.12 checks the windows' need, and then makes full attention of them: 0.38 requests of that length fit.
        _start("sliding", "--max-model-len 500000 --disable-hybrid-kv-cache-manager", GIB),
        _start("full", "--max-model-len 600000 --max-num-seqs 16", GIB, fits=False),
        _start("full", "--max-model-len 700001 --max-num-seqs 1 --block-size 32", GIB, fits=False),
        _start("full", "--max-model-len 1048576 --block-size 64", GIB, fits=False),
        _start("sliding", "--max-model-len 1048576 --max-num-batched-tokens 4096", GIB, fits=False),
        _start("sliding", "--max-model-len 1040000 --max-num-batched-tokens 2048", GIB, fits=False),
        _start("full", "--max-model-len 524289 --max-num-batched-tokens 8192 --block-size 64", GIB, fits=False),
        _start("sliding", "--max-model-len 1048000 --max-num-batched-tokens 8192 --block-size 64", GIB, fits=False),
    ),
    "0.23.0": _CURRENT,
    "0.32.0": _CURRENT,
}
"""By version; dense models and windows alone: a CPU aligns the pages of states and of MLA otherwise than a card."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What vLLM made of a command line.

    Attributes:
        started: Whether it runs.
        blocks: How many blocks its KV cache has.
        tokens: "KV cache size" as logged.
        max_concurrency: "Maximum concurrency" as logged, in hundredths.
        needed_gib: Of a refusal: the GiB that one request needs, as printed.
        available_gib: Of a refusal: the GiB that there are.
        max_model_len_that_fits: Of a refusal: the estimated maximum length; None where it prints none.
        answer: All that the script returned.
    """

    started: bool
    blocks: int | None
    tokens: int | None
    max_concurrency: str | None
    needed_gib: float | None
    available_gib: float | None
    max_model_len_that_fits: int | None
    answer: dict[str, Any]


def start_all(environment: EngineEnvironment, starts: Sequence[Start], folder: Path) -> list[Outcome]:
    """Start a real engine with each command line, one after another, and return what came of each."""
    for shape in {start.shape for start in starts}:
        write_model(folder / shape, shape)
    environ = os.environ | {
        "PYTHONPATH": str(SHIM_FOLDER),
        "VLLM_CACHE_ROOT": str(environment.root / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        # The worker runs in EngineCore's own process: one process a start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    lines = "".join(json.dumps(_request(environment.version, start, folder)) + "\n" for start in starts)
    done = subprocess.run(
        [str(environment.python), str(ENGINE_STARTS)],
        input=lines,
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60 + START_SECONDS * len(starts),
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) != len(starts):
        raise AssertionError(f"{len(answers)} of {len(starts)} starts were made: {done.stderr[-2000:]}")
    return [_outcome(answer) for answer in answers]


def plan_of(environment: EngineEnvironment, start: Start, folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the exit status of `highwater plan` for a command line, and its JSON."""
    model = write_model(folder / start.shape, start.shape)
    command = [sys.executable, "-m", "highwater", "plan", "--engine-python", str(environment.python), "--json", "--"]
    command += ["vllm", "serve", str(model), *BASE_ARGUMENTS, *AS_ON_A_CARD, *start.flags]
    command += ["--kv-cache-memory-bytes", str(start.kv_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    if not done.stdout.startswith("{"):
        raise AssertionError(f"{start.name}: no plan, exit status {done.returncode}: {done.stderr or done.stdout}")
    return done.returncode, json.loads(done.stdout)


def differences(status: int, answer: dict[str, Any], outcome: Outcome) -> list[str]:
    """Compare a plan with what the engine said; an empty list means that they agree in every figure."""
    kv_cache = answer["kv_cache"]
    if outcome.started:
        pairs = {
            "exit status": (status, 0),
            "fits": (kv_cache["fits"], True),
            "blocks": (kv_cache["blocks"], outcome.blocks),
            "tokens": (kv_cache["tokens"], outcome.tokens),
            "max_concurrency": (f"{kv_cache['max_concurrency']:.2f}", outcome.max_concurrency),
        }
    else:
        pairs = {
            "exit status": (status, 1),
            "fits": (kv_cache["fits"], False),
            "needed": (_in_gib(kv_cache["needed_bytes"]), outcome.needed_gib),
            "available": (_in_gib(kv_cache["available_bytes"]), outcome.available_gib),
            "max_model_len_that_fits": (kv_cache["max_model_len_that_fits"], outcome.max_model_len_that_fits),
        }
    return [
        f"{name}: planned {planned}, the engine {real}" for name, (planned, real) in pairs.items() if planned != real
    ]


def _request(version: str, start: Start, folder: Path) -> dict[str, Any]:
    arguments = ["--model", str(folder / start.shape), *BASE_ARGUMENTS, *AS_ON_A_CARD, *start.flags]
    if version in WHOLE_GIB_ONLY:
        return {"arguments": arguments, "environ": {"VLLM_CPU_KVCACHE_SPACE": str(start.kv_bytes // GIB)}}
    return {"arguments": [*arguments, "--kv-cache-memory-bytes", str(start.kv_bytes)], "environ": {}}


def _outcome(answer: dict[str, Any]) -> Outcome:
    started = answer["outcome"] == "started"
    log = answer.get("log", [])
    refusal = _REFUSAL.search(answer.get("message", ""))
    estimate = refusal["estimate"] if refusal else None
    return Outcome(
        started=started,
        blocks=answer.get("blocks"),
        tokens=_whole(_last(_TOKENS, log)),
        max_concurrency=_last(_CONCURRENCY, log),
        needed_gib=float(refusal["needed"]) if refusal else None,
        available_gib=float(refusal["available"]) if refusal else None,
        max_model_len_that_fits=_whole(estimate),
        answer=answer,
    )


def _last(pattern: re.Pattern[str], lines: Iterable[str]) -> str | None:
    found = [match[1] for line in lines if (match := pattern.search(line))]
    return found[-1] if found else None


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text.replace(",", ""))


def _in_gib(size: int) -> float:
    """Return bytes as vLLM prints them: in GiB with two decimals."""
    return round(size / GIB, 2)
