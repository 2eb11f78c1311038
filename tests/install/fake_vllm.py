"""What `vllm` is for the tests of docs/install/bare-metal.md: the tests' engine behind vLLM's command line.

Run as ``vllm serve MODEL [--host HOST] --port PORT``. As vLLM does, it loads the plugins that are on its path, in an
interpreter of its own; it writes what it found there into the file that FAKE_VLLM_SAW names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.fakes.engine import FakeEngine

_SEES = """
import importlib.metadata, json, sys
print(json.dumps({
    "plugins": [point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")],
    "loaded": [callable(point.load()) for point in importlib.metadata.entry_points(group="vllm.general_plugins")],
    "distributions": sorted(dist.metadata["Name"] for dist in importlib.metadata.distributions()),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    python = [os.environ["FAKE_VLLM_PYTHON"], "-c", _SEES]
    seen = subprocess.run(python, capture_output=True, text=True, check=True).stdout
    Path(os.environ["FAKE_VLLM_SAW"]).write_text(json.dumps(json.loads(seen) | {"host": given.host}))
    engine = FakeEngine(tensor_parallel=1, dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1")
    engine.start_recorders(Path(os.environ["HIGHWATER_RECORDER_DIR"]), secrets.token_hex(8))

    async def record() -> None:
        while True:
            engine.record()
            await asyncio.sleep(0.2)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(record())
        yield
        task.cancel()
        await asyncio.wait({task})

    app = Starlette(routes=[Mount("/", engine)], lifespan=lifespan)
    # On loopback whatever was asked: tests are seen by this machine alone.
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
