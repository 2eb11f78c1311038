"""Tries vLLM's CUDA build on a machine without a driver: `python FILE load|extension|neither` in its environment.

The last line is JSON.
"""

from __future__ import annotations

import json
import sys

import torch
import vllm
from vllm.plugins import load_general_plugins


def load() -> dict[str, object]:
    load_general_plugins()
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415 - after the plugin, which imports it

    return {"is_wrapped": hasattr(WorkerBase.__init__, "_highwater_plugin")}


def extension() -> dict[str, object]:
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415 - it needs more than the plugin

    from highwater_worker import MemoryExtension  # noqa: PLC0415 - not on the path of every run

    taken = [name for name in dir(MemoryExtension) if not name.startswith("__") and hasattr(Worker, name)]
    mixed = type("Mixed", (Worker, MemoryExtension), {})
    answer = json.loads(mixed.__new__(mixed).highwater_rpc("memory", "{}"))
    return {"taken": taken, "ok": answer["ok"], "op": answer["op"]}


def neither() -> dict[str, object]:
    """Import what the plugin imports, without it: what vLLM itself says then."""
    import vllm.v1.worker.worker_base  # noqa: PLC0415 - as above

    return {"module": vllm.v1.worker.worker_base.__name__}


if __name__ == "__main__":
    found = {"load": load, "extension": extension, "neither": neither}[sys.argv[1]]()
    found |= {"vllm": vllm.__version__, "cuda": torch.version.cuda, "initialised": torch.cuda.is_initialized()}
    print(json.dumps(found))  # noqa: T201 - what it is for
