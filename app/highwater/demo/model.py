"""A tiny Qwen3-VL (or text-only Qwen3) model folder, written by code: no weights, no download.

The engine fills the weights itself (`--load-format dummy`), so the answers are noise; what is real is everything
around them: the image processor, the encoder, the encoder cache, the scheduler. The widths are chosen for one
purpose: encoding an image is cheap, and what the encoder cache keeps of it is large. It refuses to be a good model.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

PATCH_PIXELS = 16
MERGE_SIZE = 2
HIDDEN_SIZE = 2048
DEEPSTACK_LAYERS = (0, 1, 2)
ENCODER_WIDTH = HIDDEN_SIZE * (1 + len(DEEPSTACK_LAYERS))
"""Numbers that the encoder cache keeps per image token: the deepest features and one set per deepstack layer."""
BYTES_PER_NUMBER = 2  # bfloat16
MAX_PIXELS = 1024 * 1024
MAX_MODEL_LEN = 4096
CACHE_TOKENS = 24576
"""Capacity of the encoder cache in image tokens; vLLM takes it from `--max-num-batched-tokens`. 384 MiB here."""

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class that takes `tokenizer.json` as it is. See `build_model` for where it will not do."""

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
BYTE_COUNT = 256
VOCAB_SIZE = 320  # the bytes and the special tokens, rounded up so that any tensor parallel size divides it
TOKEN_IDS = {token: BYTE_COUNT + index for index, token in enumerate(SPECIAL_TOKENS)}

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type in ('image', 'image_url') -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type in ('video', 'video_url') -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part -%}{{ part.text }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def build_model(folder: Path, *, multimodal: bool = True, tokenizer_class: str = TOKENIZER_CLASS) -> Path:
    """Write the model into `folder`, which is made where missing, and return it.

    Args:
        folder: Where to; files of the same names are replaced.
        multimodal: Qwen3-VL with a vision tower; else the text model alone.
        tokenizer_class: What loads the tokenizer. Qwen3-VL's processor of transformers 4 takes none but
            `Qwen2TokenizerFast`; from transformers 5 on, that one would replace our pre-tokenizer by Qwen's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = _tokenizer_files(tokenizer_class) | {
        "config.json": _vision_language_config() if multimodal else _text_config(),
        "generation_config.json": {"eos_token_id": TOKEN_IDS[IM_END], "pad_token_id": TOKEN_IDS[END_OF_TEXT]},
    }
    if multimodal:
        files |= _processor_files()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


def _text_parts() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_theta": 5000000,
        "bos_token_id": TOKEN_IDS[END_OF_TEXT],
        "eos_token_id": TOKEN_IDS[IM_END],
        "dtype": "bfloat16",
    }


def _text_config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        **_text_parts(),
    }


def _vision_language_config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "image_token_id": TOKEN_IDS[IMAGE_PAD],
        "video_token_id": TOKEN_IDS[VIDEO_PAD],
        "vision_start_token_id": TOKEN_IDS[VISION_START],
        "vision_end_token_id": TOKEN_IDS[VISION_END],
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "qwen3_vl_text",
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default"},
            **_text_parts(),
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": len(DEEPSTACK_LAYERS) + 1,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "patch_size": PATCH_PIXELS,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE_SIZE,
            "out_hidden_size": HIDDEN_SIZE,
            "num_position_embeddings": 1024,
            "deepstack_visual_indexes": list(DEEPSTACK_LAYERS),
        },
    }


def _processor_files() -> dict[str, Any]:
    pixels = {
        "patch_size": PATCH_PIXELS,
        "temporal_patch_size": 2,
        "merge_size": MERGE_SIZE,
        "size": {"shortest_edge": (PATCH_PIXELS * MERGE_SIZE) ** 2, "longest_edge": MAX_PIXELS},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    return {
        "preprocessor_config.json": {**pixels, "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": {**pixels, "video_processor_type": "Qwen3VLVideoProcessor"},
    }


def byte_symbols() -> list[str]:
    """Return the 256 characters by which byte-level BPE writes the bytes 0 to 255.

    Printable bytes stand for themselves and the others for characters from 256 on, as GPT-2 laid down and the
    `ByteLevel` parts of the tokenizers library expect.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], BYTE_COUNT
    for byte in range(BYTE_COUNT):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols


def _tokenizer_files(tokenizer_class: str) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, token_id in TOKEN_IDS.items()
    ]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {symbol: byte for byte, symbol in enumerate(byte_symbols())},
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": tokenizer_class,
            "model_max_length": MAX_MODEL_LEN,
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
