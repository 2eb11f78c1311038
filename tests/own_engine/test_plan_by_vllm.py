"""vLLM asked on meta in a real environment: what starts printed, each option of a command line, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from highwater.terminal.demo.engine import DEFAULT_VERSION, EngineEnvironment, build_model
from tests.fakes.cann.ascend import folder_of_both
from tests.support.asked_starts import Asked, asked, model_folder, parts_of, pool_of
from tests.support.asked_sweep import builtin, cases, compare, vllm_of
from tests.support.printed_pools import GIB, Start
from tests.support.printed_pools import STARTS as POOLS
from tests.support.recorded_starts import LLAMA_8B, QWEN15_MOE, Config, RecordedStart
from tests.support.recorded_starts import STARTS as PARTS

pytestmark = pytest.mark.timeout(1800, func_only=True)
# Their files here lack what vLLM 0.32 reads: a vision tower, an activation scheme.
INCOMPLETE = ("gemma-4-26b-a4b", "kimi-k2")
PRINTED = [start for start in POOLS if start.config not in INCOMPLETE and (start.blocks or start.concurrency)]
# Of one runner and one sampler; the configuration of Mistral Small was written from memory, MXFP4's kernels pad.
DENSE = [start for start in PARTS if start.name.startswith(("Llama-3", "Qwen2.5", "gemma-2", "phi", "Qwen1.5"))]


@pytest.fixture(scope="module")
def vllm() -> Iterator[Asked]:
    with asked(DEFAULT_VERSION) as process:
        yield process


@pytest.fixture(scope="module")
def vllm_v1() -> Iterator[Asked]:
    """Asked with the environment that `parts_of` puts before its commands, which one process keeps."""
    with asked(DEFAULT_VERSION) as process:
        yield process


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("multimodal") / "vl")


@pytest.mark.parametrize("start", PRINTED, ids=lambda start: f"{start.config}-{start.row}")
def test_a_pool_is_what_the_start_printed(vllm: Asked, models: Path, start: Start) -> None:
    low, high = (answer["kv_cache"] for answer in pool_of(vllm, start, models))
    if start.blocks is not None:
        assert low["blocks"] <= start.blocks <= high["blocks"]
    if start.concurrency is not None:
        assert low["max_concurrency"] - 0.005 <= start.concurrency <= high["max_concurrency"] + 0.005
    assert low["grades"]["blocks"] == "exact"


@pytest.mark.parametrize("start", DENSE, ids=str)
def test_weights_and_activation_are_what_the_start_printed(vllm_v1: Asked, models: Path, start: RecordedStart) -> None:
    answer = parts_of(vllm_v1, start, models)
    (rank,) = answer["ranks"]
    (weights, *_), (peak, low, high, *_) = rank["weights"], rank["activation"]
    assert weights / GIB == pytest.approx(start.weights, abs=0.011)
    assert low / GIB <= start.activation <= high / GIB
    assert peak / GIB == pytest.approx(start.activation, abs=0.02)


LORA = "--enable-lora --max-loras 2 --max-lora-rank 64"
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    # Options of a model of 14.99 GiB and 10,240 blocks, and what they change.
    "data parallel": ("-dp 2", {}),
    "eager": ("--enforce-eager", {}),
    "LoRA": (LORA, {"weights": 15.68}),
    "offloaded weights": ("--cpu-offload-gb 5", {"weights": 9.82}),
    "offloaded KV cache": ("--kv-offloading-size 4", {}),
    "connector": ("""--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'""", {}),
    "overridden": ("""--hf-overrides '{"num_hidden_layers": 8}'""", {"weights": 5.24, "blocks": 40960}),
    "fp8 cache": ("--kv-cache-dtype fp8", {"blocks": 20480}),
    "bytes given": ("--kv-cache-memory-bytes 10G", {"asked": None, "blocks": 5120}),
    "tensor parallel": ("-tp 2", {"weights": 7.51, "blocks": 20480}),
    "stages": ("-pp 2", {"weights": 7.51, "blocks": 20480}),
    "online fp8": ("--quantization fp8", {"weights": 8.49}),
    "ngram": ("""-sc '{"method": "ngram", "num_speculative_tokens": 3}'""", {}),
    "draft model": ("""-sc '{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 3}'""",
                    {"weights": 17.59, "blocks": 9102}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_taken_as_vllm_takes_it(vllm: Asked, models: Path, name: str) -> None:
    folder = model_folder(models, "llama", LLAMA_8B)
    draft = model_folder(models, "draft", {**LLAMA_8B, "num_hidden_layers": 4, "tie_word_embeddings": True})
    options, expected = OPTIONS[name]
    command = f"vllm serve {folder} --max-model-len 8192 {options.replace('DRAFT', str(draft))}"
    answer = vllm.ask(command, kv_cache_bytes=expected.get("asked", 20 * GIB))
    assert answer["status"] == "fits", answer
    assert answer["kv_cache"]["blocks"] == expected.get("blocks", 10240)
    assert answer["ranks"][0]["weights"][0] / GIB == pytest.approx(expected.get("weights", 14.99), abs=0.01)


def test_experts_are_divided_over_all_ranks(vllm: Asked, models: Path) -> None:
    folder = model_folder(models, "moe", QWEN15_MOE)
    command = f"vllm serve {folder} --max-model-len 8192 --enable-expert-parallel -tp 2"
    alone, divided = (vllm.ask(f"{command} {more}", kv_cache_bytes=4 * GIB) for more in ("", "-dp 2"))
    experts = 60 * 3 * 1408 * 2048 * 24 * 2
    less = alone["ranks"][0]["weights"][1] - divided["ranks"][0]["weights"][1]
    assert less == pytest.approx(experts / 2 - experts / 4, rel=0.01)


def test_a_length_that_does_not_fit_is_refused_in_vllms_words_and_auto_finds_the_longest(
    vllm: Asked, models: Path
) -> None:
    command = f"vllm serve {model_folder(models, 'llama', LLAMA_8B)} --max-model-len"
    refused, found = (vllm.ask(f"{command} {length}", kv_cache_bytes=5 * GIB) for length in ("65536", "auto"))
    assert refused["status"] == "does_not_fit"
    assert "the estimated maximum model length is 40944" in refused["kv_cache"]["refusal"]
    assert refused["kv_cache"]["max_model_len_that_fits"] == found["kv_cache"]["max_model_len"] == 40944


def test_no_answer_depends_on_the_one_before(vllm: Asked, models: Path, multimodal: Path) -> None:
    command = f"vllm serve {model_folder(models, 'llama', LLAMA_8B)} --max-model-len 8192"
    first = vllm.ask(command)
    vllm.ask(f"vllm serve {multimodal} --max-model-len 4096", kv_cache_bytes=GIB)
    again = vllm.ask(command)
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert again["ranks"][0]["activation"][0] < 2 * GIB


def test_an_image_costs_the_tokens_that_vllms_processor_makes_of_it(vllm: Asked, multimodal: Path) -> None:
    """Of the tiny Qwen3-VL, a token is 32 pixels square; too large a one has a reason, and the rest its answer."""
    sizes = [[640, 480], [1280, 736], [1, 1], [1 << 14, 1 << 14]]
    answer = vllm.ask(f"vllm serve {multimodal} --max-model-len 4096", kv_cache_bytes=GIB, images=sizes)
    assert [image.get("prompt_tokens") for image in answer["images"]] == [300, 920, 1, None]
    assert [image.get("embeddings") for image in answer["images"]] == [300, 920, 1, None]
    assert "must be 1 to" in answer["images"][3]["error"]
    assert (answer["status"], answer["encoder"]["max_tokens_per_item"]["image"]) == ("fits", 1024)


@pytest.mark.parametrize("size", [10, pytest.param(100, marks=pytest.mark.soak)])
def test_a_sample_of_the_sweep_has_answers_each_in_vllms_words_where_it_is_refused(
    vllm: Asked, models: Path, size: int
) -> None:
    """None ends because of a stand-in."""
    planner = vllm_of(vllm, models)
    assert [case for case in cases(sample=size) if planner(case) is None] == []


@pytest.mark.skipif(find_spec("kvplan.builtin") is None, reason="the built-in is not in this tree")
@pytest.mark.parametrize("size", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_a_sample_of_the_sweep_is_the_same_to_the_builtin(vllm: Asked, models: Path, size: int) -> None:
    outcome = compare(cases(sample=size, seed=8), builtin, vllm_of(vllm, models))
    assert outcome.differences == ()
    assert outcome.answered > size / 6


def test_a_models_own_code_is_loaded_only_where_the_command_line_says_so(vllm: Asked, tmp_path: Path) -> None:
    own = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": {"AutoConfig": "mine.Config"}}
    folder = model_folder(tmp_path, "mine", {**LLAMA_8B, **own})
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w')\n")
    answer = vllm.ask(f"vllm serve {folder}")
    assert (answer["status"], (tmp_path / "loaded").exists()) == ("refused", False)
    assert "contains custom code" in answer["refusal"]["message"]
    vllm.ask(f"vllm serve {folder} --trust-remote-code")
    assert (tmp_path / "loaded").exists()


def test_what_is_pasted_or_missing_has_a_status_and_a_reason(vllm: Asked, models: Path, tmp_path: Path) -> None:
    folder = model_folder(models, "llama", LLAMA_8B)
    config = tmp_path / "serve.yaml"
    config.write_text("max-model-len: 4096\ntensor-parallel-size: 2\n")
    long = vllm.ask(f"vllm serve {folder} --max-model-len 4096 --served-model-name {'x' * 100_000}", kv_cache_bytes=GIB)
    of_file = vllm.ask(f"vllm serve {folder} --config {config}", kv_cache_bytes=GIB)
    assert (long["status"], of_file["config"]["parallel"]["tensor_parallel_size"]) == ("fits", 2)
    in_use = vllm.ask(f"vllm serve {folder} --max-model-len 4096", in_use_bytes=70 * GIB)
    assert in_use["refusal"]["message"].startswith("Free memory on device (9.19/79.19 GiB)")
    expected = {
        f"{folder} --config {tmp_path}/none.yaml": ("invalid", "No such file"),
        f"{folder} --gpu-memory-utilization 1.5": ("refused", "less than or equal to 1"),
        f"{folder} --kv-cache-dtype fp9": ("invalid", "invalid choice: 'fp9'"),
        f"{folder} --help": ("invalid", "--help or --version was asked for"),
        f"{folder}/config.json": ("cannot_be_asked", "is a file; a model is its folder"),
        model_folder(models, "unknown", {**LLAMA_8B, "architectures": ["NoSuch"]}): ("refused", "['NoSuch'] are not"),
    }
    for words, (status, reason) in expected.items():
        answer = vllm.ask(f"vllm serve {words}")
        assert answer["status"] == status, answer
        assert reason in json.dumps([answer.get(name) for name in ("error", "refusal", "help")]), answer


def test_what_vllm_does_not_take_is_told_from_what_cannot_be_asked(vllm: Asked, models: Path) -> None:
    folder = model_folder(models, "llama", LLAMA_8B)
    unknown = vllm.ask(f"vllm serve {folder} --no-such-flag 1")
    divided = vllm.ask(f"vllm serve {folder} -tp 3")
    absent = vllm.ask(f"vllm serve {models / 'none'}")
    assert [answer["status"] for answer in (unknown, divided, absent)] == ["invalid", "refused", "cannot_be_asked"]
    assert "must be divisible by tensor parallel size" in divided["refusal"]["message"]
    assert "is no folder here" in absent["help"]


def test_the_bytes_of_a_card_have_bounds_and_what_was_pretended_is_said(vllm: Asked, models: Path) -> None:
    answer = vllm.ask(f"vllm serve {model_folder(models, 'llama', LLAMA_8B)} --max-model-len 8192")
    pool = answer["kv_cache"]
    assert pool["blocks_low"] < pool["blocks"] < pool["blocks_high"]
    assert pool["grades"] | {"blocks": "estimated", "bytes_per_block": "exact"} == pool["grades"]
    assert "the card: NVIDIA H100 80GB HBM3" in answer["pretended"]
    assert json.loads(json.dumps(answer)) == answer


@pytest.mark.device
@pytest.mark.parametrize("config", [LLAMA_8B, QWEN15_MOE], ids=["dense", "experts"])
def test_vllm_ascends_runner_is_asked_without_torch_npu(
    engine_environment: EngineEnvironment, models: Path, config: Config
) -> None:
    """Blocks of 128 tokens, and two ranks; the activation peak of NPU operators is not known, and that is said."""
    folder = model_folder(models, "ascend", config)
    with asked(DEFAULT_VERSION, "--card", "910B", before=(folder_of_both(engine_environment),)) as process:
        command = f"vllm serve {folder} --max-model-len 8192 -tp 2"
        given, on_card = (process.ask(command, kv_cache_bytes=size) for size in (20 * GIB, None))
        told = process.ask(command, measured={"activation": 2 * GIB})
    assert given["status"] == "fits", given
    kept = config["num_key_value_heads"] // 2 * 128 * 2 * 2 * config["num_hidden_layers"]
    assert (given["kv_cache"]["block_size"], given["kv_cache"]["blocks"]) == (128, 20 * GIB // (128 * kept))
    assert on_card["status"] == "not_known"
    assert (told["status"], told["budget"]["ranks"][0]["activation"]["grade"]) == ("fits", "measured")
    assert any("the activation peak" in text for text in on_card["not_counted"])
