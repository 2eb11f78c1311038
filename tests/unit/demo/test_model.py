"""The tiny model's folder holds what vLLM and its processors look for, and its parts agree with each other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from highwater.demo import engine
from tests.engines import ENCODER_WIDTH, image_cache_bytes, image_tokens

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return engine.build_model(tmp_path / "model")


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
    folder = engine.build_model(tmp_path, multimodal=False)
    assert not list(folder.glob("*preprocessor*"))
    assert read(folder, "config.json")["architectures"] == ["Qwen3ForCausalLM"]


def test_building_twice_gives_the_same_bytes(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    engine.build_model(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_every_byte_is_a_token_and_no_two_share_one(folder: Path) -> None:
    vocab = read(folder, "tokenizer.json")["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(256))
    assert all(vocab[character] == ord(character) for character in "Az09!~")
    assert vocab["Ġ"] == ord(" ")  # as every byte-level vocabulary writes the space


def test_special_tokens_follow_the_bytes_and_fit_the_vocabulary(folder: Path) -> None:
    ids = [token["id"] for token in read(folder, "tokenizer.json")["added_tokens"]]
    assert ids == list(range(256, 256 + 7))
    assert max(ids) < read(folder, "config.json")["text_config"]["vocab_size"]


def test_the_config_points_at_the_tokenizers_ids(folder: Path) -> None:
    ids = {token["content"]: token["id"] for token in read(folder, "tokenizer.json")["added_tokens"]}
    config = read(folder, "config.json")
    assert config["image_token_id"] == ids["<|image_pad|>"]
    assert config["vision_start_token_id"] == ids["<|vision_start|>"]
    assert config["text_config"]["eos_token_id"] == ids["<|im_end|>"]


def test_the_vision_towers_output_is_as_wide_as_the_text(folder: Path) -> None:
    config = read(folder, "config.json")
    vision = config["vision_config"]
    assert vision["out_hidden_size"] == config["text_config"]["hidden_size"]
    assert vision["out_hidden_size"] * (1 + len(vision["deepstack_visual_indexes"])) == ENCODER_WIDTH
    assert max(vision["deepstack_visual_indexes"]) < vision["depth"]


def test_rotary_sections_fill_half_a_head(folder: Path) -> None:
    text = read(folder, "config.json")["text_config"]
    assert sum(text["rope_scaling"]["mrope_section"]) == text["head_dim"] // 2


def test_an_image_costs_a_token_per_32_by_32_pixels() -> None:
    assert image_tokens(512, 512) == 256
    assert image_cache_bytes(512, 512) == 4 * 1024**2
