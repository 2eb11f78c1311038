"""A tiny Qwen3-VL (or text-only Qwen3) model folder, written from `model.yaml`: no weights, no download.

The engine fills the weights itself (`--load-format dummy`), so the generated text is noise; what is real is everything
around it: the image processor, the encoder, the encoder cache, the scheduler.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

_PLAN = Path(__file__).parent / "model.yaml"
MAX_MODEL_LEN = 4096
CACHE_TOKENS = 24576
"""Capacity of the encoder cache in image tokens; vLLM takes it from `--max-num-batched-tokens`. 384 MiB here."""
BYTE_COUNT = 256


def build_model(folder: Path, *, multimodal: bool = True) -> Path:
    """Write the model into `folder`, over files of the same names: Qwen3-VL with a vision tower, or the text model."""
    files: dict[str, dict[str, Any]] = yaml.safe_load(_PLAN.read_text(encoding="utf-8"))
    if not multimodal:
        files = {name: content for name, content in files.items() if "preprocessor" not in name}
        text = files["config.json"]["text_config"]
        del text["rope_scaling"]
        files["config.json"] = text | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "tie_word_embeddings": True,
        }
    tokenizer = files["tokenizer.json"]
    tokenizer["model"]["vocab"] = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer["added_tokens"] = [
        {"id": number, "content": token, **flags}
        for number, token in enumerate(tokenizer["added_tokens"], start=BYTE_COUNT)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


def _byte_symbols() -> list[str]:
    """Return the 256 characters by which byte-level BPE writes the bytes 0 to 255.

    Printable bytes stand for themselves and the others for characters from 256 on, as GPT-2 laid down and the
    `ByteLevel` parts of the tokenizers library expect.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(BYTE_COUNT, 2 * BYTE_COUNT))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTE_COUNT)]
