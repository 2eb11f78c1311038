"""Recorded starts put to vLLM itself: what they printed beside what `highwater_worker.plan` answers.

`python -m tests.support.asked_starts [VERSION]` prints what docs/plan-by-vllm.md sums up.

The configurations hold the keys that decide a size. Where this vLLM wants more, the row says what it said.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from highwater.explain.command_line import Line
from highwater.process.worker_package import SHIM_FOLDER
from highwater.terminal.demo.engine import DEFAULT_VERSION, ensure_environment
from kvplan import EngineFlags
from tests.engines import ALL_RECIPES, CUDA_RECIPES, ROOT
from tests.oracles import BORROWED, sources_of
from tests.support.printed_pools import CONFIGS, GIB, HALF_A_DIGIT, Start
from tests.support.printed_pools import STARTS as POOLS
from tests.support.recorded_starts import STARTS as PARTS
from tests.support.recorded_starts import RecordedStart

# What the files leave out because it decides no size, and what vLLM reads all the same.
_ALSO: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0, "attention_bias": False}


class Asked:
    """A kept process that has vLLM of one version, and answers questions."""

    def __init__(self, version: str, *options: str, before: tuple[Path, ...] = (), of_cuda: bool = False) -> None:
        path = [*map(str, before), str(ROOT / "worker_ext")]
        if of_cuda:  # the build for CUDA, without a driver
            environment = ensure_environment(version, recipes=CUDA_RECIPES, announce=print)
        else:
            path += [str(SHIM_FOLDER), *([str(sources_of(version))] if version in BORROWED else [])]
            environment = ensure_environment(BORROWED.get(version, version), recipes=ALL_RECIPES, announce=print)
        self._process = subprocess.Popen(
            [str(environment.python), "-m", "highwater_worker.plan", "--serve", "--deadline", "600", *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )  # fmt: skip

    def ask(self, command: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **more}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def asked(version: str, *options: str, before: tuple[Path, ...] = (), of_cuda: bool = False) -> Iterator[Asked]:
    """Yield the process, with folders before the others on its path; it ends with its input."""
    process = Asked(version, *options, before=before, of_cuda=of_cuda)
    try:
        yield process
    finally:
        process.close()


# Fields that are no flags of vLLM.
NOT_VLLMS = frozenset({"platform", "device_bytes", "device_name", "compute_capability"})


def given_flags(flags: EngineFlags) -> dict[str, Any]:
    return {
        field.name: value
        for field in fields(EngineFlags)
        if field.name not in NOT_VLLMS and (value := getattr(flags, field.name)) not in (None, field.default)
    }


def completed(config: Any) -> Any:
    """Add what vLLM reads of scaled positions and compressed weights, and no size depends on."""
    if isinstance(config, list):
        return [completed(one) for one in config]
    if not isinstance(config, dict):
        return config
    found = {key: completed(value) for key, value in config.items()}
    if found.get("rope_type") == "llama3":
        found = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **found}
    if found.get("rope_type") == "yarn":
        found = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, **found}
    if found.get("quant_method") == "compressed-tensors":
        found = {"format": "float-quantized", "quantization_status": "compressed", **found}
    if "weights" in found and "num_bits" in found["weights"]:
        of_weights = found["weights"]
        dynamic = {**of_weights, "dynamic": True, "strategy": "token"}
        found = {"targets": ["Linear"], "input_activations": dynamic, **found}
    return found


def model_folder(root: Path, name: str, config: Mapping[str, Any]) -> Path:
    """Write a model's folder with the keys that vLLM reads beside those that decide a size."""
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(completed({**_ALSO, **config})))
    return folder


def pool_of(process: Asked, start: Start, root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the answers at both ends of what the printed GiB may stand for."""
    folder = model_folder(root, start.config, json.loads((CONFIGS / f"{start.config}.json").read_text()))
    flags = {name: value for name, value in given_flags(start.flags(0)).items() if name != "kv_cache_memory_bytes"}
    if start.draft is not None:
        draft = model_folder(root, start.draft, json.loads((CONFIGS / f"{start.draft}.json").read_text()))
        method = json.loads(flags["speculative_config"]) | {"model": str(draft)}
        flags["speculative_config"] = json.dumps(method)
    ends = (start.gib - HALF_A_DIGIT, start.gib + HALF_A_DIGIT)
    low, high = (
        process.ask(str(Line((str(folder),), {}).changed(flags)), kv_cache_bytes=int(end * GIB)) for end in ends
    )
    return low, high


def parts_of(process: Asked, start: RecordedStart, root: Path) -> dict[str, Any]:
    """Return the answer about weights and activation."""
    folder = model_folder(root, str(start), start.config)
    # The runner and the sampler that printed them.
    words = [
        "VLLM_USE_V2_MODEL_RUNNER=0",
        "VLLM_USE_FLASHINFER_SAMPLER=0",
        "vllm",
        "serve",
        str(folder),
        "-tp",
        str(start.tensor_parallel),
        "--max-num-batched-tokens",
        "8192",
    ]
    words += ["--max-num-seqs", "1024", "--max-model-len", "2048"]
    words += ["--quantization", start.quantization] if start.quantization else []
    return process.ask(shlex.join(words))


def said(answer: Mapping[str, Any]) -> str:
    text = answer.get("error") or answer.get("refusal", {}).get("message") or answer["kv_cache"]["refusal"] or ""
    return f"{answer['status']}: {' '.join(str(text).split())[:110]}".replace("|", "/")


def _pool_rows(process: Asked, root: Path) -> Iterator[str]:
    for start in POOLS:
        low, high = pool_of(process, start, root)
        printed = start.blocks if start.blocks is not None else start.concurrency
        name = "blocks" if start.blocks is not None else "max_concurrency"
        if printed is None:
            continue
        ends = [answer.get("kv_cache", {}).get(name) for answer in (low, high)]
        if None in ends:
            yield f"| {start.config}, TP {start.tensor_parallel} | {printed:,} | {said(low)} | |"
            continue
        is_within = ends[0] - 0.005 <= printed <= ends[1] + 0.005
        shown = " to ".join(f"{end:,.2f}" if isinstance(end, float) else f"{end:,}" for end in ends)
        yield f"| {start.config}, TP {start.tensor_parallel} | {printed:,} | {shown} | {'yes' if is_within else 'no'} |"


def _part_rows(process: Asked, root: Path) -> Iterator[str]:
    for start in PARTS:
        answer = parts_of(process, start, root)
        if "ranks" not in answer:
            yield f"| {start} | {start.weights} | {said(answer)} | | |"
            continue
        weights, peak = (answer["ranks"][0][name] for name in ("weights", "activation"))
        shown = "not known" if peak is None else "{:.2f} ({:.2f} to {:.2f})".format(*(part / GIB for part in peak[:3]))
        yield f"| {start} | {start.weights} | {weights[0] / GIB:.2f} | {start.activation or '-'} | {shown} |"


def main(version: str) -> None:
    pools = f"| start | printed blocks or requests at once | vLLM {version} on meta | within the print |"
    parts = f"\n| start | printed weights | on meta, {version} | printed activation | on meta |"
    for head, rows in ((pools, _pool_rows), (parts, _part_rows)):  # each has an environment of its own
        print(head, "|---" * (head.count("|") - 1) + "|", sep="\n")
        with asked(version) as process, tempfile.TemporaryDirectory() as folder:
            for row in rows(process, Path(folder)):
                print(row, flush=True)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [DEFAULT_VERSION]))
