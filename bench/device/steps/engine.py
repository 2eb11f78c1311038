"""Step 7: a real vLLM engine with the demonstration's tiny model on the device: the story, and its figures.

It runs the vLLM that is installed beside this interpreter. Without one, and with PyTorch for CUDA, it runs vLLM's
Python files without their kernels, which travel as one archive (`bench/device/vllm_files.py`): slow, with the same
memory.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.device import vllm_files
from bench.device.results import Findings
from bench.device.torch_device import NO_DEVICE, TorchDevice
from bench.device.vllm_files import NoReleaseError

SAYS = "a real vLLM engine with a tiny model: the story, and its figures"
CHECKS: Mapping[str, str] = {
    "starts": "the engine starts with the worker extension",
    "reads": "the worker's memory is read: weights, KV cache and encoder cache are known",
    "serves": "images are answered, before relief and after it",
    "encoder_cache_grows": "images fill the encoder cache on the device",
    "mm_cache_frees_nothing": "`/reset_mm_cache` leaves the encoder cache on the device as it was",
    "trim_moves": "`trim` moves encoder outputs to the host",
    "device_gets_it": "after `trim` and `release` less of the device is used",
}
IMAGES = 48
CALL_SECONDS = 120.0
INSTALL = "pip install vllm on a machine with network, or the image vllm/vllm-openai (vllm-ascend for an NPU)"
_CAUSE = re.compile(r"(?m)^.*?((?:\w+\.)*\w*(?:Error|Exception): (?!Engine core initialization failed).+)$")


def run(on: TorchDevice, found: Findings) -> None:
    """Start the engine and tell the story on it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            engines = import_module("highwater.terminal.demo.engine")
            environment = import_module("highwater.terminal.demo.engine").EngineEnvironment
            engine = engines.DemoEngine(environment("", Path(sys.prefix)), _options(on, engines, folder), folder=folder)
        except ImportError as missing:
            found.skip(f"the demonstration needs {missing.name}, which is not installed here", *CHECKS)
            return
        except NoReleaseError as missing:
            found.skip(str(missing), *CHECKS)
            return
        try:
            engine.start()
        except import_module("highwater.terminal.demo.process").DemoError as error:
            causes = _CAUSE.findall(engine.log_path.read_text("utf-8", "replace")) if engine.log_path.exists() else []
            found.holds("starts", False, causes[-1] if causes else str(error)[-800:])
            return
        try:
            found.holds("starts", True)
            _story(on, engine, found)
        finally:
            engine.stop()


def _options(on: TorchDevice, engines: Any, folder: Path) -> Any:  # noqa: ANN401 - the demonstration's, imported late
    """Return the options of an engine with the vLLM that is here.

    Raises:
        NoReleaseError: vLLM cannot be had here; the message says what to do.
    """
    if importlib.util.find_spec("vllm") is not None:
        return engines.EngineOptions()
    torch = str(on.torch.__version__)
    if on.torch.version.cuda is None:
        raise NoReleaseError(f"vLLM is not installed here; {INSTALL}")
    release, unpacked = vllm_files.release_for(torch), folder / "vllm"
    archive = vllm_files.ARCHIVE
    if not archive.is_file():
        fetch = f"`make device-wheels WHEELS_TORCH={torch}` on a machine with network writes vLLM {release} into it"
        raise NoReleaseError(f"vLLM is not installed here, and {archive} is missing: {fetch}; or {INSTALL}")
    if (there := vllm_files.unpack(archive, unpacked)) != release:
        raise NoReleaseError(f"{archive} has vLLM {there}; with torch {torch} it is to have {release}")
    path = (engines.SHIM_FOLDER, engines.link_extension(folder / "extension"), unpacked)
    environ = {**vllm_files.ENVIRON, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return engines.EngineOptions(extra_args=vllm_files.ARGUMENTS, extra_env=tuple(environ.items()))


def _story(on: TorchDevice, engine: Any, found: Findings) -> None:  # noqa: ANN401 - the demonstration's, imported late
    ready = _call(engine, "memory")
    unknown = [name for name in ("weights_bytes", "kv_cache_bytes", "encoder_cache") if ready[name] is None]
    found.holds("reads", not unknown, f"unknown: {', '.join(unknown)}: {ready['notes']}")
    _send(engine, range(IMAGES), found)
    loaded = _call(engine, "memory")
    held = loaded["encoder_cache"]["device_bytes"]
    found.at_least("encoder_cache_grows", held - ready["encoder_cache"]["device_bytes"], 1, "bytes")
    _post(f"{engine.url}/reset_mm_cache", {})
    reset = _call(engine, "memory")
    found.equals("mm_cache_frees_nothing", reset["encoder_cache"]["device_bytes"], held)
    trimmed = _call(engine, "trim", max_seconds=30)
    found.at_least("trim_moves", trimmed["spilled_entries"], 1, "entries")
    _call(engine, "release")
    relieved = _call(engine, "memory")
    _send(engine, [IMAGES - 1, IMAGES, IMAGES + 1], found)
    for name, reading in (("ready", ready), ("loaded", loaded), ("mm_cache_reset", reset), ("relieved", relieved)):
        found.figure(f"{name}_used", reading["used_bytes"], "bytes")
        found.figure(f"{name}_encoder_cache", reading["encoder_cache"]["device_bytes"], "bytes")
    if on.is_cpu:
        found.skip(NO_DEVICE, "device_gets_it")
    else:
        found.at_least("device_gets_it", reset["used_bytes"] - relieved["used_bytes"], 1, "bytes")


def _send(engine: Any, seeds: Any, found: Findings) -> None:  # noqa: ANN401 - as above
    send_images = import_module("highwater.terminal.demo.traffic").send_images
    result = asyncio.run(send_images(engine.url, engine.served_model, images=seeds))
    found.holds("serves", not result.failed, f"{result.failed} of {result.sent} failed: {result.errors}")


def _call(engine: Any, op: str, **payload: object) -> dict[str, Any]:  # noqa: ANN401 - as above
    body = {"method": "highwater_rpc", "args": [op, json.dumps(payload)]}
    answer: dict[str, Any] = json.loads(json.loads(_post(f"{engine.url}/collective_rpc", body))["results"][0])
    if not answer["ok"]:
        raise RuntimeError(f"{op}: {answer['error']}")
    return answer


def _post(url: str, body: object) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=CALL_SECONDS) as response:
        content: bytes = response.read()
    return content
