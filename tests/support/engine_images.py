"""Prints how many tokens vLLM and Transformers count for images: one JSON list, in the order of what was asked.

Run with the engine's interpreter: ``python engine_images.py < QUESTIONS``, where QUESTIONS is a JSON list of
``[family, width, height]``. It asks the functions that vLLM itself asks, with the figures of public models, and imports
nothing of Highwater.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from transformers.models.glm4v.image_processing_glm4v import smart_resize as glm_resize
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as qwen_resize
from vllm.model_executor.models.pixtral import PixtralHFEncoderInfo
from vllm.transformers_utils.processors.internvl import calculate_internvl_targets, get_internvl_target_ratios


def qwen2(width: int, height: int) -> int:
    rows, columns = qwen_resize(height, width, 28, 3_136, 12_845_056)
    return rows * columns // 28**2


def qwen3(width: int, height: int) -> int:
    rows, columns = qwen_resize(height, width, 32, 65_536, 16_777_216)
    return rows * columns // 32**2


def glm(width: int, height: int) -> int:
    rows, columns = glm_resize(2, height, width, 2, 28, 112 * 112, 28 * 28 * 15_000)
    return rows * columns // 28**2


def intern(width: int, height: int) -> int:
    tiles, _, _ = calculate_internvl_targets(
        orig_width=width,
        orig_height=height,
        target_ratios=get_internvl_target_ratios(1, 12),
        image_size=448,
        use_thumbnail=True,
    )
    return tiles * 256


def mistral3(width: int, height: int) -> int:
    info = object.__new__(PixtralHFEncoderInfo)
    info.hf_config = SimpleNamespace(spatial_merge_size=2)
    info.vision_config = SimpleNamespace(image_size=1_540, patch_size=14)
    return info.get_num_image_tokens(image_width=width, image_height=height)


FAMILIES = {"qwen2": qwen2, "qwen3": qwen3, "glm": glm, "intern": intern, "mistral3": mistral3}

if __name__ == "__main__":
    json.dump([FAMILIES[family](width, height) for family, width, height in json.load(sys.stdin)], sys.stdout)
