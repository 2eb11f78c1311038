"""What the worker package does beside vLLM and vllm-ascend on a simulated NPU; `python -m` writes it as JSON.

Runs in an engine's Python (tests/fakes/cann/ascend.py), the engine in this process: `... MODEL FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.device.torch_device import TorchDevice
from highwater_worker.memory import allocator

SEEN = "seen.json"
IMAGES = range(1, 5)
SIDE = 256
UTILIZATION = 0.25
LEFT_BYTES = 64 << 20
"""Of an allocation that has ended, as a larger batch leaves it in the allocator."""
PROMPT = "<|vision_start|><|image_pad|><|vision_end|>what is this?"


class Engine:
    """A vLLM engine and its workers."""

    def __init__(self, model: str, **more: Any) -> None:
        # vLLM is nowhere but in an engine's environment, and reads its variables when it is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import torch  # noqa: PLC0415 - an engine alone has it
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - an engine alone has it

        self.torch, self._parameters = torch, SamplingParams(max_tokens=2, temperature=0, logprobs=5)
        self.llm = LLM(
            model=model,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=512,
            max_num_batched_tokens=512,
            max_num_seqs=4,
            gpu_memory_utilization=UTILIZATION,
            limit_mm_per_prompt={"image": 1, "video": 0},
            enable_prefix_caching=False,  # else nobody would look at an image a second time
            **more,
        )
        self.core: Any = self.llm.llm_engine.engine_core

    @property
    def worker(self) -> Any:
        """The one worker of an engine without further ranks, which is in this process."""
        return self.core.engine_core.model_executor.driver_worker.worker

    def call_all(self, op: str) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.llm.collective_rpc("highwater_rpc", args=(op, "{}"))]

    def call(self, op: str, **payload: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.worker.highwater_rpc(op, json.dumps(payload)))
        return answer

    def answers(self) -> list[str]:
        """Ask about each image, one after another, and return what is said, with the chances of the words."""
        return [str(self._answer(image)) for image in IMAGES]

    def _answer(self, seed: int) -> list[Any]:
        import numpy as np  # noqa: PLC0415 - an engine alone has it
        from PIL import Image  # noqa: PLC0415 - an engine alone has it

        pixels = np.random.RandomState(seed).randint(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        prompt = {"prompt": PROMPT, "multi_modal_data": {"image": Image.fromarray(pixels)}}
        (output,) = self.llm.generate([prompt], self._parameters, use_tqdm=False)[0].outputs
        return [(one, chance.logprob) for step in output.logprobs for one, chance in step.items()]

    def contents(self) -> dict[str, Any]:
        """Return the encoder outputs as they are, without an access that brings them back."""
        entries = dict.items(self.worker.model_runner.encoder_cache)
        return {key: value.cpu().view(self.torch.int16) for key, value in entries}

    def free_bytes(self) -> int:
        free: int = self.torch.npu.mem_get_info(0)[0]
        return free


def main(model: str, folder: str) -> None:
    # Whole segments are looked at by each answer, not every ten seconds: what is foretold is of that moment.
    allocator.LOOK_AGAIN_SECONDS = allocator.LOOK_SHARE = 0
    engine = Engine(model)
    runner = engine.worker.model_runner
    seen: dict[str, Any] = {
        "types": [f"{type(one).__module__}.{type(one).__name__}" for one in (_platform(), engine.worker, runner)],
        "is_simulated": TorchDevice("npu:0").is_simulated,
        "budget": engine.call("budget"),
        "started": engine.call("memory"),
    }
    first, outputs = engine.answers(), engine.contents()
    seen |= {"first": first, "asked": engine.call("memory"), "entries": engine.call("encoder_cache")}
    seen |= {"trim": engine.call("trim"), "trimmed": engine.call("memory")}
    seen |= {"again": engine.answers(), "back": engine.call("memory")}
    after = engine.contents()
    seen["same"] = after.keys() == outputs.keys() and all(engine.torch.equal(after[key], outputs[key]) for key in after)
    engine.call("trim")
    engine.core.reset_encoder_cache()
    engine.torch.empty(LEFT_BYTES, dtype=engine.torch.uint8, device="npu")
    seen["reset"] = engine.call("memory")
    free = engine.free_bytes()
    seen |= {"release": engine.call("release"), "given_back_bytes": engine.free_bytes() - free}
    Path(folder, SEEN).write_text(json.dumps(seen))


def of_two_ranks(model: str, folder: str) -> None:
    """Trim, sleep and wake with tensor parallelism over two devices; `... MODEL FOLDER ranks`."""
    more = {"enable_sleep_mode": True, "additional_config": {"weight_nz_mode": 0}}  # else it cannot be woken
    engine = Engine(model, tensor_parallel_size=2, **more)
    seen: dict[str, Any] = {"started": engine.call_all("memory"), "budget": engine.call_all("budget")}
    seen["is_simulated"] = TorchDevice("npu:0").is_simulated
    seen |= {"first": engine.answers(), "asked": engine.call_all("memory"), "trim": engine.call_all("trim")}
    seen |= {"trimmed": engine.call_all("memory"), "again": engine.answers(), "back": engine.call_all("memory")}
    engine.llm.sleep(level=1)
    seen["asleep"] = engine.call_all("memory")
    engine.llm.wake_up()
    seen |= {"awake": engine.call_all("memory"), "after": engine.answers()}
    Path(folder, SEEN).write_text(json.dumps(seen))


def _platform() -> object:
    from vllm.platforms import current_platform  # noqa: PLC0415 - an engine alone has it

    return current_platform


if __name__ == "__main__":
    (of_two_ranks if "ranks" in sys.argv[3:] else main)(*sys.argv[1:3])
