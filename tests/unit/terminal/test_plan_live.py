"""`highwater plan --live` and `--wish`: what is asked, what is printed, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from highwater.http.memory import PlanRequest, plan_answer
from highwater.process.errors import CannotPlan, SidecarRefused
from highwater.terminal.plan.command import plan as plan_command
from tests.fakes import started
from tests.unit.explain.test_live import engine_of
from tests.unit.http.test_plan import NOTHING_CACHED, Starts

CONFIGS = Path("tests/unit/explain/configs")
QWEN3, GEMMA3 = CONFIGS / "qwen3-14b.json", CONFIGS / "gemma-3-27b.json"
LLAMA = CONFIGS / "llama-3.1-8b.json"


class FakeSidecar:
    """Answers as the real one does, of a start that is known."""

    def __init__(self, starts: Starts) -> None:
        self._starts = starts
        self.bodies: list[dict[str, Any]] = []

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/memory/plan"
        self.bodies.append(body)
        try:
            return plan_answer(PlanRequest.model_validate(body), self._starts, NOTHING_CACHED)
        except CannotPlan as exc:
            raise SidecarRefused(f"refused: {exc}", status=exc.status, code=exc.code, message=str(exc)) from exc


@pytest.fixture(name="sidecar")
def _sidecar(monkeypatch: pytest.MonkeyPatch) -> FakeSidecar:
    fake = FakeSidecar(Starts(engine_of(started.story(), "0.12.0", 2)))

    @contextmanager
    def at(url: str):
        assert url == "http://sidecar:8001"
        yield fake

    monkeypatch.setattr("highwater.terminal.asking.sidecar_at", at)
    return fake


@pytest.fixture(name="live")
def _live(sidecar: FakeSidecar) -> Callable[..., Result]:
    """Ask the running engine behind the sidecar."""
    del sidecar
    return lambda *words: CliRunner().invoke(plan_command, ["--live", "http://sidecar:8001", *words])


def test_flags_go_out_as_they_were_given(sidecar: FakeSidecar, live: Callable[..., Result]) -> None:
    result = live("--max-model-len", "64k", "--kv-cache-dtype", "fp8")
    assert sidecar.bodies == [{"max_model_len": 64_000, "kv_cache_dtype": "fp8"}]
    lines = result.output.splitlines()
    assert (result.exit_code, lines[0].startswith("Fits: ")) == (0, True)
    assert "bytes that were given" not in result.output
    assert "on vLLM 0.12.0, as it started, with --max-model-len 64000 --kv-cache-dtype fp8" in " ".join(lines)


def test_what_does_not_fit_has_an_exit_status_and_the_longest(live: Callable[..., Result]) -> None:
    result = live("--max-model-len", "700000")
    said = " ".join(result.output.split())
    assert (result.exit_code, "Does not fit: " in said) == (1, True)
    assert "the longest that fits is 645,120." in said


def test_json_is_the_sidecars_answer(live: Callable[..., Result]) -> None:
    answer = json.loads(live("--json").output)
    assert (answer["schema"], answer["kv_cache"]["blocks"]) == (1, 5_040)


def test_an_estimate_is_shown_between_its_bounds(live: Callable[..., Result]) -> None:
    output = live("--max-num-batched-tokens", "64K").output
    assert "KV cache of a rank  40.44 GiB (40.44 GiB to 44.30 GiB), estimated" in output
    assert "note: The peak of activation was measured with 32768 batched tokens" in output


def test_a_refusal_has_the_sidecars_reason(live: Callable[..., Result]) -> None:
    result = live("--block-size", "64")
    assert result.exit_code == 2
    assert "highwater: block_size: 64 is not how the engine runs" in result.output


def test_a_wish_prints_the_command_line_its_reasons_and_the_proof(
    sidecar: FakeSidecar, live: Callable[..., Result]
) -> None:
    result = live("--wish", "16 x 40k")
    assert sidecar.bodies == [{"wish": "16 x 40k"}]
    assert result.exit_code == 1  # not as the engine runs
    assert "16 x 320 blocks and the null block, 5,121 in all" in result.output
    assert "  vllm serve MODEL --max-model-len 40960 --max-num-seqs 16 --kv-cache-dtype fp8" in result.output
    assert "fewer conversations: 15 of this length fit" in result.output


def test_images_in_pixels_are_counted_by_the_model_that_is_named(
    sidecar: FakeSidecar, live: Callable[..., Result], tmp_path: Path
) -> None:
    answer = '{"schema": 1, "status": "fits", "images": [{"prompt_tokens": 2042, "embeddings": 2040}]}'
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nread line; echo '{answer}'\n")
    python.chmod(0o755)
    words = ("--wish", "8 x 32k + 4 images of 1080p each", "--engine-python", str(python), str(tmp_path))
    assert live(*words).exit_code == 0
    assert sidecar.bodies == [{"wish": "8 x 32768 + 4 images of 2042 tokens"}]


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (("--device", "80GiB"), "--device"),
        (("--image", "vllm/vllm-openai"), "--image"),
        (("--measured", "/nonexistent"), "--measured"),
        (("--table",), "--table"),
        (("model", "--max-model-len", "4096"), "model"),
    ],
)
def test_what_a_running_engine_or_a_wish_decides_is_refused_on_the_command_line(
    sidecar: FakeSidecar, live: Callable[..., Result], options: tuple[str, ...], option: str
) -> None:
    """An option that changed nothing would look as if it had been taken."""
    result = live(*options)
    assert (result.exit_code, sidecar.bodies) == (2, [])
    assert f"leave {option} out" in result.output


def test_a_live_plan_that_the_bounds_leave_open_may_not_fit(live: Callable[..., Result]) -> None:
    """Twice the tokens of a step are taken to double the activation peak at most."""
    words = ("--max-num-batched-tokens", "64K", "--max-model-len", "610K")
    assert "May not fit: one request of 624,640 tokens needs 42.89 GiB" in live(*words).output
    answer = json.loads(live(*words, "--json").output)
    assert (answer["status"], answer["kv_cache"]["fits"]) == ("may_not_fit", None)
    assert "Fits:" in live("--max-num-batched-tokens", "64K").output


def test_a_pasted_line_is_named_where_flags_alone_are_meant(live: Callable[..., Result]) -> None:
    result = live("vllm", "serve", "m", "-tp", "2")
    assert (result.exit_code, "leave vllm serve m out, or --live" in result.stderr) == (2, True)
