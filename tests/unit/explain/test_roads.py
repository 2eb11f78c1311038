"""The kept process that is asked: progress, its end, and what is said where it gives no answer."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from highwater.explain import roads
from highwater.explain.command_line import read_line
from highwater.explain.roads import BuiltInRoad, CannotBeAskedError, VllmRoad
from highwater_worker.plan.cards import CARDS
from kvplan import EngineFlags, Figure, Limits, PlanError
from kvplan.builtin import Start
from kvplan.specs import FullAttention
from tests.fakes.recorded_vllm import write_python
from tests.patience import LIMIT_SECONDS

LINE = read_line(["vllm serve /model --max-model-len 32768"])


def script(folder: Path, text: str) -> str:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)
    return str(python)


def road_of(folder: Path, text: str, say: Callable[[str], None] = lambda _: None) -> VllmRoad:
    return VllmRoad(script(folder, text), "H100", say)


def test_one_process_answers_many_questions_and_ends(tmp_path: Path) -> None:
    python = write_python(tmp_path)
    with VllmRoad(str(python), "H100", lambda _: None) as road:
        pid = road._process.pid
        answers = [road.ask(LINE, activation=False) for _ in range(2)]
    assert [answer["status"] for answer in answers] == ["not_known"] * 2
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_its_children_end_with_it(tmp_path: Path) -> None:
    python = script(
        tmp_path, f'sleep 1000 & echo $! > {tmp_path}/pid; read line; echo \'{{"schema": 1, "status": "fits"}}\'; wait'
    )
    with VllmRoad(python, "H100", lambda _: None) as road:
        road.ask(LINE)
        child = os.pidfd_open(int((tmp_path / "pid").read_text()))
    assert select.select([child], [], [], LIMIT_SECONDS)[0]  # it has ended
    os.close(child)


def test_waiting_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roads, "_FIRST_WORD_SECONDS", 0.0)
    said: list[str] = []
    with road_of(tmp_path, 'read line; echo \'{"schema": 1, "status": "fits"}\'', said.append) as road:
        road.ask(LINE)
    assert said == ["asking vLLM: 0 s"]


@pytest.mark.parametrize(
    ("flag", "then"), [("--max-modl-len 8192", "; did you mean --max-model-len?"), ("--no-such-flag 1", "")]
)
def test_a_flag_that_vllm_does_not_know_is_answered_with_the_one_that_is_like_it(tmp_path, flag, then) -> None:
    error = f"unrecognized arguments: {flag}"
    answer = json.dumps({"schema": 1, "status": "invalid", "error": error})
    with road_of(tmp_path, f"read line; echo '{answer}'") as road:
        assert road.ask(LINE)["error"] == error + then


def test_a_vllm_that_cannot_be_asked_says_why_and_what_helps(tmp_path: Path) -> None:
    answer = '{"schema": 1, "status": "cannot_be_asked", "error": "no tokenizer", "help": "copy tokenizer.json"}'
    with (
        road_of(tmp_path, f"read line; echo '{answer}'") as road,
        pytest.raises(CannotBeAskedError, match=r"this vLLM cannot be asked: no tokenizer. copy tokenizer.json"),
    ):
        road.ask(LINE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo no module >&2; exit 1", "did not answer: no module"),
        ("exit 0", "did not answer: it said nothing"),
        ("setsid sleep 20 & exit 0", "did not answer: it said nothing"),
        ("read line; echo '[1]'", r"did not answer: it said \[1\]"),
        ("read line; echo '{}'", "did not answer: it said {}"),
    ],
)
def test_a_process_that_ends_is_quoted(tmp_path: Path, text: str, said: str) -> None:
    with road_of(tmp_path, text) as road, pytest.raises(CannotBeAskedError, match=said):
        road.ask(LINE)


def test_a_process_without_an_answer_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roads, "_GRACE_SECONDS", -2 * roads.DEADLINE_SECONDS)
    with road_of(tmp_path, "exec sleep 1000") as road, pytest.raises(CannotBeAskedError, match="it said nothing"):
        road.ask(LINE)


def test_an_interpreter_that_is_none_is_named() -> None:
    with pytest.raises(PlanError, match="--engine-python: /nowhere/python could not be started"):
        VllmRoad("/nowhere/python", "H100", lambda _: None).__enter__()


def test_only_the_worker_package_goes_onto_the_path_beside_the_shim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/operator")
    python = script(tmp_path, 'read line; ls "${PYTHONPATH%%:*}" >&2; echo "$PYTHONPATH" >&2')
    with VllmRoad(python, "H100", lambda _: None) as road, pytest.raises(CannotBeAskedError) as raised:
        road.ask(LINE)
    worker, shim, given = str(raised.value).rpartition(" ")[2].split(":")
    assert (worker != shim, shim.endswith("process/shim"), given) == (True, True, "/of/the/operator")


def test_what_the_built_in_refuses_comes_with_the_command_that_asks_a_vllm() -> None:
    with pytest.raises(PlanError, match=r"highwater plan --engine-python PATH -- vllm serve m --cpu-offload-gb 4$"):
        BuiltInRoad(None).ask(read_line(["vllm serve m --cpu-offload-gb 4"]))


GIB = 1 << 30
PAGE = 1 << 16
LAYERS = {str(number): FullAttention(block_size=16, kv_heads=8, head_size=128, element_bytes=2) for number in range(32)}
BLOCK = 32 * PAGE


def exact(size: int) -> Figure:
    return Figure(size, size, size, "exact", "")


class Rules:
    """Stands for kvplan's: 15 GiB of weights on one rank, a peak of 1 GiB, pages of 64 KiB in 32 layers."""

    def __init__(self, **changed: Any) -> None:
        self.changed: dict[str, Any] = changed
        self.flags: list[EngineFlags] = []
        self.checkpoint_bytes: int | None = None

    def __call__(self, config: Mapping[str, Any], flags: EngineFlags, *, checkpoint_bytes: int | None = None) -> Start:
        assert config == {"model_type": "llama"}
        self.flags.append(flags)
        self.checkpoint_bytes = checkpoint_bytes
        given = {
            "max_model_len": 32_768, "max_num_batched_tokens": 8192, "max_num_seqs": 256,
            "gpu_memory_utilization": 0.92, "kv_cache_dtype": "auto",
        }  # fmt: skip
        given |= {name: value for name in given if (value := getattr(flags, name)) is not None}
        filled = EngineFlags(**given, tensor_parallel_size=flags.tensor_parallel_size)
        return Start(**{
            "architecture": "LlamaForCausalLM", "layers": 32, "flags": filled,
            "limits": Limits.of(filled, max_encoder_tokens=0, v2_model_runner=True), "workers": [LAYERS],
            "weights": (exact(15 * GIB),), "activation": exact(GIB), "why_unknown": None,
            "has_experts": False, "encodes": (), "notes": ("no card is named",), "doubts": (), **self.changed,
        })  # fmt: skip


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.fixture(name="ask")
def _ask(monkeypatch: pytest.MonkeyPatch, model: Path) -> Callable[..., Any]:
    """Ask the built-in about a model, by rules that stand for kvplan's; a card is an L4."""

    def ask(words: str = "", rules: Rules | None = None, at: object = model, **question: Any) -> Any:
        monkeypatch.setattr(roads, "read_start", rules or Rules())
        card = CARDS["L4"] if "device_bytes" in question else None
        return BuiltInRoad(card).ask(read_line(["vllm", "serve", str(at), *words.split()]), **question)

    return ask


def test_a_card_is_divided_into_parts_with_bounds(ask: Callable[..., Any]) -> None:
    answer = ask("--max-model-len 8192", device_bytes=24 * GIB)
    (parts,) = answer["budget"]["ranks"]
    assert list(parts) == ["weights", "activation", "non_torch", "graphs", "buffers"]
    left = answer["budget"]["requested_bytes"] - sum(part["bytes"] for part in parts.values())
    kv = answer["kv_cache"]
    assert (kv["available_bytes"], kv["blocks"]) == (left, left // BLOCK)
    assert kv["available_bytes_low"] < kv["available_bytes"] < kv["available_bytes_high"]
    assert (answer["status"], kv["grades"]["blocks"], kv["grades"]["needed_bytes"]) == ("fits", "estimated", "exact")
    assert kv["max_concurrency"] == pytest.approx(kv["blocks"] / 512, abs=0.01)


def test_bounds_on_both_sides_leave_it_open_and_others_on_the_card_refuse_it(ask: Callable[..., Any]) -> None:
    kv = ask(device_bytes=24 * GIB)["kv_cache"]
    between = (kv["available_bytes_low"] + kv["available_bytes"]) // 2 // BLOCK * 16
    assert ask(f"--max-model-len {between}", device_bytes=24 * GIB)["status"] == "may_not_fit"
    refused = ask(device_bytes=24 * GIB, in_use_bytes=3 * GIB)
    assert (refused["status"], "are more than the others leave" in refused["refusal"]["message"]) == ("refused", True)


def test_given_bytes_are_exact_and_no_bytes_compare_with_nothing(ask: Callable[..., Any]) -> None:
    given = ask("--kv-cache-memory-bytes 5G")
    assert (given["status"], given["kv_cache"]["grades"]["blocks"], "budget" in given) == ("fits", "exact", False)
    open_ = ask()
    assert (open_["status"], open_["kv_cache"]["blocks"]) == ("not_known", None)
    assert open_["kv_cache"]["needed_bytes"] == 2048 * BLOCK


def test_a_length_that_does_not_fit_has_the_refusal_and_the_longest(ask: Callable[..., Any]) -> None:
    answer = ask("--kv-cache-memory-bytes 1G")
    assert (answer["status"], answer["kv_cache"]["max_model_len_that_fits"]) == ("does_not_fit", 511 * 16)
    assert "GiB KV cache is needed" in answer["kv_cache"]["refusal"]


def test_measured_parts_replace_estimates(ask: Callable[..., Any]) -> None:
    measured = {"weights": 14 * GIB, "activation": GIB, "non_torch": GIB // 2, "graphs": 0, "buffers": 0}
    kv = ask(device_bytes=24 * GIB, measured=measured)["kv_cache"]
    assert kv["grades"]["available_bytes"] == "measured"
    assert kv["available_bytes_low"] == kv["available_bytes_high"]


def test_eager_takes_no_graphs_and_fewer_captured_batches_take_less(ask: Callable[..., Any]) -> None:
    captured = [
        ask(words, device_bytes=24 * GIB)["budget"]["ranks"][0]["graphs"]["bytes"]
        for words in ("--enforce-eager", "--max-cudagraph-capture-size 8", "")
    ]
    assert captured[0] == 0 < captured[1] < captured[2]


def test_a_peak_that_is_not_known_is_said(ask: Callable[..., Any]) -> None:
    rules = Rules(activation=None, why_unknown="activation: the encoder's largest input is not known")
    answer = ask(rules=rules, device_bytes=24 * GIB)
    assert answer["status"] == "not_known"
    assert answer["not_counted"] == ["activation: the encoder's largest input is not known"]


def test_doubts_make_estimates_of_what_was_exact(ask: Callable[..., Any]) -> None:
    answer = ask("--kv-cache-memory-bytes 5G --port 1", Rules(doubts=("bfloat16 is assumed",)))
    assert answer["kv_cache"]["grades"]["blocks"] == "estimated"
    assert answer["guessed"] == ["no card is named", "bfloat16 is assumed", "no memory depends on --port"]


def test_a_cards_name_and_the_files_bytes_go_to_the_rules(ask: Callable[..., Any], model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"0" * 7)
    rules = Rules()
    ask(rules=rules, device_bytes=24 * GIB)
    assert (rules.flags[0].device_bytes, rules.checkpoint_bytes) == (24 * GIB, 7)
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 9}}')
    ask(rules=rules)
    assert rules.checkpoint_bytes == 9


def test_a_weight_that_was_not_fetched_makes_the_size_unknown(ask: Callable[..., Any], model: Path) -> None:
    (model / "1.safetensors").write_bytes(b"0" * 7)
    (model / "2.safetensors").symlink_to("nowhere")
    rules = Rules()
    ask(rules=rules)
    assert rules.checkpoint_bytes is None


def test_the_tokens_of_each_request_are_kept_beside_the_weights(ask: Callable[..., Any]) -> None:
    parts = ask(rules=Rules(), device_bytes=24 * GIB)["budget"]["ranks"][0]
    assert parts["buffers"]["bytes"] == 4 * 256 * 32_768


def test_a_model_is_found_in_the_local_cache_or_the_command_that_fetches_it_is_named(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(model / "hub"))
    with pytest.raises(PlanError, match=r"not in the local cache; hf download org/name --include '\*.json'"):
        ask(at="org/name")
    snapshot = model / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "config.json").rename(snapshot / "config.json")
    assert ask(at="org/name")["status"] == "not_known"


def test_variables_before_the_command_are_said_not_to_be_looked_at(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr(roads, "read_start", Rules())
    answer = BuiltInRoad(None).ask(read_line([f"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve {model}"]))
    assert "the environment VLLM_USE_V2_MODEL_RUNNER was not looked at" in answer["guessed"]
