"""A config.json is found, read and planned, with the bytes that are given or those that a device leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from highwater.plan.answer import plan_json, plan_text
from highwater.plan.measured import read_start
from highwater.plan.offline import plan_offline, read_config, read_tensors
from highwater.plan.quantization import quantization_of
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags, command_line, given_flags

CONFIGS = Path(__file__).parent / "configs"
LLAMA = CONFIGS / "llama-3.1-8b.json"
GIB = 1 << 30
BOUNDS = {"available_bytes_low", "available_bytes_high", "blocks_low", "blocks_high"}


def made(**flags: Any) -> dict[str, Any]:
    """Return the JSON of a plan of Llama-3.1-8B on vLLM 0.19.0."""
    return plan_json(plan_offline(read_config(str(LLAMA)), EngineFlags(**flags), "0.19.0"), "llama")


def test_a_folder_is_taken_for_the_config_in_it(tmp_path: Path):
    """As vLLM takes a model."""
    (tmp_path / "config.json").write_bytes(LLAMA.read_bytes())
    assert read_config(str(tmp_path)) == read_config(str(LLAMA))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory; a model's config.json is needed"),
        (b"{", "holds no JSON"),
        (b"\xff\xfe", "holds no JSON"),
        (b"[" * 100_000, "holds no JSON"),
        (b"[1]", "a JSON object is needed \\(a model's config.json\\), this is a list"),
        (b" " * (9 << 20), "has more than 8,388,608 bytes; a model's config.json is needed"),
    ],
    ids=["missing", "cut short", "no text", "nested too deep", "a list", "huge"],
)
def test_what_is_no_config_is_refused(tmp_path: Path, content: bytes | None, message: str):
    """The error names the file."""
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PlanError, match=message) as refused:
        read_config(str(tmp_path))
    assert str(file) in str(refused.value)


def test_another_file_is_told_from_a_config(tmp_path: Path):
    """What is needed is a config.json, whatever the file that was named is called."""
    page = tmp_path / "README.md"
    page.write_text("# A model")
    with pytest.raises(PlanError, match=r"README\.md: holds no JSON: .*; a model's config\.json is needed"):
        read_config(str(page))


def test_a_plan_with_bytes_has_every_figure():
    """29,746 blocks of 16 tokens, all exact."""
    answer = made(kv_cache_memory_bytes=58 * GIB, max_model_len=16384)
    cache = answer["kv_cache"]
    assert (answer["schema"], answer["vllm_version"], answer["platform"]) == (1, "0.19.0", "cuda")
    assert answer["model"] == {"architecture": "LlamaForCausalLM", "layers": 32, "max_position_embeddings": 131072}
    assert (cache["blocks"], cache["tokens"], cache["block_size"]) == (29696, 475136, 16)
    assert (cache["bytes_per_block"], cache["needed_bytes"]) == (2 << 20, 2 * GIB)
    assert (cache["fits"], cache["max_model_len_that_fits"], cache["refusal"]) == (True, 16384, None)
    assert cache["max_concurrency"] == 29.0
    assert set(cache["grades"].values()) == {"exact"}
    assert set(cache["grades"]) == set(cache) - {"grades", "refusal"} - BOUNDS


def test_a_plan_without_bytes_says_what_it_does_not_know():
    """Null, never 0, and a note with what to give."""
    answer = made(max_model_len=16384)
    cache = answer["kv_cache"]
    unknown = {"available_bytes", "blocks", "tokens", "max_concurrency", "fits", "max_model_len_that_fits"}
    assert {name for name, value in cache.items() if value is None} == unknown | BOUNDS | {"refusal"}
    assert cache["needed_bytes"] == 2 * GIB
    assert not unknown & set(cache["grades"])
    assert any("give --kv-cache-memory-bytes" in note for note in answer["notes"])


def test_a_plan_that_does_not_fit_carries_vllms_own_refusal():
    """With the longest length that fits."""
    cache = made(kv_cache_memory_bytes=8 * GIB)["kv_cache"]
    assert (cache["fits"], cache["max_model_len_that_fits"]) == (False, 65536)
    assert "16.0 GiB" in cache["refusal"]


def test_a_device_is_divided_and_its_estimates_are_called_so():
    """An H100 with 79.19 GiB: the start printed 14.99 GiB of weights, and 58.11 for the KV cache."""
    answer = made(device_bytes=int(79.19 * GIB), gpu_memory_utilization=0.95, max_model_len=16384)
    budget, cache = answer["budget"], answer["kv_cache"]
    assert budget["weights_bytes"]["low"] <= 14.99 * GIB <= budget["weights_bytes"]["high"]
    assert cache["available_bytes"] == budget["available_bytes"]["bytes"]
    assert budget["available_bytes"]["low"] <= 58.11 * GIB <= budget["available_bytes"]["high"]
    assert cache["grades"]["blocks"] == "estimated"
    assert cache["grades"]["bytes_per_block"] == "exact"


def test_a_device_that_cannot_be_divided_leaves_the_rest_of_the_plan():
    """Where the weights cannot be estimated, the plan says why."""
    values = {key: value for key, value in read_config(str(LLAMA)).items() if key != "vocab_size"}
    plan = plan_offline(values, EngineFlags(device_bytes=80 * GIB), "0.19.0")
    assert plan.fits is None
    assert any("vocab_size" in note for note in plan.notes)


def test_a_folder_without_weights_has_no_tensors(tmp_path: Path):
    """And neither has a file."""
    assert read_tensors(str(tmp_path)) is None
    assert read_tensors(str(LLAMA)) is None


def test_the_command_line_is_vllms():
    """What was given, by vLLM's names; what only plans need is left out."""
    flags = EngineFlags(
        platform="cpu", device_bytes=GIB, max_model_len=8192, tensor_parallel_size=2, enable_prefix_caching=False
    )
    line = command_line(given_flags(flags), "my model")
    assert line == ("vllm serve 'my model' --max-model-len 8192 --tensor-parallel-size 2 --no-enable-prefix-caching")


def test_the_text_says_whether_it_fits_and_groups_alike_layers():
    """Gemma 3: sliding groups of the same size are one line."""
    values = read_config(str(CONFIGS / "gemma-3-27b.json"))
    flags = EngineFlags(kv_cache_memory_bytes=int(19.53 * GIB), max_model_len=8192)
    text = plan_text(plan_offline(values, flags, "0.19.0"))
    assert "It fits: vLLM starts with --max-model-len 8192." in text
    assert "4 x 9 sliding, room for 1 more: blocks of 16 tokens" in text
    short = EngineFlags(kv_cache_memory_bytes=GIB, max_model_len=8192)
    assert "It does not fit" in plan_text(plan_offline(values, short, "0.19.0"))


def test_what_the_oracle_answered_is_shown():
    """A difference is never hidden."""
    plan = plan_offline(read_config(str(LLAMA)), EngineFlags(kv_cache_memory_bytes=58 * GIB), "0.19.0")
    alike = {"vllm_version": "0.19.0", "differences": []}
    other = {"vllm_version": "0.19.0", "differences": ["blocks is 1 in the plan and 2 in vLLM"]}
    asked = "vLLM 0.19.0 itself, for this command line and the bytes of this plan: the same KV cache"
    assert asked in plan_text(plan, alike)
    assert "blocks is 1 in the plan and 2 in vLLM" in plan_text(plan, other)
    assert plan_json(plan, "llama", other)["oracle"] == other


def test_the_answer_is_json():
    """All of it."""
    answer = made(kv_cache_memory_bytes=58 * GIB)
    assert json.loads(json.dumps(answer)) == answer


LLAMA_FILE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


def checkpoint(folder: Path, config: dict[str, Any], beside: object) -> dict[str, Any]:
    """Write a model's two files, and return what is read of them."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    return dict(read_config(str(folder)))


def test_modelopts_own_file_beside_the_config_says_how_it_is_quantized(tmp_path: Path):
    """ModelOpt up to 0.29 wrote it; an FP8 KV cache has half the bytes."""
    values = checkpoint(tmp_path, LLAMA_FILE, MODELOPT_FILE)
    plan = plan_offline(values, EngineFlags(kv_cache_memory_bytes=1 << 30), "0.32.0")
    assert plan.resolved.elements.cache == "fp8_e4m3"
    scheme = quantization_of(values, None)
    assert scheme is not None
    assert (scheme.name, scheme.ignored) == ("fp8", ("lm_head",))


def test_a_quantization_in_the_config_wins_over_modelopts_own_file(tmp_path: Path):
    """As in vLLM, which then does not open it."""
    own = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert checkpoint(tmp_path, LLAMA_FILE | {"quantization_config": own}, [])["quantization_config"] == own


def test_a_file_of_modelopt_without_its_quantization_is_refused(tmp_path: Path):
    """By its name."""
    with pytest.raises(PlanError, match=r"hf_quant_config\.json: quantization: None; an object is needed"):
        checkpoint(tmp_path, LLAMA_FILE, {"producer": {"name": "modelopt"}, "quantization": None})


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str):
    """Opening it would wait for a writer."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_FILE))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(PlanError, match=rf"{name}: cannot be read: it is not a file"):
        read_config(str(tmp_path))


def test_a_pipe_as_a_measured_start_is_refused_at_once(tmp_path: Path):
    """Opening it would wait for a writer."""
    os.mkfifo(tmp_path / "start.json")
    with pytest.raises(PlanError, match=r"start\.json: cannot be read: it is not a file"):
        read_start(tmp_path / "start.json")


def test_a_device_is_refused():
    """It says that it has no bytes, and never ends."""
    with pytest.raises(PlanError, match=r"/dev/zero: cannot be read: it is not a file"):
        read_config("/dev/zero")
