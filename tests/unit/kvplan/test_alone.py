"""kvplan stands alone: its tests pass where no other package of ours can be imported, and an answer is quick."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
WITHOUT_OURS = """
import sys
sys.modules.update(dict.fromkeys(("highwater", "highwater_worker")))
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
ANSWER = """
import json, time
from kvplan.builtin import read_start
from kvplan import EngineFlags
from kvplan.generations import generation_of
from kvplan.pool import plan_pool
start = read_start(json.loads(input()), EngineFlags())
plan_pool(start.workers, [1 << 34], start.limits, generation_of("0.33.0"))
print(time.process_time())
"""
LLAMA = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80,
 "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
 "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}"""


def run(*command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": f"{ROOT / 'app'}{os.pathsep}{ROOT}"}
    environ = {name: value for name, value in environ.items() if not name.startswith(("COV", "PYTEST"))}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, input=given, capture_output=True, text=True, check=False
    )


def test_its_tests_pass_where_nothing_else_of_ours_can_be_imported() -> None:
    options = ("--noconftest", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning")
    done = run("-c", WITHOUT_OURS, *options, str(HERE), "--ignore", __file__, "-m", "not hypothesis")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_an_answer_takes_less_than_three_tenths_of_a_second_of_cpu() -> None:
    seconds = [float(run("-c", ANSWER, given=LLAMA.replace("\n", "")).stdout) for _ in range(3)]
    assert min(seconds) < 0.3
