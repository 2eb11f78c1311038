"""Real random weights for the tiny model, so that an answer depends on every token and every image before it.

vLLM's own dummy weights are so small that each prompt gets the same answer. Run with the engine's interpreter:
``python make_weights.py MODEL_FOLDER`` writes ``model.safetensors`` beside the ``config.json`` there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

# Large, so that attention outweighs the last token's own embedding, which is tied to the output.
SPREAD = 0.08


def main(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    for part in (config, config.text_config, config.vision_config):
        part.initializer_range = SPREAD
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "weights")
    (folder / "weights" / "model.safetensors").rename(folder / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
