"""``highwater plan``: its exit status, its errors, what it loads and how long it takes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from highwater.commands.plan import plan

CONFIGS = Path(__file__).parents[1] / "plan" / "configs"
LLAMA = str(CONFIGS / "llama-3.1-8b.json")


def run(*arguments: str) -> Result:
    """Run the command."""
    return CliRunner().invoke(plan, arguments)


def test_what_fits_ends_with_0():
    """And says so in words."""
    result = run(LLAMA, "--kv-cache-memory-bytes", "20GiB", "--max-model-len", "8192")
    assert result.exit_code == 0
    assert "It fits" in result.output


def test_what_does_not_fit_ends_with_1():
    """With the longest length that does."""
    result = run(LLAMA, "--kv-cache-memory-bytes", "8G", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["kv_cache"]["max_model_len_that_fits"] == 65520


def test_what_is_refused_ends_with_2_and_names_the_flag():
    """On standard error; for programs as JSON too."""
    result = run(LLAMA, "-tp", "3", "--json")
    assert result.exit_code == 2
    assert "--tensor-parallel-size: 3" in result.stderr
    assert "--tensor-parallel-size: 3" in json.loads(result.stdout)["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-model-len", "many"), "'many' is no count of 1 or more; write it as 32768, 32K"),
        (("--max-model-len", "-1"), "'-1' is no count of 1 or more"),
        (("--max-num-seqs", "1.5"), "'1.5' is no count of 1 or more"),
        (("--device", "\u0668\u0660GiB"), "'\u0668\u0660GiB' is not a size"),
        (("--device", "9" * 20 + "GiB"), "--device: "),
        (("--device", "8GiB", "--in-use", "9GiB"), "--in-use: 9.00 GiB are more than --device, 8.00 GiB, has"),
        (("-dcp", "7"), "--decode-context-parallel-size: 7; vLLM refuses it"),
        (("--kv-cache-memory-bytes", "0"), "is zero"),
        (("--platform", "abacus"), "is not one of"),
        (("--vllm-version", "0.1.0"), "older than the oldest version known"),
        (("--vllm-version", "new"), "is not understood"),
        (("--oracle", "/nowhere/python", "--kv-cache-memory-bytes", "8G"), "could not be started"),
        (("--oracle", "/nowhere/python", "--device", "24GiB", "--in-use", "23GiB"), "refuses to start: 1.00 GiB"),
        (("--oracle", "/nowhere/python"), "the bytes for the KV cache are needed"),
    ],
)
def test_input_that_makes_no_sense_ends_with_2(arguments: tuple[str, ...], message: str):
    """The error says what would be right."""
    result = run(LLAMA, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_oracle_runs_with_the_shim_of_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where torch is a CPU build and torchvision is not, vLLM cannot be imported without it."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH" >&2\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "/of/the/operator")
    result = run(LLAMA, "--oracle", str(python), "--kv-cache-memory-bytes", "8G")
    shim, worker, given = result.stderr.strip().rpartition(" ")[2].split(":")
    assert (shim.endswith("demo/shim"), worker.endswith("/worker"), given) == (True, True, "/of/the/operator")


def test_architectures_are_listed():
    """Users can look before they plan."""
    result = run("--list-architectures")
    assert result.exit_code == 0
    assert "LlamaForCausalLM" in result.output.splitlines()


def test_a_plan_loads_neither_torch_nor_the_sidecar():
    """Nothing that takes long to load: settings, web server, HTTP clients, torch."""
    code = (
        "import sys; from highwater.cli import main\n"
        f"try: main(['plan', {LLAMA!r}, '--kv-cache-memory-bytes', '20GiB'])\n"
        "except SystemExit: pass\n"
        "slow = {'torch', 'fastapi', 'httpx', 'uvicorn', 'pydantic', 'yaml', 'numpy', 'tabulate', 'rich'}\n"
        "sys.exit(' '.join(slow & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_itself_takes_milliseconds():
    """The processor time of one plan beside the start of Python; a busy machine does not count."""
    arguments = (LLAMA, "--kv-cache-memory-bytes", "20GiB", "--json")
    run(*arguments)
    before = time.process_time()
    run(*arguments)
    assert time.process_time() - before < 0.1
