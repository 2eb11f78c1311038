"""A plugin of vLLM's own kind that has one process of the engine grow. Imports nothing of this repository.

The file that `HIGHWATER_TEST_GROW` names says which (`EngineCore`, `Worker`, `APIServer`), by how many bytes, and over
how many seconds; an order is taken once.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

_ORDER = os.environ["HIGHWATER_TEST_GROW"]
_STEP = 8 * 1024 * 1024
_LOOK_SECONDS = 0.2
_kept = []


def _role():
    title = Path("/proc/self/cmdline").read_text(errors="replace")
    return next((role for role in ("EngineCore", "Worker") if title.startswith(f"VLLM::{role}")), "APIServer")


def _grow():
    while True:
        time.sleep(_LOOK_SECONDS)
        with suppress(OSError, ValueError):
            role, size, seconds = Path(_ORDER).read_text().split()
            if role == _role():
                os.unlink(_ORDER)
                steps = max(int(size) // _STEP, 1)
                for _ in range(steps):
                    _kept.append(bytearray(os.urandom(4096)) * (_STEP // 4096))
                    time.sleep(float(seconds) / steps)


def register():
    threading.Thread(target=_grow, daemon=True).start()
