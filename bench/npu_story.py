"""The typical case in small, on a simulated NPU: `make demo-ascend`.

vLLM and vllm-ascend serve images on a device of 2 GiB under the real torch_npu (tests/fakes/cann). First Highwater only
watches, and clients speak to vLLM itself: the encoder's outputs fill what the KV cache left, `/reset_mm_cache` gives
nothing back, and a few images later the device is out of memory. Then the sidecar stands in front with its default
policy, and the same images and more are served.

It shows the allocator's reserve and the encoder cache. It cannot show fragmentation below them, nor any speed.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
from tabulate import tabulate

from highwater.model.components import COMPONENTS
from highwater.model.units import MIB
from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment, EngineOptions, ensure_environment
from highwater.terminal.demo.process import DemoError, signs_of_life
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.demo.story import incident_of, stage
from highwater.terminal.demo.traffic import REQUEST_SECONDS, image_url
from tests.fakes.cann.ascend import VLLM, VLLM_ASCEND, environ_of_vllm_ascend
from tests.fakes.cann.npu import TORCH_NPU, SimulatedNpu, build

TOTAL_BYTES = 2 << 30
KV_CACHE_BYTES = 1216 * MIB
"""So much that less is left than the encoder cache may take, 384 MiB: the start does not profile the encoder, as
vllm-ascend's did not before 0.13."""
OVERRIDES = {
    "text_config": {"intermediate_size": 256},
    "vision_config": {"hidden_size": 64, "intermediate_size": 64, "depth": 3},
}
"""Less arithmetic for the same outputs."""
ARGUMENTS = (
    *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--gpu-memory-utilization", "0.85", "--max-num-seqs", "16"),
    *("--limit-mm-per-prompt", '{"image": 1, "video": 0}', "--no-enable-prefix-caching"),
    *("--hf-overrides", json.dumps(OVERRIDES)),
)
SIDES = (1024, 896, 960, 832)
"""Of the images, in turn, in pixels: they differ, so that the allocator keeps pieces that fit no other."""
FIRST_IMAGES, MAX_IMAGES, MORE_IMAGES = 16, 48, 6
READING_SECONDS = 120.0
HEADING = "simulated device: it shows the allocator's reserve and the encoder cache, not fragmentation below them"
Say = Callable[[str], None]


@dataclass
class Told:
    """The course of the story; a rank is one of `GET /memory`."""

    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The rank by moment, in the order of the story."""
    failed_image: int = 0
    """The image at which the first engine's memory ended, counted from 1."""
    answer: str = ""
    """The error that its client got."""
    message: str = ""
    """torch_npu's own words, of the engine's log."""
    incident: str = ""
    """The sidecar's sentence about it."""
    reliefs: list[str] = field(default_factory=list)
    """The sentences about what the policy did to the second engine."""
    images: int = 0
    """The number that was sent to that one, and served."""


class Scene:
    """One engine, its sidecar, and a client that sends one image after another."""

    def __init__(self, engine: DemoEngine, sidecar: DemoSidecar, url: str, say: Say) -> None:
        self.engine, self.sidecar, self._url, self._say = engine, sidecar, url, say
        self.now: dict[str, Any] = {}
        """The rank as it was read last."""
        self.reliefs: list[str] = []
        """The sentences about what the policy had done before that, the oldest first."""

    def ask(self, image: int) -> str | None:
        """Send an image, counted from 1, and say what it left in use; return what failed, None where it was served."""
        side = SIDES[image % len(SIDES)]
        content = [{"type": "image_url", "image_url": {"url": image_url(image, width=side, height=side)}}]
        try:
            with signs_of_life(f"image {image} has been under way", self.engine.log_path, self._say):
                response = self._post(content)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if response.is_error:
            return f"HTTP {response.status_code}: {response.text}"
        rank = self.rank()
        used, free = _mib(rank["used_bytes"]), _mib(rank["free_bytes"])
        held = _mib(rank["components"]["encoder_cache_bytes"])
        self._say(f"  image {image}: {used} MiB used, {free} free, encoder cache {held}")
        return None

    def ask_all(self, images: Iterable[int]) -> None:
        """Raises DemoError where one was not served."""
        for image in images:
            if failed := self.ask(image):
                raise DemoError.with_log(f"image {image} failed: {failed}", self.engine.log_path)

    def _post(self, content: object) -> httpx.Response:
        """Ask for one token. Raises httpx.HTTPError."""
        asked = {"model": self.engine.served_model, "max_tokens": 1}
        body = asked | {"messages": [{"role": "user", "content": content}]}
        return httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=REQUEST_SECONDS, trust_env=False)

    def rank(self) -> dict[str, Any]:
        """Return the one rank as it is after this call; also kept as `now`, with the `reliefs` that ended before it.

        Waits for a reading that was taken later, not while the policy acted, and has its start and all components:
        the report's newest one may be of before the image that was just answered, or of half a relief.

        Raises:
            DemoError: There is no such reading in time.
        """
        since, deadline = time.time(), time.monotonic() + READING_SECONDS
        while time.monotonic() < deadline:
            report = self.sidecar.call("GET", "/memory")
            listed = self.sidecar.call("GET", "/memory/events?limit=200")["events"]  # also what ended meanwhile
            events = [one for one in reversed(listed) if one["rule"] and (one["result"] or {}).get("outcome") == "done"]
            at = max([since, *(one["at"] for one in events)])
            is_acting = any(rule["phase"] == "acting" for rule in report["policy"]["rules"])
            for rank in () if is_acting else report["ranks"]:
                if rank["taken_at"] > at and rank["start"] and None not in rank["components"].values():
                    self.now, self.reliefs = dict(rank), [one["summary"] for one in events]
                    return self.now
            time.sleep(0.2)
        reason = f"the sidecar has no new reading of the worker's memory within {READING_SECONDS:g} s"
        raise DemoError.with_log(reason, self.sidecar.log_path)


def engine_options(environment: EngineEnvironment, folder: Path, say: Say) -> EngineOptions:
    """Return the story's engine, whose device is made in the folder. Raises DemoError where something is missing."""
    npu = SimulatedNpu(folder / "cann", environment, total_bytes=TOTAL_BYTES)
    environ = environ_of_vllm_ascend(npu, environment, folder, announce=say)
    return EngineOptions(extension=False, extra_args=ARGUMENTS, extra_env=tuple(environ.items()))


def tell(
    environment: EngineEnvironment, folder: Path, say: Say, *, afterwards: Callable[[Scene], None] = lambda _: None
) -> Told:
    """Tell the story once.

    Args:
        environment: The engine's.
        folder: Gets the stand-in for CANN and the worker package.
        say: Gets what happens, sentence by sentence.
        afterwards: Is called with the second engine, before it ends.

    Raises:
        DemoError: Something is missing here, or what must happen did not.
    """
    options = engine_options(environment, folder, say)
    told = Told()
    say(
        f"\n1. Without the policy. Starting vLLM {VLLM} with vllm-ascend {VLLM_ASCEND} and torch_npu {TORCH_NPU} on a "
        f"simulated NPU of {_mib(TOTAL_BYTES)} MiB; Highwater only watches, clients speak to vLLM itself"
    )
    with stage(environment, options, None, say=say) as (engine, sidecar):
        say("It is ready, and is sent one image after another:")
        sidecar.call("PUT", "/policy", {"mode": "observe"})
        _run_until_full(Scene(engine, sidecar, engine.url, say), told, say)
    say("\n2. With it. The same engine and images, through the sidecar, with its default policy")
    with stage(environment, options, None, say=say) as (engine, sidecar):
        say("It is ready:")
        scene = Scene(engine, sidecar, sidecar.url, say)
        _run_with_the_policy(scene, told, say)
        afterwards(scene)
    return told


def _run_until_full(scene: Scene, told: Told, say: Say) -> None:
    up = scene.rank()
    before = up["start"][0]
    none = {component.name: 0 for component in COMPONENTS}
    outside = {"components": none | {"non_torch_bytes": before["used_bytes"]}}
    told.stages["before start"] = {name: before[name] for name in ("used_bytes", "free_bytes")} | outside
    told.stages["server up"] = up
    scene.ask_all(range(1, FIRST_IMAGES + 1))
    told.stages[f"after {FIRST_IMAGES} images"] = scene.now
    url = f"{scene.engine.url}/reset_mm_cache"
    reset = httpx.post(url, timeout=REQUEST_SECONDS, trust_env=False)
    told.stages["after POST /reset_mm_cache"] = scene.rank()
    say(f"  POST /reset_mm_cache returned {reset.status_code}: it clears a cache in host memory")
    for image in range(FIRST_IMAGES + 1, MAX_IMAGES + 1):
        if failed := scene.ask(image):
            told.failed_image, told.answer = image, failed
            break
    else:
        raise DemoError(f"the device has room after {MAX_IMAGES} images: {scene.rank()}")
    with signs_of_life("the sidecar's incident is awaited", scene.engine.log_path, say):
        incident = incident_of(scene.engine, scene.sidecar)
    if incident is None:
        raise DemoError.with_log("the sidecar wrote no incident of the engine's end", scene.sidecar.log_path)
    told.incident = incident["summary"]
    told.message = _exception(scene.engine.log_path)
    say(f"  image {told.failed_image}: {told.answer}\n  the engine's log: {told.message}\n  Highwater: {told.incident}")


def _exception(log: Path) -> str:
    """Return torch_npu's exception of a full device, as the engine's log has it."""
    found = re.search(r"torch\.OutOfMemoryError: .+", log.read_text(encoding="utf-8", errors="replace"))
    if found is None:
        raise DemoError.with_log("the engine did not run out of the device's memory, but failed otherwise", log)
    return found[0]


def _run_with_the_policy(scene: Scene, told: Told, say: Say) -> None:
    scene.rank()
    for image in range(1, told.failed_image + MORE_IMAGES + 1):
        before = scene.now
        scene.ask_all([image])
        if scene.reliefs and not told.reliefs:
            told.stages[f"with the policy: after {image - 1} images"] = before
            first = "its first relief" if len(scene.reliefs) == 1 else f"its first {len(scene.reliefs)} reliefs"
            told.stages[f"with the policy: after {first}"] = scene.now
        for summary in scene.reliefs[len(told.reliefs) :]:
            say(f"  the policy: {summary}")
        told.reliefs, told.images = scene.reliefs, image
    told.stages[f"with the policy: after {told.images} images"] = scene.now
    if not told.reliefs:
        raise DemoError.with_log("the policy did not act", scene.sidecar.log_path)


def results(told: Told) -> dict[str, Any]:
    """Return what the pages show of it, as JSON."""
    names = ("used_bytes", "free_bytes")
    return {
        "command": "make demo-ascend",
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "heading": HEADING,
        "total_bytes": TOTAL_BYTES,
        "versions": {"vLLM": VLLM, "vllm-ascend": VLLM_ASCEND, "torch_npu": TORCH_NPU},
        "failed_image": told.failed_image,
        "message": told.message,
        "incident": told.incident,
        "reliefs": told.reliefs,
        "images": told.images,
        "stages": [
            {"moment": moment, **{name: rank[name] for name in names}, "components": rank["components"]}
            for moment, rank in told.stages.items()
        ],
    }


def table(found: dict[str, Any], layout: str = "simple") -> str:
    """Return the stages as a table, in MiB."""
    rows = [
        [row["moment"], *map(_mib, (row["used_bytes"], row["free_bytes"]))]
        + [_mib(row["components"][component.name]) for component in COMPONENTS]
        for row in found["stages"]
    ]
    head = ["MiB", "used", "free", *(component.title for component in COMPONENTS)]
    return tabulate(rows, head, tablefmt=layout, disable_numparse=True, colalign=("left", *["right"] * (len(head) - 1)))


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--results", "path", type=click.Path(dir_okay=False, path_type=Path), help="write them there, as JSON")
def main(path: Path | None) -> None:
    """Tell the typical case on a simulated NPU, and print its table."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the children in order, as Ctrl-C does
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a pipe must not keep it until the end
    try:
        with tempfile.TemporaryDirectory(prefix="highwater-demo-ascend-") as folder:
            build(Path(folder, "tried"))  # what is missing is said before minutes of installing
            found = results(tell(ensure_environment(announce=click.echo), Path(folder), click.echo))
    except DemoError as error:
        raise click.ClickException(str(error)) from error
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    click.echo(f"\n{HEADING[0].upper()}{HEADING[1:]}.\n\n{table(found)}\n")
    click.echo(
        f"Without the policy the device was out of memory at image {found['failed_image']}; with it "
        f"{found['images']} images were served, and the policy acted {len(found['reliefs'])} times."
    )


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
