"""The proxies before a real engine: what `vllm bench serve` sees of them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.demo.engine import SHIM_FOLDER, Engine
from app.demo.errors import DemoError
from bench.dataplane.comparison import NONE, Spread
from bench.dataplane.proxies import DIRECT, NGINX, SIDECAR, all_running, nginx, sidecars
from bench.dataplane.report import Report
from bench.dataplane.slices import order
from bench.figure import number
from bench.stage import Stage

SCRIPT = Path(__file__).parent / "serve_benchmark.py"
AGAIN = "direct again"
CONCURRENCY = 8
INPUT_TOKENS = 32
OUTPUT_TOKENS = 64
Rounds = Mapping[str, Sequence[float]]
"""By what was asked, one value a round."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One number of the benchmark's result."""

    what: str
    key: str
    unit: str


READINGS = (
    Reading("Throughput", "output_throughput", "tokens/s"),
    Reading("Time to first token, p50", "p50_ttft_ms", "ms"),
    Reading("Time to first token, p99", "p99_ttft_ms", "ms"),
    Reading("Time per token of a request, p50", "p50_tpot_ms", "ms"),
    Reading("Time between tokens, p50", "p50_itl_ms", "ms"),
    Reading("Time between tokens, p99", "p99_itl_ms", "ms"),
)


def measure(stage: Stage, *, short: bool) -> Report:
    """The engine's section.

    Raises:
        DemoError: The engine or the sidecar did not start, or a request failed.
    """
    rounds, requests = (4, 64) if short else (8, 256)
    engine, notes = stage.engine, list[str]()
    with (
        all_running({SIDECAR: sidecars(notes)[SIDECAR], NGINX: nginx}, engine.port, stage.folder, notes) as proxies,
        _benchmark(engine, stage.folder) as benchmark,
    ):
        ports = {DIRECT: engine.port, **{name: proxy.port for name, proxy in proxies.items()}, AGAIN: engine.port}
        for port in ports.values():
            benchmark.run(port, CONCURRENCY)  # warm
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in ports}
        for turn in range(rounds):
            for name in order(list(ports), turn):
                results[name].append(benchmark.run(ports[name], requests))
            shown = ", ".join(f"{name} {number(found[-1][READINGS[0].key])}" for name, found in results.items())
            print(f"  round {turn + 1}: {READINGS[0].unit}: {shown}", flush=True)
    return Report(
        title="Before a real engine",
        columns=("what", SIDECAR, NGINX, DIRECT, f"{SIDECAR} to {NGINX}", f"{SIDECAR} to {DIRECT}", "direct, twice"),
        rows=[
            row(one, {name: [result[one.key] for result in found] for name, found in results.items()})
            for one in READINGS
        ],
        facts=[],
        methods=_methods(rounds, requests),
        notes=notes,
    )


def row(reading: Reading, values: Rounds) -> tuple[str, ...]:
    """What, each one's median, the ratios, and what a ratio of two equals was."""
    direct = [statistics.mean(both) for both in zip(values[DIRECT], values[AGAIN], strict=True)]
    own, peer = values[SIDECAR], values.get(NGINX)
    return (
        reading.what,
        *(f"{number(statistics.median(each))} {reading.unit}" if each else NONE for each in (own, peer, direct)),
        _ratio(own, peer) if peer else NONE,
        _ratio(own, direct),
        _ratio(values[AGAIN], values[DIRECT]),
    )


def _ratio(values: Sequence[float], others: Sequence[float]) -> str:
    return str(Spread(tuple(one / other for one, other in zip(values, others, strict=True))))


class _Benchmark:
    """`vllm bench serve`, held ready in one process of the engine's interpreter."""

    def __init__(self, engine: Engine, process: subprocess.Popen[str], result_path: Path, log_path: Path) -> None:
        self._engine = engine
        self._process = process
        self._result_path = result_path
        self._log_path = log_path

    def run(self, port: int, requests: int) -> dict[str, Any]:
        """Return its result.

        Raises:
            DemoError: It failed, or a request did.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: its output says so next
            self._process.stdin.write(json.dumps(self._arguments(port, requests)) + "\n")
            self._process.stdin.flush()
        if self._process.stdout.readline().strip() != "done":
            raise DemoError.with_log("vllm bench serve failed", self._log_path)
        result: dict[str, Any] = json.loads(self._result_path.read_text(encoding="utf-8"))
        if result["completed"] != requests or result["total_output_tokens"] != requests * OUTPUT_TOKENS:
            raise DemoError.with_log(f"{result['completed']} of {requests} requests were answered", self._log_path)
        return result

    def _arguments(self, port: int, requests: int) -> list[str]:
        arguments = ["--backend", "openai", "--base-url", f"http://127.0.0.1:{port}", "--ignore-eos"]
        arguments += ["--model", self._engine.served_model, "--tokenizer", str(self._engine.folder / "model")]
        arguments += ["--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS)]
        arguments += ["--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(requests)]
        arguments += ["--max-concurrency", str(CONCURRENCY), "--temperature", "0"]
        arguments += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--disable-tqdm"]
        arguments += ["--save-result", "--result-dir", str(self._result_path.parent)]
        return [*arguments, "--result-filename", self._result_path.name]


@contextmanager
def _benchmark(engine: Engine, folder: Path) -> Iterator[_Benchmark]:
    log_path = folder / "serve-benchmark.log"
    environ = {**os.environ, "PYTHONPATH": str(SHIM_FOLDER), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [str(engine.environment.python), str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environ,
            cwd=folder,
        )
    try:
        yield _Benchmark(engine, process, folder / "serve-benchmark.json", log_path)
    finally:
        process.communicate()  # it ends with its standard input


def _methods(rounds: int, requests: int) -> list[str]:
    return [
        f"`vllm bench serve` (`bench/dataplane/serve_benchmark.py`), {requests} requests of {INPUT_TOKENS} tokens in "
        f"and {OUTPUT_TOKENS} out, {CONCURRENCY} at a time, streamed, against a real vLLM server with a tiny model on "
        "the CPU. Every request has to succeed.",
        f"{rounds} rounds of four slices (direct, through the sidecar, through nginx, direct again) in changing order. "
        "Ratios are within a round; shown are the median, and lowest and highest in brackets. The last column is the "
        "ratio of two equals: a smaller difference is none.",
        "When engine or client is late, several tokens arrive together and the time between tokens is next to nothing: "
        "read the time per token of a request.",
        "Engine, client and proxies share the machine's cores. The sidecar polls during all slices ([what that "
        "costs](figures.md)).",
    ]
