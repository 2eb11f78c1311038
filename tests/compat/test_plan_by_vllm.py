"""vLLM of each version asked on meta: the figures that no version changes, and what the newest makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from highwater.demo.environment import DEFAULT_VERSION
from tests.support.asked_starts import asked, model_folder
from tests.support.printed_pools import GIB
from tests.support.recorded_starts import GPT_OSS_20B, LLAMA_8B, QWEN15_MOE

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("version", ["0.12.0", "0.18.0", "0.23.0", "0.27.0", DEFAULT_VERSION, "0.33.0"])
def test_a_version_is_asked(version: str, tmp_path: Path) -> None:
    """Dense, with sliding windows, and a mixture of experts, with and without the card's bytes."""
    folders = {
        "llama": model_folder(tmp_path, "llama", LLAMA_8B),
        "gpt-oss": model_folder(tmp_path, "gpt-oss", GPT_OSS_20B),
        "moe": model_folder(tmp_path, "moe", QWEN15_MOE),
    }
    with asked(version) as vllm:
        answers = {
            name: vllm.ask(f"vllm serve {folder} --max-model-len 8192 -tp 2", kv_cache_bytes=20 * GIB)
            for name, folder in folders.items()
        }
        on_card = vllm.ask(f"vllm serve {folders['llama']} --max-model-len 8192")
    assert {name: answer["status"] for name, answer in answers.items()} == dict.fromkeys(folders, "fits"), answers
    pools = {name: answer["kv_cache"] for name, answer in answers.items()}
    assert pools["llama"]["blocks"] == 20 * GIB // (16 * 4 * 128 * 2 * 2 * 32)
    assert pools["gpt-oss"]["blocks"] == 20 * GIB // (16 * 4 * 64 * 2 * 2 * 12)
    assert pools["moe"]["blocks"] == 20 * GIB // (16 * 8 * 128 * 2 * 2 * 24)
    assert answers["llama"]["ranks"][0]["weights"][0] / GIB == pytest.approx(7.51, abs=0.02)
    assert on_card["kv_cache"]["blocks"] > 20_000
