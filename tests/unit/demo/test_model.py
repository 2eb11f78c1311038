"""The tiny model's folder holds what vLLM and its processors look for, and its parts agree with each other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from highwater.demo import model
from tests.engines import image_cache_bytes, image_tokens

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model.build_model(tmp_path / "model")


def test_the_multimodal_model_has_every_file(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    }


def test_the_text_model_has_no_processor(tmp_path: Path) -> None:
    folder = model.build_model(tmp_path, multimodal=False)
    assert not list(folder.glob("*preprocessor*"))
    assert read(folder, "config.json")["architectures"] == ["Qwen3ForCausalLM"]


def test_every_byte_is_a_token_and_no_two_share_one(folder: Path) -> None:
    vocab = read(folder, "tokenizer.json")["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(256))
    assert all(vocab[character] == ord(character) for character in "Az09!~")
    assert vocab["Ġ"] == ord(" ")  # as every byte-level vocabulary writes the space


def test_an_image_costs_a_token_per_32_by_32_pixels() -> None:
    assert image_tokens(512, 512) == 256
    assert image_cache_bytes(512, 512) == 4 * 1024**2
