"""Faults of an engine's processes, put in by a plugin of vLLM's own kind: vLLM itself is untouched.

Runs in the engine's Python, and imports nothing of this repository. `GROWTH_FAULTS` says which, as `name=MiB` with
commas between; each is per request, but for `image`, which is per image that the encoder computes, `step`, which is
once, when the file that `GROWTH_STEP` names is there, and `clock`, which EngineCore keeps each half second.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from importlib import import_module

FAULTS = dict(part.split("=") for part in os.environ.get("GROWTH_FAULTS", "").split(",") if part)
MIB = 1024 * 1024
KEPT: list[object] = []


def size(name: str) -> int:
    return int(float(FAULTS.get(name, 0)) * MIB)


def keep(size_bytes: int) -> None:
    """Hold so many bytes until the process ends, each page written to."""
    if size_bytes:
        KEPT.append(bytearray(os.urandom(4096)) * (size_bytes // 4096))


def wrap(module: str, name: str, method: str, before) -> bool:
    """Wrap a method of a class that the process has imported by itself; return whether it is wrapped."""
    owner = getattr(sys.modules.get(module), name, None)
    original = None if owner is None else owner.__dict__.get(method)
    if original is None or hasattr(original, "_growth"):
        return original is not None

    def wrapped(self, *args, **kwargs):
        before(*args, **kwargs)
        return original(self, *args, **kwargs)

    wrapped._growth = True
    setattr(owner, method, wrapped)
    return True


def in_api_server(*_, **__) -> None:
    keep(size("api"))
    if size("shm"):
        with open(f"/dev/shm/{os.environ['GROWTH_SHM']}-{len(KEPT)}-{time.monotonic_ns()}", "wb") as file:
            file.write(os.urandom(4096) * (size("shm") // 4096))
    KEPT.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(int(FAULTS.get("fds", 0))))
    step = os.environ.get("GROWTH_STEP", "")
    if size("step") and step and os.path.exists(step) and "step" not in KEPT:
        KEPT.append("step")
        keep(size("step"))


def in_engine_core(*args, **kwargs) -> None:
    keep(size("core"))
    if size("clock") and "clock" not in KEPT:
        KEPT.append("clock")
        threading.Thread(target=keep_each_half_second, args=(size("clock"),), daemon=True).start()


def keep_each_half_second(size_bytes: int) -> None:
    while True:
        keep(size_bytes)
        time.sleep(0.5)


def in_worker(output, *args, **kwargs) -> None:
    for _ in getattr(output, "scheduled_new_reqs", ()):
        keep(size("worker"))
    images = sum(map(len, getattr(output, "scheduled_encoder_inputs", {}).values()))
    if images and size("image"):
        torch = import_module("torch")
        KEPT.extend(torch.ones(size("image"), dtype=torch.uint8) for _ in range(images))


PLACES = (
    ("vllm.v1.engine.async_llm", "AsyncLLM", "add_request", in_api_server),
    ("vllm.v1.engine.core", "EngineCore", "add_request", in_engine_core),
    ("vllm.v1.worker.gpu_worker", "Worker", "execute_model", in_worker),
)


def register() -> None:
    """Wrap what this process imports, once it has: a plugin runs before that, and imports side by side may fail."""

    def patch() -> None:
        for _ in range(1200):
            time.sleep(0.1)
            if sum(wrap(*place) for place in PLACES) == len(PLACES):
                return

    threading.Thread(target=patch, daemon=True).start()
