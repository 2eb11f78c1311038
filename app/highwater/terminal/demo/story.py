"""``highwater demo``: watches a real engine (CPU), then reproduces the typical case on one whose caches may be reset.

It drives the sidecar as an operator would, over HTTP and by Highwater's own commands, whose words and figures it shows.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import click

from highwater.http.text.report import wrapped
from highwater.model.units import MIB, size_text
from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment, EngineOptions, ensure_environment
from highwater.terminal.demo.process import DemoError, NotInTime, answers
from highwater.terminal.demo.sidecar import DemoSidecar, commands_to_try, own_command, usual_port
from highwater.terminal.demo.traffic import send_images

WATCHED_IMAGES = 40  # of the first half: enough to see the encoder cache grow
CONCURRENCY = 8
READY_SECONDS = 600.0
INCIDENT_SECONDS = 45.0
SETTLED_SECONDS = 6.0
_SETTLE_SECONDS = 2.0
"""A worker's newest sample, and the sidecar's reading of it, are at most a second old each."""
# The demonstration's own rule: a threshold so low that a few dozen images cross it on any machine.
RULE_HIGH_BYTES = 160 * MIB
RULE = {
    "name": "demo",
    "signal": "encoder_cache_bytes",
    "high_water": RULE_HIGH_BYTES,
    "low_water": 96 * MIB,
    "min_gain_bytes": MIB,
    "cooldown_seconds": 5,
    # Not a trim: this engine's device is the host, and moving from one to the other would show nothing.
    "remedies": ["reset_encoder_cache"],
}
MAX_AUTOMATIC_IMAGES = 240
AUTOMATIC_CONCURRENCY = 2  # traffic that goes on refills the cache while the reset is measured: not too fast here

Ranks: TypeAlias = list[dict[str, Any]]
"""The ranks of ``GET /memory``."""


@contextmanager
def stage(
    environment: EngineEnvironment,
    options: EngineOptions,
    port: int | None,
    *,
    say: Callable[[str], None],
    stays: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Iterator[tuple[DemoEngine, DemoSidecar]]:
    """Start an engine with recorders and a sidecar that sees it, and say where; both are ended at the end.

    Raises DemoError where something failed: it begins and ends with the cause, and names their folder, which is
    otherwise removed. Where an engine died and somebody ``stays``, the sidecar waits for Ctrl-C before.
    """
    folder = Path(tempfile.mkdtemp(prefix="highwater-demo-"))
    for name in ("recorders", "incidents", "engine"):
        (folder / name).mkdir()
    variable = {"HIGHWATER_RECORDER_DIR": str(folder / "recorders")}
    recorded = replace(options, plugin=True, extra_env=(*options.extra_env, *variable.items()))
    engine = DemoEngine(environment, recorded, folder=folder / "engine", announce=say)
    kept = {"HIGHWATER_INCIDENTS__FOLDER": str(folder / "incidents"), "HIGHWATER_ENGINE_LOG": str(engine.log_path)}
    try:
        with DemoSidecar(
            engine.url, folder=folder, port=port, settings=variable | kept | dict(settings or {})
        ) as sidecar:
            say(f"The sidecar is at {sidecar.url} (dashboard: {sidecar.url}/dashboard), vLLM will be at {engine.url}")
            try:
                engine.start()
                _wait_ready(sidecar)
                yield engine, sidecar
            except DemoError as exc:
                incident = None if isinstance(exc, NotInTime) else incident_of(engine, sidecar)
                text = failure_text(str(exc), incident, folder)
                if stays and incident is not None:
                    page = f"{sidecar.url}/memory/incidents/{incident['id']}?format=html"
                    say(f"{text}\nThe sidecar is still up; Ctrl-C ends it. Read what it kept: {page}")
                    with suppress(KeyboardInterrupt):
                        signal.pause()
                raise DemoError(text) from exc
            finally:
                engine.stop()
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def failure_text(reason: str, incident: dict[str, Any] | None, folder: Path) -> str:
    cause, _, rest = reason.partition("\n")
    kept = f"What is known of it is kept in {folder}"
    if incident is not None:
        highwater = own_command(sys.argv[0])
        rest, cause = cause, incident["summary"]
        kept += f"; with what to change: {highwater} incidents --folder {folder / 'incidents'} {incident['id']}"
    return "\n".join(filter(None, (cause, rest, kept, cause)))


def incident_of(engine: DemoEngine, sidecar: DemoSidecar) -> dict[str, Any] | None:
    """Return the incident that the engine's end left, once it is written; `None` if the engine runs, or left none."""
    deadline = time.monotonic() + INCIDENT_SECONDS
    while time.monotonic() < deadline and not (engine.is_running() and answers(engine.port, "/health")):
        with suppress(DemoError):
            listed: list[dict[str, Any]] = sidecar.call("GET", "/memory/incidents")["incidents"]
            # Until then a process that ends may still write to the log.
            if listed and time.time() - listed[0]["last_at"] > SETTLED_SECONDS:
                return listed[0]
        time.sleep(0.2)
    return None


def watch(environment: EngineEnvironment, options: EngineOptions, *, images: int, say: Callable[[str], None]) -> None:
    """Watch an engine whose flags are unchanged: show its start, send it images, and show what grew.

    The worker package is on its path and a folder is named; there is no development mode, no flag and no call into the
    engine, and requests go to vLLM itself. Raises DemoError where a part did not come up, a request failed, or the
    recorders show nothing.
    """
    watched = replace(options, dev_mode=False, extension=False)
    with stage(environment, watched, None, say=say) as (engine, sidecar):
        _wait_ready(sidecar, lambda ranks: all(rank["start"] for rank in ranks))
        say(sidecar.command("status"))
        sidecar.command("mark", "ready")
        say(f"\n{images} image requests to vLLM itself, at {engine.url}")
        _send(engine, engine.url, range(images))
        time.sleep(_SETTLE_SECONDS)
        _wait_ready(sidecar, lambda ranks: all((rank["encoder_cache"] or {}).get("entries") for rank in ranks))
        say(sidecar.command("status", "--since", "ready"))
        say("Each worker wrote this into its file, and the sidecar read it: no worker was called.")


def tell(engine: DemoEngine, sidecar: DemoSidecar, *, images: int, say: Callable[[str], None]) -> None:
    """Reproduce the typical case. Raises DemoError where a request failed, or what must happen did not."""
    say(sidecar.command("mark", "ready"))
    say(f"\n{images} image requests through the sidecar at {sidecar.url}/v1/chat/completions")
    _send(engine, sidecar.url, range(images))
    say(sidecar.command("status", "--since", "ready"))
    reset = sidecar.call("POST", "/reset_mm_cache")
    before, after = (sum(rank["encoder_cache"]["entries"] for rank in reset[name]) for name in ("before", "after"))
    say(
        f"\nPOST /reset_mm_cache returned 200 and gave back {size_text(max(reset['freed_bytes']['total'], 0))}: the "
        f"encoder cache held {before} entries before it and {after} after. It frees {reset['frees']}."
    )
    say(sidecar.command("reclaim"))
    policy = sidecar.call("GET", "/policy")
    say(
        "\nNow by itself: PUT /policy with a rule that acts once the encoder cache holds "
        f"{size_text(RULE_HIGH_BYTES)}, and traffic until then"
    )
    sidecar.call("PUT", "/policy", {"rules": [RULE]})
    try:
        events = _traffic_until_reset(engine, sidecar, images)
    finally:
        sidecar.call("PUT", "/policy", {"mode": policy["mode"], "rules": policy["rules"]})
    for event in events:
        say(f"  {time.strftime('%H:%M:%S', time.localtime(event['at']))} {event['summary']}")


def _traffic_until_reset(engine: DemoEngine, sidecar: DemoSidecar, first_image: int) -> list[dict[str, Any]]:
    started = sidecar.call("GET", "/memory/history?step=86400")["now"]
    done = threading.Event()

    def seeds() -> Iterator[int]:
        for seed in range(first_image, first_image + MAX_AUTOMATIC_IMAGES):
            if done.is_set():
                return
            yield seed

    with ThreadPoolExecutor(1, "traffic") as pool:
        sending = pool.submit(_send, engine, sidecar.url, seeds())
        try:
            while True:
                was_over = sending.done()
                listed = sidecar.call("GET", "/memory/events?limit=200")["events"]
                events = [e for e in reversed(listed) if e["at"] >= started and e["rule"] == RULE["name"]]
                if any((event["result"] or {}).get("outcome") == "done" for event in events):
                    return events
                if was_over:
                    sending.result()  # what failed says more
                    seen = "; ".join(event["summary"] for event in events) or "none"
                    raise DemoError(f"no relief by the policy within {MAX_AUTOMATIC_IMAGES} images; its events: {seen}")
                time.sleep(0.2)
        finally:
            done.set()


def _send(engine: DemoEngine, url: str, seeds: range | Iterator[int]) -> None:
    """Send images: a range fast, with a progress bar, others slowly. Raises DemoError where a request failed."""
    total = len(seeds) if isinstance(seeds, range) else None
    concurrency = AUTOMATIC_CONCURRENCY if total is None else CONCURRENCY
    with click.progressbar(length=total or MAX_AUTOMATIC_IMAGES, label="  images", hidden=total is None) as bar:
        sending = send_images(
            url, engine.served_model, images=seeds, concurrency=concurrency, on_done=lambda: bar.update(1)
        )
        result = asyncio.run(sending)
    if result.failed:
        reasons = "; ".join(dict.fromkeys(result.errors))
        raise DemoError.with_log(f"{result.failed} of {result.sent} requests failed: {reasons}", engine.log_path)


def _wait_ready(sidecar: DemoSidecar, holds: Callable[[Ranks], bool] = bool) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        report = sidecar.call("GET", "/memory")
        is_complete = bool(report["ranks"]) and len(report["ranks"]) == report["ranks_expected"]
        if report["engine"]["state"] == "ready" and is_complete and holds(report["ranks"]):
            return
        if report["engine"]["state"] == "gone":
            break
        time.sleep(0.2)
    raise DemoError.with_log(f"the sidecar does not see what it should: {report['engine']}", sidecar.log_path)


# --- the command ---


@click.command()
@click.option("--prepare", is_flag=True, help="only install the engine's environment, and end")
@click.option("--images", default=160, show_default=True, type=click.IntRange(1, 10_000), help="requests to replay")
@click.option(
    "--port", default=None, type=click.IntRange(1, 65535), help="the sidecar's port  [default: 8001, or a free one]"
)
@click.option("--tensor-parallel", default=1, show_default=True, type=click.IntRange(1, 8), help="workers")
@click.option("--stay/--no-stay", default=None, help="stay up afterwards  [default: on a terminal]")
@click.option(
    "--wait",
    default=3600.0,
    show_default=True,
    type=click.FloatRange(1),
    help="seconds that a start may take while the engine's processes live",
)
@click.option("--skip", type=click.Choice(["watch"]), help="leave the first half out")
def demo(
    *,
    prepare: bool,
    images: int,
    port: int | None,
    tensor_parallel: int,
    stay: bool | None,
    wait: float,
    skip: str | None,
) -> None:
    """Watch a real vLLM engine (CPU), then replay the story on one that may be acted on."""
    # SIGTERM ends the children in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = EngineOptions(tensor_parallel=tensor_parallel, start_seconds=wait)
    stays = sys.stdout.isatty() if stay is None else stay
    try:
        environment = ensure_environment(announce=_say)
        if prepare:
            return
        if skip is None:
            _say(
                f"1. Watching. Starting vLLM {environment.version} with a tiny Qwen3-VL (about half a minute): no "
                "development mode and no flag, only the worker package on its path and HIGHWATER_RECORDER_DIR"
            )
            watch(environment, options, images=min(images, WATCHED_IMAGES), say=_say)
        _say(
            "\n2. Acting. The same engine again, in development mode and with the sidecar in front of it (another half "
            "minute)"
        )
        with stage(environment, options, port or usual_port(), say=_say, stays=stays) as (engine, sidecar):
            tell(engine, sidecar, images=images, say=_say)
            if stays:
                lines = commands_to_try(own_command(sys.argv[0]), sidecar.url, sidecar.port)
                click.echo(
                    f"\nStill up; Ctrl-C ends it. Open {sidecar.url}/dashboard, or try in another terminal:\n"
                    + "".join(f"  {line}\n" for line in lines)
                    + f"The engine itself is at {engine.url}"
                )
                with suppress(KeyboardInterrupt):
                    signal.pause()
    except DemoError as exc:
        raise click.ClickException(str(exc)) from exc


def _say(text: str) -> None:
    """Print it in the terminal's width, but for a command's own screen."""
    width = shutil.get_terminal_size().columns
    is_prose = not text.startswith("\n$ ")
    click.echo("\n".join(wrapped(line, width, indent=2) for line in text.split("\n")) if is_prose else text)
