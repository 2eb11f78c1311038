"""`highwater plan` with a real vLLM: the command itself, and the recorded answers that its other tests live on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from highwater.explain.command_line import read_line
from highwater.explain.roads import VllmRoad
from highwater.terminal.demo.engine import EngineEnvironment
from tests.fakes.recorded_vllm import FILE, MODEL
from tests.support.asked_starts import model_folder
from tests.support.record_answers import kept
from tests.support.recorded_starts import LLAMA_8B

pytestmark = pytest.mark.timeout(900, func_only=True)


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"), "llama", LLAMA_8B)


def plan(environment: EngineEnvironment, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "highwater", "plan", "--engine-python", environment.python, *words]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_a_pasted_line_is_answered_on_one_screen_and_nothing_stays(
    engine_environment: EngineEnvironment, model: Path
) -> None:
    text = f"VLLM_LOGGING_LEVEL=ERROR \\\n  vllm serve {model} \\\n  --max_model_len 64k  # ours"
    done = plan(engine_environment, "--device", "L4", "--", text)
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines) <= 24) == (1, True), done
    assert lines[0].startswith("Does not fit: ")
    assert "one request of 64,000 tokens needs 7.81 GiB" in lines[0]
    assert "ways out, each asked:" in lines
    assert "asking vLLM: " in done.stderr
    left = subprocess.run(["pgrep", "-f", f"highwater_worker.plan.*{model}"], capture_output=True, check=False)
    assert left.stdout == b""


def test_a_config_json_under_another_name_is_asked_too(
    engine_environment: EngineEnvironment, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "llama.json"
    other.write_text((model / "config.json").read_text())
    done = plan(engine_environment, "--json", "--", "vllm", "serve", other, "--kv-cache-memory-bytes", "2G")
    answer = json.loads(done.stdout)
    assert (answer["status"], answer["kv_cache"]["available_bytes"]) == ("does_not_fit", 2 << 30), done.stderr
    assert answer["command_line"].startswith(f"vllm serve {other} ")


def test_a_model_that_is_nowhere_ends_with_4_and_the_command_that_fetches_it(
    engine_environment: EngineEnvironment,
) -> None:
    done = plan(engine_environment, "--", "vllm", "serve", "nobody/nothing")
    assert (done.returncode, done.stdout) == (4, "")
    assert "download nobody/nothing --include" in done.stderr


def test_the_recorded_answers_are_vllms(engine_environment: EngineEnvironment, model: Path) -> None:
    recorded: dict[str, Any] = json.loads(FILE.read_text())
    names = [name for name in recorded if name.startswith("L4 ")][::4]
    with VllmRoad(str(engine_environment.python), "L4", lambda _: None) as road:
        for name in names:
            question = json.loads(name.removeprefix("L4 "))
            words = [str(model) if word == MODEL else word for word in question.pop("argv")]
            answer = kept(dict(road.ask(read_line(words), **question)))
            assert answer["status"] == recorded[name]["status"], name
            assert answer.get("kv_cache") == recorded[name].get("kv_cache"), name
