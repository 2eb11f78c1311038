"""`python -m bench.engine_soak`: run, write JSON as it goes, and docs/figures.md at the end."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

from bench.engine_soak.page import facts, figures, verdicts, with_run
from bench.engine_soak.traffic import Counts, Traffic
from bench.machine import description
from bench.page import figures_table
from highwater.terminal.demo.engine import DemoEngine, EngineOptions, ensure_environment
from highwater.terminal.demo.process import DemoError
from highwater.terminal.demo.sidecar import DemoSidecar

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "figures.md"
_SAMPLE_SECONDS = 5.0
_WRITE_EVERY, _GROWTH_EVERY = 6, 12


class Soak:
    """One run, and its JSON.

    Args:
        sidecar: In front of the engine.
        path: Gets the JSON.
        minutes: As asked.
        clients: As asked.
        version: vLLM's.
    """

    def __init__(self, sidecar: DemoSidecar, path: Path, *, minutes: float, clients: int, version: str) -> None:
        self.counts = Counts()
        self._sidecar = sidecar
        self._path = path
        self._began = time.monotonic()
        self.run: dict[str, Any] = {
            "schema": 1,
            "day": datetime.now(UTC).date().isoformat(),
            "machine": description(version),
            "minutes": minutes,
            "clients": clients,
            "seconds": 0.0,
            "samples": [],
            "requests": self.counts.as_json(),
            "growth": None,
            "growth_problem": None,
            "complete": False,
        }

    async def sample(self) -> None:
        """Look at the sidecar until cancelled; what it does not answer is missing."""
        (pid,) = self._sidecar.pids()[:1]
        process = psutil.Process(pid)
        async with httpx.AsyncClient(base_url=self._sidecar.url, timeout=30, trust_env=False) as client:
            for number in range(1 << 30):
                await asyncio.sleep(_SAMPLE_SECONDS)
                self.run["samples"].append(
                    {
                        "at": round(time.monotonic() - self._began, 1),
                        "sidecar_rss_bytes": process.memory_info().rss,
                        "used_bytes": await _used(client),
                    }
                )
                if number % _GROWTH_EVERY == 0:
                    self.run["growth"], self.run["growth_problem"] = await _growth(client)
                if number % _WRITE_EVERY == 0:
                    self.write()

    async def end(self) -> None:
        """Take the last verdicts."""
        async with httpx.AsyncClient(base_url=self._sidecar.url, timeout=30, trust_env=False) as client:
            self.run["growth"], self.run["growth_problem"] = await _growth(client)
        self.run["complete"] = True
        self.write()

    def write(self) -> None:
        """Write the JSON whole, as it is now."""
        self.run["seconds"] = round(time.monotonic() - self._began, 1)
        self.run["requests"] = self.counts.as_json()
        new = self._path.with_name(f".{self._path.name}.tmp")
        new.write_text(json.dumps(self.run, indent=1), "utf-8")
        new.rename(self._path)


async def _used(client: httpx.AsyncClient) -> int | None:
    with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        sizes = [rank["used_bytes"] for rank in (await client.get("/memory")).json()["ranks"]]
        return sum(sizes) if sizes else None
    return None


async def _growth(client: httpx.AsyncClient) -> tuple[Any, str | None]:
    try:
        answer = await client.get("/memory/growth")
        if answer.status_code != httpx.codes.OK:
            return None, f"GET /memory/growth answered {answer.status_code}"
        return answer.json(), None
    except (httpx.HTTPError, ValueError) as exc:
        return None, f"GET /memory/growth failed: {exc!r}"


async def _soaked(soak: Soak, traffic: Traffic, seconds: float, clock: Callable[[], float]) -> None:
    watching = asyncio.create_task(soak.sample())
    try:
        await traffic.run(seconds, clock=clock)
        if watching.done():
            await watching  # its error
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    await soak.end()


def _run(minutes: float, clients: int, seed: int, path: Path) -> dict[str, Any]:
    environment = ensure_environment(announce=print)
    with tempfile.TemporaryDirectory(prefix="highwater-soak-") as made:
        folder = Path(made)
        rings = folder / "rings"
        options = EngineOptions(
            extension=False,
            plugin=True,
            extra_args=("--limit-mm-per-prompt", '{"image": 4, "video": 1}'),
            extra_env=(("HIGHWATER_RECORDER_DIR", str(rings)),),
        )
        settings = {"HIGHWATER_RECORDER_DIR": str(rings)}
        with (
            DemoEngine(environment, options, folder=folder) as engine,
            DemoSidecar(engine.url, folder=folder, settings=settings) as sidecar,
        ):
            soak = Soak(sidecar, path, minutes=minutes, clients=clients, version=environment.version)
            traffic = Traffic(sidecar.url, engine.served_model, soak.counts, seed=seed, clients=clients)
            try:
                asyncio.run(_soaked(soak, traffic, 60 * minutes, time.monotonic))
            finally:
                soak.write()
            return soak.run


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--minutes", default=120.0, show_default=True, type=click.FloatRange(min=0.5))
@click.option("--clients", default=4, show_default=True, type=click.IntRange(1, 64))
@click.option("--seed", default=1, show_default=True, help="of kinds, sizes and repeats")
@click.option(
    "--json",
    "json_path",
    default=Path("build/soak.json"),
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="is written there as it goes",
)
@click.option(
    "--from-json",
    "from_json",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="runs nothing: writes docs/figures.md from what a run has written so far",
)
@click.option("--no-docs", is_flag=True, help="leave docs/figures.md as it is")
def main(*, minutes: float, clients: int, seed: int, json_path: Path, from_json: Path | None, no_docs: bool) -> None:
    """Run a real engine with mixed traffic through the sidecar; the exit status is 1 if a goal is missed."""
    if from_json is not None:
        run = json.loads(from_json.read_text("utf-8"))
    else:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            run = _run(minutes, clients, seed, json_path)
        except DemoError as exc:
            raise click.ClickException(str(exc)) from exc
    found = figures(run)
    print("\n".join((figures_table(found, "grid"), *facts(run), verdicts(run))))
    if not no_docs:
        PAGE.write_text(with_run(PAGE.read_text("utf-8"), run), "utf-8")
    if any(figure.goal is not None and not figure.goal.is_met(figure.value) for figure in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
