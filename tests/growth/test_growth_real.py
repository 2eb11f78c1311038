"""Faults that a plugin puts into a real engine are named right: by series, process, driver and rate."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from highwater.model.units import MIB
from highwater.process.worker_package import SHIM_FOLDER, copy_worker_package
from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment, EngineOptions
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.demo.traffic import send_images
from tests.engine.conftest import sidecar_beside
from tests.engines import AnyEngine, send_texts

# At most: a test ends once its verdicts are there.
TRAFFIC_SECONDS = 900.0
IDLE_SECONDS = 14.5


class Faulty(NamedTuple):
    """An engine that leaks, and a sidecar beside it."""

    engine: DemoEngine
    sidecar: DemoSidecar
    step: Path


@contextmanager
def faulty_engine(environment: EngineEnvironment, folder: Path, faults: str, *arguments: str) -> Iterator[Faulty]:
    plugin = folder / "faults"
    info = plugin / "growth_faults-0.0.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "faults.py", plugin / "growth_faults.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: growth-faults\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ngrowth_faults = growth_faults:register\n")
    rings, step = folder / "rings", folder / "step"
    shm = f"growth-{os.getpid()}"
    path = (SHIM_FOLDER, copy_worker_package(folder / "worker").folder, plugin)
    environ = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HIGHWATER_RECORDER_DIR": str(rings),
        "GROWTH_FAULTS": faults,
        "GROWTH_STEP": str(step),
        "GROWTH_SHM": shm,
        # Else a leak first fills the free blocks of the heap, and shows minutes later.
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    options = EngineOptions(dev_mode=False, extension=False, extra_env=tuple(environ.items()), extra_args=arguments)
    engine = AnyEngine(environment, options, folder=folder)
    settings = {"HIGHWATER_RECORDER_DIR": str(rings), "HIGHWATER_STATE_FILE": str(folder / "state.json")}
    with ExitStack() as stack:
        stack.callback(lambda: [file.unlink() for file in Path("/dev/shm").glob(f"{shm}-*")])
        stack.enter_context(engine)
        yield Faulty(engine, stack.enter_context(sidecar_beside(engine, folder, **settings)), step)


def drive(
    faulty: Faulty, is_done: Callable[[dict[str, Any]], bool], seconds: float = TRAFFIC_SECONDS
) -> dict[str, Any]:
    """Send bursts of texts, images and repeated images with idle times between them; return the verdicts by series."""
    source = random.Random(7)  # noqa: S311 - traffic is no secret
    began, seen, burst = time.monotonic(), 0, 0
    verdicts: dict[str, Any] = {}
    while time.monotonic() - began < seconds and not is_done(verdicts):
        engine, burst = faulty.engine, burst + 1
        texts, fresh, again = source.randrange(0, 4), source.randrange(0, 4), source.randrange(0, 3) if seen else 0
        asyncio.run(
            send_texts(
                engine.url,
                engine.served_model,
                texts=[f"{source.random()} " * source.randrange(1, 40) for _ in range(texts)],
                max_tokens=source.randrange(1, 24),
            )
        )
        images = [*range(seen, seen + fresh), *(source.randrange(max(seen - 3, 0), seen) for _ in range(again))]
        asyncio.run(send_images(engine.url, engine.served_model, images=images))
        seen += fresh
        if burst == 12:
            faulty.step.touch()
        time.sleep(IDLE_SECONDS)
        verdicts = {one["series"]: one for one in faulty.sidecar.call("GET", "/memory/growth")["series"]}
        (faulty.step.parent / "verdicts.json").write_text(json.dumps(verdicts, indent=1))
    return verdicts


def are(verdicts: dict[str, Any], wanted: dict[str, str], ground: str = "idle_floors") -> bool:
    """Return whether these are the verdicts on that ground; of a leak its driver: some floors later."""
    found = {
        name: one["rate"]["driver"] if one["verdict"] == "leak" else one["verdict"]
        for name, one in verdicts.items()
        if one["ground"] == ground
    }
    return all(found.get(name) == verdict for name, verdict in wanted.items())


def check_leak(verdict: dict[str, Any], driver: str, rate: float) -> None:
    assert verdict["verdict"] == "leak", verdict["text"]
    assert verdict["rate"]["driver"] == driver, verdict["text"]
    assert verdict["rate"]["per_driver"] == pytest.approx(rate, rel=0.2), verdict["text"]


def named(verdicts: dict[str, Any], owner: str, measure: str) -> dict[str, Any]:
    (found,) = [one for one in verdicts.values() if one["owner"].startswith(owner) and one["measure"] == measure]
    return found


@pytest.mark.soak
def test_leaks_per_request_are_told_apart_by_process(engine_environment, tmp_path):
    """Five at once in four places: API server, EngineCore, worker, /dev/shm and descriptors.

    The allowed errors of the three processes do not overlap, and the one in EngineCore is large beside what its cache
    of images adds to each request, up to 0.7 MiB.
    """
    of_processes = ("API server anonymous_bytes", "EngineCore anonymous_bytes", "worker rank 0 anonymous_bytes")
    names = (*of_processes, "API server descriptors", "/dev/shm used_bytes")
    with faulty_engine(engine_environment, tmp_path, "api=5,core=16,worker=8,shm=6,fds=6") as faulty:
        verdicts = drive(faulty, lambda seen: are(seen, dict.fromkeys(names, "request")))
        check_leak(named(verdicts, "API server", "anonymous_bytes"), "request", 5 * MIB)
        check_leak(named(verdicts, "API server", "descriptors"), "request", 6)
        check_leak(named(verdicts, "EngineCore", "anonymous_bytes"), "request", 16 * MIB)
        check_leak(named(verdicts, "worker", "anonymous_bytes"), "request", 8 * MIB)
        check_leak(named(verdicts, "/dev/shm", "used_bytes"), "request", 6 * MIB)


def test_a_leak_per_image_a_step_and_a_cache_are_three_verdicts(engine_environment, tmp_path):
    """A tensor for each image that the encoder computes, 256 MiB once, and a processor cache that fills to 0.05 GiB.

    The tensor is large beside what vLLM's own heap grows by with each new image at first, 2 to 4 MiB.

    That is 17 of the images, of 3 MB each: it is full after 12 bursts, and stands for the rest.
    """
    arguments = ("--mm-processor-cache-gb", "0.05")
    wanted = {
        "rank 0 non_torch_bytes": "new_image",
        "API server anonymous_bytes": "step",
        "EngineCore anonymous_bytes": "plateau",
    }
    with faulty_engine(engine_environment, tmp_path, "image=32,step=256", *arguments) as faulty:
        verdicts = drive(faulty, lambda seen: are(seen, wanted))
        floors = faulty.sidecar.call("GET", "/memory/growth?series=EngineCore+anonymous_bytes")["floors"]
    assert floors[-1]["new_images"] > 17  # else the cache is not full, and stands for another reason
    check_leak(named(verdicts, "rank 0", "non_torch_bytes"), "new_image", 32 * MIB)
    step = named(verdicts, "API server", "anonymous_bytes")
    assert step["verdict"] == "step", step["text"]
    assert step["step"] == pytest.approx(256 * MIB, rel=0.2)
    cache = named(verdicts, "EngineCore", "anonymous_bytes")
    assert cache["verdict"] == "plateau", cache["text"]


@pytest.mark.soak
def test_a_leak_under_a_load_that_never_ends_is_found_by_windows_of_equal_work(engine_environment, tmp_path):
    """EngineCore keeps 4 MiB a second beside three clients, so that no idle floor is ever taken; nothing else leaks."""
    name = "EngineCore anonymous_bytes"
    with faulty_engine(engine_environment, tmp_path, "clock=2") as faulty:
        verdicts = asyncio.run(under_load(faulty, lambda seen: are(seen, {name: "hour"}, "equal_work")))
    found = named(verdicts, "EngineCore", "anonymous_bytes")
    check_leak(found, "hour", 4 * 3600 * MIB)
    assert found["ground"] == "equal_work"
    # /dev/shm is the machine's: a test beside this one leaks into it.
    leaks = [one["series"] for one in verdicts.values() if one["verdict"] == "leak" and one["owner"] != "/dev/shm"]
    assert leaks == [name]


async def under_load(
    faulty: Faulty, is_done: Callable[[dict[str, Any]], bool], seconds: float = TRAFFIC_SECONDS
) -> dict[str, Any]:
    """Let three clients send one text after another; return the verdicts by series."""
    ended, source = time.monotonic() + seconds, random.Random(7)  # noqa: S311 - traffic is no secret
    verdicts: dict[str, Any] = {}

    async def client() -> None:
        while time.monotonic() < ended and not is_done(verdicts):
            text = f"{source.random()} " * source.randrange(1, 40)
            await send_texts(faulty.engine.url, faulty.engine.served_model, texts=[text], max_tokens=16)

    async def reader() -> None:
        while time.monotonic() < ended and not is_done(verdicts):
            await asyncio.sleep(5)
            answer = await asyncio.to_thread(faulty.sidecar.call, "GET", "/memory/growth")
            verdicts.update({one["series"]: one for one in answer["series"]})
            (faulty.step.parent / "verdicts.json").write_text(json.dumps(verdicts, indent=1))

    await asyncio.gather(reader(), client(), client(), client())
    return verdicts
