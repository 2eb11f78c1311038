"""What a question may be, and what is said of one that cannot be answered; no vLLM is here."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from highwater_worker.plan import __main__ as command
from highwater_worker.plan import cards, versions
from highwater_worker.plan.answer import STATUSES, InvalidError, _failure, _said, parts_of_start
from highwater_worker.plan.cards import CARDS, card_of
from tests.fakes.raising import raising
from tests.support.asked_sweep import FIGURES, Case, Figures, compare

PASTED = r"""VLLM_USE_V2_MODEL_RUNNER=0 \
  vllm serve Qwen/Qwen3-14B \
  --max_model_len 32768 -sc '{"method": "ngram"}'  # ours"""


def test_a_pasted_command_is_split_with_its_environment() -> None:
    assert command.split(PASTED) == (
        {"VLLM_USE_V2_MODEL_RUNNER": "0"},
        ["Qwen/Qwen3-14B", "--max_model_len", "32768", "-sc", '{"method": "ngram"}'],
    )


@pytest.mark.parametrize(
    "given",
    [
        "python3 -m vllm.entrypoints.openai.api_server --model m",
        "python -m vllm.entrypoints.cli.main serve --model m",
        ["/opt/bin/vllm", "serve", "--model", "m"],
        "env A=1 vllm serve --model m",
    ],
)
def test_every_way_to_start_the_server_is_taken(given: str | list[str]) -> None:
    assert command.split(given)[1] == ["--model", "m"]


@pytest.mark.parametrize("given", ["", "vllm bench serve m", "vllm serve 'm", []])
def test_another_command_is_refused_with_what_would_be_right(given: str | list[str]) -> None:
    with pytest.raises(InvalidError, match=r"vllm serve MODEL|cannot be split"):
        command.split(given)


def test_a_card_is_named_or_a_compute_capability() -> None:
    assert card_of("L4").name == "NVIDIA L4"
    assert card_of("9.0") is CARDS["H100"]
    with pytest.raises(ValueError, match="'H1000'; must be one of H100, "):
        card_of("H1000")


def test_every_card_says_where_its_size_was_read() -> None:
    """A label such as 24 GB is no size: an L4 taken for 24 GiB has a third more KV cache than there is."""
    assert CARDS["L4"].total_bytes < 23 << 30
    assert all(card.read_in for card in CARDS.values())


def serve(monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[dict[str, Any]]:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    monkeypatch.setattr(command.os, "fdopen", lambda *_: written)
    monkeypatch.setattr(command.os, "dup2", lambda *_: None)
    monkeypatch.setattr(command, "import_vllm", no_vllm)
    assert command.main(["--serve"]) == 0
    return [json.loads(line) for line in written.getvalue().splitlines()]


no_vllm = raising(command.CannotBeAskedError("no vLLM"))


def test_every_line_has_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = serve(monkeypatch, "[1]", "{", '{"command": "ls"}', '{"command": "vllm serve m"}')
    assert [answer["status"] for answer in answers] == ["invalid", "invalid", "invalid", "cannot_be_asked"]
    assert (
        answers[0]["error"] == """the line '[1]\\n' is no JSON object; must be like {"command": "vllm serve MODEL"}"""
    )
    assert answers[3]["error"] == "no vLLM"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("kv_cache_bytes", "many", "the question has {'kv_cache_bytes': 'many'}; must be bytes, 0 or more"),
        ("in_use_bytes", -1, "must be bytes, 0 or more"),
        ("images", [[640]], r"images is \[\[640\]\]; must be a list of \[width, height\] in pixels"),
        ("images", 7, "must be a list of"),
        ("measured", {"weights": "15 GiB"}, "must be parts of a start by name, with bytes"),
        ("card", "L4", r"the question has \['card'\]; must be of \['activation', 'argv', 'command'"),
    ],
)
def test_a_question_that_is_wrong_is_refused_with_what_would_be_right(key: str, value: object, said: str) -> None:
    with pytest.raises(InvalidError, match=said):
        command.checked({"command": "vllm serve m", key: value})


def test_a_refusal_is_shown_in_vllms_words_without_pydantics_report() -> None:
    report = ValueError(
        "1 validation error for X\n  Value error, Total heads (32) differ. [type=value_error, input_v]\n"
    )
    assert _said(report) == "Total heads (32) differ."


def test_an_import_that_ends_the_process_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)\n")
    done = ask_with(tmp_path, "--", "vllm", "serve", "m")
    assert (done.returncode, json.loads(done.stdout)["status"]) == (4, "cannot_be_asked")
    assert "importing vLLM ended the process with signal 6" in json.loads(done.stdout)["error"]


def test_an_import_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nwhile True: os.getpid()\n")
    done = ask_with(tmp_path, "--deadline", "1", "--", "vllm", "serve", "m")
    assert (done.returncode, json.loads(done.stdout)["error"]) == (4, "importing vLLM took more than 1 s")


def test_sigterm_in_the_middle_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nprint(os.getpid(), flush=True)\nwhile True: os.getpid()\n")
    command = [sys.executable, "-m", "highwater_worker.plan", "--", "vllm", "serve", "m"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asked:
        child = int(asked.stderr.readline())
        asked.terminate()
        asked.stderr.read()  # to its end: whoever had it open has ended
    assert asked.returncode == -signal.SIGTERM
    assert not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes()


def ask_with(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-m", "highwater_worker.plan", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


def test_where_there_is_no_vllm_the_status_is_4() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "highwater_worker.plan", "--", "vllm", "serve", "m"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["status"]) == (4, "cannot_be_asked")
    assert "No module named 'torch'" in answer["error"]


def test_an_invalid_line_ends_with_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "highwater_worker.plan", "--", "ls"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, json.loads(done.stdout)["status"]) == (2, "invalid")


def test_a_refusal_of_vllms_is_told_from_a_stand_in_that_fails(tmp_path: Any) -> None:
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json"):
        (tmp_path / name).touch()
    refused = _failure(ValueError("no"), "the command line", str(tmp_path))
    assert refused == {"status": "refused", "refusal": {"stage": "the command line", "message": "no"}}
    assert "status" not in _failure(ValueError("no"), "construction", str(tmp_path))
    assert STATUSES["refused"] == 1


def test_a_missing_file_is_named(tmp_path: Any) -> None:
    (tmp_path / "config.json").touch()
    answer = _failure(OSError("cannot load the image processor"), "construction", str(tmp_path))
    assert answer["help"].startswith(f"{tmp_path} has no tokenizer_config.json, tokenizer.json, preprocessor_config")
    assert "hf download org/model --include" in _failure(OSError(""), "construction", "org/model")["help"]
    assert "download" not in _failure(OSError(""), "construction", "/nowhere/model")["help"]


def figure(low: int, likely: int, high: int) -> cards.Figure:
    return cards.Figure(likely, low, high, "estimated", "")


def test_what_is_left_has_the_bounds_of_what_is_taken() -> None:
    parts = {"weights": cards.exact(40, ""), "activation": figure(5, 10, 70)}
    assert cards.left(100, parts)[:4] == (50, 0, 55, "estimated")
    assert cards.left(100, {"weights": cards.exact(40, "")})[:4] == (60, 60, 60, "exact")


def test_a_plan_of_parts_that_a_start_measured_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "counts_buffers", lambda: False)
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1))
    seen = {"weights": figure(10, 20, 30), "activation": None, "graphs": None}
    parts = parts_of_start(seen, config, {"weights": 15, "activation": 5, "non_torch": 2}, is_npu=False)
    assert cards.left(100, parts)[:4] == (78, 78, 78, "measured")


CHOSEN = [Case("m", {}, {"max_model_len": length}, 1 << 30) for length in (1024, 2048)]
POOL: Figures = dict.fromkeys(FIGURES, 8)


def test_each_figure_that_differs_is_named_with_its_case() -> None:
    outcome = compare(CHOSEN[:1], lambda _: POOL, lambda _: {**POOL, "blocks": 9})
    assert outcome == (1, ("m (max_model_len=1024; 1073741824 bytes): blocks is 8, and 9 in vLLM",))


def test_what_vllm_refuses_must_not_be_planned() -> None:
    outcome = compare(CHOSEN[:1], lambda _: POOL, lambda _: {"refused": "no"})
    assert outcome.differences == (f"{CHOSEN[0]}: it is planned, and refused by vLLM: no",)
