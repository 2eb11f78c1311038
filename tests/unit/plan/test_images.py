"""Tokens of an image by family: what vLLM 0.32's own functions say (tests/own_engine/test_plan_images.py)."""

from __future__ import annotations

from typing import Any

import pytest

from highwater.plan.images import image_tokens, largest_item, takes_images
from highwater.plan.wish import ImageTokens
from kvplan.errors import PlanError

QWEN3 = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
QWEN3_PIXELS = {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
QWEN2 = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
QWEN2_PIXELS = {"min_pixels": 3_136, "max_pixels": 12_845_056}
GLM = {"model_type": "glm4v", "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}}
GLM_PIXELS = {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15_000}}
INTERN = {
    "model_type": "internvl_chat",
    "force_image_size": 448,
    "downsample_ratio": 0.5,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
    "use_thumbnail": True,
    "vision_config": {"image_size": 448, "patch_size": 14},
}
MISTRAL3 = {"model_type": "mistral3", "spatial_merge_size": 2, "vision_config": {"image_size": 1_540, "patch_size": 14}}
GEMMA3 = {"model_type": "gemma3", "mm_tokens_per_image": 256, "vision_config": {"image_size": 896, "patch_size": 14}}
LLAVA = {
    "model_type": "llava",
    "vision_feature_select_strategy": "default",
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}
VIDEO_OFF: dict[str, Any] = {"video": 0}
PALIGEMMA = {"model_type": "paligemma", "vision_config": {"image_size": 224, "patch_size": 14}}


@pytest.mark.parametrize(
    ("config", "preprocessor", "size", "embeddings", "prompt_tokens"),
    [
        (QWEN3, QWEN3_PIXELS, (1_920, 1_080), 2_040, 2_042),
        (QWEN3, QWEN3_PIXELS, (4_096, 4_096), 16_384, 16_386),
        (QWEN2, QWEN2_PIXELS, (1_920, 1_080), 2_691, 2_693),
        (GLM, GLM_PIXELS, (1_000, 3_000), 3_852, 3_854),
        (INTERN, {}, (1_920, 1_080), 2_304, 2_306),
        (INTERN, {}, (448, 448), 256, 258),
        (INTERN, {}, (1_000, 3_000), 3_328, 3_330),
        (MISTRAL3, {}, (1_920, 1_080), 1_705, 1_736),
        (MISTRAL3, {}, (448, 448), 256, 272),
        (GEMMA3, {}, (1_920, 1_080), 256, 260),
        (LLAVA, {}, (1_920, 1_080), 576, 576),
        (PALIGEMMA, {}, (1_920, 1_080), 256, 256),
    ],
)
def test_an_image_takes_as_many_tokens_as_vllm_counts(
    config: dict[str, Any], preprocessor: dict[str, Any], size: tuple[int, int], embeddings: int, prompt_tokens: int
) -> None:
    """The encoder cache keeps the embeddings; the KV cache keeps the marks around and between them too."""
    expected = ImageTokens(embeddings=embeddings, prompt_tokens=prompt_tokens)
    assert image_tokens(config, preprocessor, *size) == expected


def test_the_older_keys_of_a_preprocessor_win() -> None:
    """As in Qwen2-VL's own image processor, where both are there."""
    both = {**QWEN2_PIXELS, "size": {"shortest_edge": 1, "longest_edge": 784}}
    assert image_tokens(QWEN2, both, 1_920, 1_080) == image_tokens(QWEN2, QWEN2_PIXELS, 1_920, 1_080)


@pytest.mark.parametrize(
    ("config", "preprocessor", "size", "message"),
    [
        ({"model_type": "phi3_v"}, {}, (10, 10), "model_type: the tokens of an image are not known here for 'phi3_v'"),
        ({}, {}, (10, 10), "model_type: the tokens of an image are not known here for ''"),
        (QWEN3, {}, (10, 10), "size.shortest_edge: missing in preprocessor_config.json (and min_pixels too)"),
        (QWEN3, QWEN3_PIXELS, (1, 300), "image: 1x300 is narrower than 1 to 200"),
        ({"model_type": "qwen2_vl"}, QWEN2_PIXELS, (10, 10), "vision_config: missing"),
        (
            {**QWEN2, "vision_config": {"patch_size": 0, "spatial_merge_size": 2}},
            QWEN2_PIXELS,
            (10, 10),
            "vision_config.patch_size: 0 must be a whole number of at least 1",
        ),
        (GEMMA3, {"do_pan_and_scan": True}, (10, 10), "do_pan_and_scan: true in preprocessor_config.json cuts"),
        (
            {**LLAVA, "vision_config": {"model_type": "eva"}},
            {},
            (10, 10),
            "vision_config.model_type: 'eva' is not an encoder whose tokens are known here",
        ),
        ({**LLAVA, "vision_feature_select_strategy": "half"}, {}, (10, 10), "vision_feature_select_strategy: 'half'"),
        ({**INTERN, "max_dynamic_patch": 10_000}, {}, (10, 10), "max_dynamic_patch: 10000 must be at most 128"),
        ({**INTERN, "downsample_ratio": 2}, {}, (10, 10), "downsample_ratio: 2 must be a share"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(
    config: dict[str, Any], preprocessor: dict[str, Any], size: tuple[int, int], message: str
) -> None:
    """A wrong count would make a plan look exact that is not."""
    with pytest.raises(PlanError) as raised:
        image_tokens(config, preprocessor, *size)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("config", "sees"),
    [
        (QWEN3, True),
        ({"thinker_config": {"vision_config": {"patch_size": 14}}}, True),
        ({"model_type": "qwen3", "vision_config": None}, False),
        ({"model_type": "ultravox", "audio_config": {"hidden_size": 8}}, False),
    ],
)
def test_a_model_sees_images_where_it_or_a_part_has_an_encoder_of_them(config: dict[str, Any], sees: bool) -> None:
    """Qwen's Omni models have it in a part."""
    assert takes_images(config) is sees


@pytest.mark.parametrize(
    ("config", "preprocessor", "limits", "embeddings"),
    [
        ({"model_type": "llama"}, {}, {}, 0),
        (GEMMA3, {}, {}, 256),
        (MISTRAL3, {}, {}, 3_025),
        (QWEN3, QWEN3_PIXELS, VIDEO_OFF, 16_384),
        (QWEN3, QWEN3_PIXELS, {"video": {"count": 0}, "image": 4}, 16_384),
        (QWEN3, {}, {"video": 0, "image": 0}, 0),
        (QWEN3, QWEN3_PIXELS, {}, None),
        (QWEN3, {}, VIDEO_OFF, None),
        (GEMMA3, {}, {"image": 0}, 0),
        (INTERN, {}, VIDEO_OFF, None),
        ({"model_type": "qwen2_audio", "audio_config": {}}, {}, {"image": 0, "video": 0}, None),
        ({"model_type": "qwen2_5_omni", "thinker_config": {"vision_config": {}}}, {}, VIDEO_OFF, None),
    ],
)
def test_the_largest_item_is_known_where_the_files_say_it(config, preprocessor, limits, embeddings) -> None:
    """That of a video or a sound is not, nor that of an image whose tokens depend on its shape."""
    assert largest_item(config, preprocessor, limits) == embeddings
