"""`highwater measure` around the real `vllm bench serve`, with random images, beside the shared engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from highwater.process.worker_package import SHIM_FOLDER
from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment
from highwater.terminal.demo.sidecar import DemoSidecar

from .conftest import sidecar_beside

ROOT = Path(__file__).parents[2]
BENCH = Path(__file__).with_name("vllm_bench_serve.py")
PROMPTS, IMAGES_EACH = 12, 2
# No trim: this engine's device is the host, and moving from one to the other gives nothing back.
REMEDIES = "reset_mm_cache,release,reset_encoder_cache"


@dataclass(frozen=True)
class Recorded:
    sidecar: DemoSidecar
    done: subprocess.CompletedProcess[str]
    page: str
    text: str


@pytest.fixture(scope="module")
def recorded(
    engine: DemoEngine, engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("experiment")
    # Short names, as an operator would type them: the report shows the command.
    shutil.copy(BENCH, folder / BENCH.name)
    (folder / "model").symlink_to(engine.folder / "model")
    settings = {"HIGHWATER_POLICY__MODE": "observe", "HIGHWATER_RECORDER_DIR": str(folder / "recorders")}
    with sidecar_beside(engine, folder, **settings) as sidecar:
        sidecar.call("POST", "/memory/reclaim", {"remedies": ["reset_encoder_cache"]})
        environ = os.environ | {
            "PATH": f"{engine_environment.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{SHIM_FOLDER}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HIGHWATER_URL": sidecar.url,
        }
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from highwater.terminal.cli import main; main()",
        ]
        command += ["measure", "--out", "report.html", "--remedies", REMEDIES, "--settle", "1"]
        command += ["--name", "random images, tiny model", "--", "python", BENCH.name, *bench(sidecar.url, engine)]
        done = subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=1200
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        texts = [(folder / name).read_text() for name in ("report.html", "report.md")]
        yield Recorded(sidecar, done, *texts)


def bench(url: str, engine: DemoEngine) -> list[str]:
    """Its arguments: each prompt with new images."""
    arguments = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url]
    arguments += ["--model", engine.served_model, "--tokenizer", "model", "--dataset-name", "random-mm"]
    arguments += ["--random-input-len", "16", "--random-output-len", "4", "--ignore-eos"]
    arguments += ["--random-mm-base-items-per-request", str(IMAGES_EACH), "--random-mm-num-mm-items-range-ratio", "0"]
    arguments += ["--random-mm-limit-mm-per-prompt", '{"image": 4, "video": 0}']
    arguments += ["--random-mm-bucket-config", "{(512, 512, 1): 1.0}"]
    return [*arguments, "--num-prompts", str(PROMPTS), "--max-concurrency", "4"]


def row(text: str, name: str, nth: int = 0) -> list[str]:
    found = re.findall(rf"^\| (?:\*\*)?{re.escape(name)}(?:\*\*)? *\|(.*)\|$", text, re.MULTILINE)
    return [cell.strip().strip("*") for cell in found[nth].split("|")]


def mib(cell: str) -> float:
    return float(cell.replace(",", ""))


@pytest.mark.timeout(1800)  # the benchmark loads all of vLLM first
def test_the_benchmark_runs_as_without_us(recorded: Recorded) -> None:
    assert re.search(rf"Successful requests:\s+{PROMPTS}\b", recorded.done.stdout)
    assert "highwater:" not in recorded.done.stdout
    assert "highwater: wrote" in recorded.done.stderr


def test_the_report_tells_what_the_images_left(recorded: Recorded) -> None:
    columns = row(recorded.text, "MiB")
    encoder = dict(zip(columns, row(recorded.text, "encoder cache"), strict=True))
    used = dict(zip(columns, row(recorded.text, "used"), strict=True))
    assert mib(encoder["before load"]) == 0
    assert mib(encoder["after load"]) > 0
    assert mib(used["peak under load"]) >= max(mib(used["before load"]), mib(used["after load"]))
    after = re.search(r"^\| after the load +\| +(\d+) \|", recorded.text, re.MULTILINE)
    assert after is not None
    assert int(after[1]) == PROMPTS * IMAGES_EACH


def test_the_report_tells_what_each_remedy_gave_back(recorded: Recorded) -> None:
    freed = dict(zip(row(recorded.text, "MiB", 1), row(recorded.text, "encoder cache", 1), strict=True))
    left = dict(zip(row(recorded.text, "MiB"), row(recorded.text, "encoder cache"), strict=True))
    assert mib(freed["reset_mm_cache freed"]) == 0
    assert mib(freed["reset_encoder_cache freed"]) == mib(left["after load"])
    assert mib(left["after reset_encoder_cache"]) == 0


def test_the_report_knows_the_engine(recorded: Recorded) -> None:
    for told in ("0.32.0", "tiny-qwen3-vl", "--max-num-batched-tokens", "the workers' recorders", "load ended"):
        assert told in recorded.text
    assert recorded.page.count("<svg") == 1
    assert "<script" not in recorded.page


def test_the_engines_story_is_marked(recorded: Recorded) -> None:
    events: list[dict[str, Any]] = recorded.sidecar.call("GET", "/memory/events?limit=200")["events"]
    marks = [event["summary"] for event in reversed(events) if event["kind"] == "mark"]
    assert [mark.partition("' at")[0].rpartition(": ")[2] for mark in marks] == ["load starts", "load ended", "settled"]
