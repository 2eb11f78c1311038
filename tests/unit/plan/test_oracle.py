"""vLLM's own answer beside a plan: who cannot give one is named, and every difference is a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from highwater.plan.oracle import ask_vllm, differences
from kvplan.errors import PlanError
from kvplan.generations import generation_of
from kvplan.limits import Limits
from kvplan.pool import KvPool, plan_pool
from kvplan.specs import FullAttention

COMMAND = ("vllm", "serve", "m")


def answering(folder: Path, text: str) -> Path:
    """Return a program that stands in for a Python with vLLM."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return program


def ask(python: Path) -> Any:
    return ask_vllm(python, COMMAND, card="9.0", kv_cache_bytes=1 << 30, path=[Path("/worker")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo \"No module named 'vllm'\" >&2; exit 1", "did not answer: No module named 'vllm'"),
        ("echo hello", "did not answer: it said nothing"),
        (
            """echo '{"status": "cannot_be_asked", "error": "no", "help": "m has no config.json"}'; exit 4""",
            r"no plan \(cannot_be_asked\): no m has no config.json",
        ),
        ("""echo '{"status": "refused", "refusal": {"message": "TP 3"}}'; exit 1""", r"no plan \(refused\): TP 3"),
    ],
)
def test_an_interpreter_that_gives_no_plan_is_named_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ask(answering(tmp_path, text))


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="could not be started"):
        ask(tmp_path / "none")


def test_it_is_asked_with_the_worker_package_on_its_path(tmp_path: Path) -> None:
    """Its arguments and its path as JSON, where the answer has its figures."""
    text = """echo "{\\"kv_cache\\": {}, \\"asked\\": \\"$*\\", \\"path\\": \\"$PYTHONPATH\\"}" """
    answer = ask(answering(tmp_path, text))
    assert answer["asked"] == "-m highwater_worker.plan --card 9.0 --kv-cache-bytes 1073741824 -- vllm serve m"
    assert answer["path"].startswith("/worker")


def pool() -> KvPool:
    layer = FullAttention(block_size=16, kv_heads=8, head_size=128, element_bytes=2)
    limits = Limits(max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=256)
    return plan_pool([{"a": layer}], [600 * layer.page_bytes], limits, generation_of("0.32.0"))


def test_agreement_is_silent_and_every_difference_is_a_sentence() -> None:
    ours = pool()
    agreed = json.loads(json.dumps({"fits": True, "blocks": 600, "max_concurrency": 600 / 512, "tokens": None}))
    assert differences(ours, {"kv_cache": agreed}) == ()
    assert differences(ours, {"kv_cache": {**agreed, "blocks": 601}}) == ("blocks is 600 in the plan and 601 in vLLM",)
