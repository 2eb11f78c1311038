"""vLLM of each version asked on meta: the figures that no version changes, and what the newest makes of them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from highwater.terminal.demo.engine import DEFAULT_VERSION, build_model
from tests.engines import CUDA_VERSION
from tests.support.asked_starts import asked, model_folder
from tests.support.asked_sweep import builtin, cases, compare, vllm_of
from tests.support.printed_pools import GIB
from tests.support.recorded_starts import GPT_OSS_20B, LLAMA_8B, QWEN15_MOE

VERSIONS = ["0.12.0", "0.18.0", "0.23.0", "0.27.0", DEFAULT_VERSION, "0.33.0"]


@pytest.mark.parametrize(
    ("version", "of_cuda"),
    [*((version, False) for version in VERSIONS), (CUDA_VERSION, True)],
    ids=[*VERSIONS, f"{CUDA_VERSION} for CUDA, without a driver"],
)
def test_a_version_is_asked(version: str, of_cuda: bool, tmp_path: Path) -> None:
    folders = {
        "llama": model_folder(tmp_path, "llama", LLAMA_8B),
        "gpt-oss": model_folder(tmp_path, "gpt-oss", GPT_OSS_20B),
        "moe": model_folder(tmp_path, "moe", QWEN15_MOE),
    }
    images = build_model(tmp_path / "images")
    if version == "0.12.0":  # as tests/engines.py does
        tokenizer = images / "tokenizer_config.json"
        tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"tokenizer_class": "Qwen2TokenizerFast"}))
    with asked(version, of_cuda=of_cuda) as vllm:
        answers = {
            name: vllm.ask(f"vllm serve {folder} --max-model-len 8192 -tp 2", kv_cache_bytes=20 * GIB)
            for name, folder in folders.items()
        }
        seen = vllm.ask(f"vllm serve {images} --max-model-len 4096", kv_cache_bytes=GIB, images=[[640, 480]])
        on_card = vllm.ask(f"vllm serve {folders['llama']} --max-model-len 8192")
    assert {name: answer["status"] for name, answer in answers.items()} == dict.fromkeys(folders, "fits"), answers
    pools = {name: answer["kv_cache"] for name, answer in answers.items()}
    assert pools["llama"]["blocks"] == 20 * GIB // (16 * 4 * 128 * 2 * 2 * 32)
    assert pools["gpt-oss"]["blocks"] == 20 * GIB // (16 * 4 * 64 * 2 * 2 * 12)
    assert pools["moe"]["blocks"] == 20 * GIB // (16 * 8 * 128 * 2 * 2 * 24)
    assert answers["llama"]["ranks"][0]["weights"][0] / GIB == pytest.approx(7.51, abs=0.02)
    assert on_card["kv_cache"]["blocks"] > 20_000
    assert seen["images"] == [{"width": 640, "height": 480, "prompt_tokens": 300, "embeddings": 300}], seen


@pytest.mark.skipif(find_spec("kvplan.builtin") is None, reason="the built-in is not in this tree")
def test_the_whole_sweep_is_the_same_to_the_builtin(tmp_path: Path) -> None:
    with asked(DEFAULT_VERSION) as vllm:
        outcome = compare(cases(), builtin, vllm_of(vllm, tmp_path))
    assert outcome.differences == ()
    assert outcome.answered > 100
