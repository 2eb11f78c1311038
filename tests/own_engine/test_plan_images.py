"""Tokens of images of many sizes, as the vLLM and Transformers of the engine's environment count them."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from highwater.demo.engine import SHIM_FOLDER
from highwater.plan.images import MAX_ASPECT_RATIO, image_tokens
from tests.unit.plan import test_images as known

if TYPE_CHECKING:
    from highwater.demo.environment import EngineEnvironment

pytestmark = pytest.mark.long("plan")

SCRIPT = Path("tests/support/engine_images.py").absolute()
FAMILIES = {
    "qwen2": (known.QWEN2, known.QWEN2_PIXELS),
    "qwen3": (known.QWEN3, known.QWEN3_PIXELS),
    "glm": (known.GLM, known.GLM_PIXELS),
    "intern": (known.INTERN, {}),
    "mistral3": (known.MISTRAL3, {}),
}
USUAL = [(1, 1), (336, 336), (640, 480), (1_280, 720), (1_920, 1_080), (3_840, 2_160), (4_096, 4_096), (50, 9_000)]


def test_every_size_has_as_many_tokens_as_vllm_counts(engine_environment: EngineEnvironment) -> None:
    """The usual sizes and 300 others, by every rule that has one that can be asked."""
    chosen = random.Random(7)  # noqa: S311 - sizes to try, no secrets
    others = [(chosen.randint(1, 6_000), chosen.randint(1, 6_000)) for _ in range(300)]
    sizes = [size for size in USUAL + others if max(size) <= MAX_ASPECT_RATIO * min(size)]
    questions = [(family, *size) for family in FAMILIES for size in sizes]
    done = subprocess.run(
        [str(engine_environment.python), str(SCRIPT)],
        input=json.dumps(questions),
        env=os.environ | {"PYTHONPATH": str(SHIM_FOLDER), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    counted = json.loads(done.stdout.splitlines()[-1])
    ours = [image_tokens(*FAMILIES[family], width, height).embeddings for family, width, height in questions]
    assert [pair for pair in zip(questions, ours, counted, strict=True) if pair[1] != pair[2]] == []
