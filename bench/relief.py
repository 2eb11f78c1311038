"""What relief gives back and what it costs traffic: one real engine, a sidecar, sixteen clients with images.

Times to the first token are compared within pairs: a slice of time in which nothing is done, and the slice after it, in
which one remedy is asked for every second. One pair of each round has two slices of nothing: how much those differ is
how much the machine's own noise is worth.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from app.demo.errors import DemoError
from app.demo.model import CACHE_TOKENS
from app.demo.sidecar import DemoSidecar
from app.demo.traffic import send_images
from bench.figure import Figure
from bench.image_clients import CLIENTS, IMAGE_SIDE, image_clients
from bench.relief_figures import HOLDING, NOTHING, REMEDIES, Move, Pair, ReliefFindings, relief_figures
from bench.sidecar import sidecar_beside
from bench.stage import Stage
from tests.engines import image_cache_bytes, image_tokens, worker_pids

ROOT = Path(__file__).resolve().parent.parent
CALL_SECONDS = 120.0
SETTLE_SECONDS = 1.0
# A worker of vLLM spins for a second after each message, on a core that a copy would want.
SPIN_SECONDS = 1.5
EVERY_SECONDS = 1.0
WARM_SECONDS = 5.0
ENTRIES = CACHE_TOKENS // image_tokens(IMAGE_SIDE, IMAGE_SIDE)
ENTRY_BYTES = image_cache_bytes(IMAGE_SIDE, IMAGE_SIDE)
TRIMS = 8
# No multiple of an entry: the last group goes past the target.
ASKED_BYTES = 30_000_000


@dataclass(frozen=True, slots=True)
class _Lengths:
    rounds: int
    slice_seconds: float
    holds: int
    copies: int


SHORT = _Lengths(rounds=3, slice_seconds=3.0, holds=10, copies=4)
FULL = _Lengths(rounds=5, slice_seconds=5.0, holds=30, copies=10)


@dataclass(frozen=True, slots=True)
class _Slice:
    began: float
    ended: float


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """The figures of docs/relief.md."""
    lengths = SHORT if short else FULL
    with sidecar_beside(stage.engine.url, stage.folder, policy__mode="observe") as sidecar:
        findings = asyncio.run(_Relief(stage, sidecar, lengths).measured())
    return relief_figures(findings)


class _Relief:
    """The measurements, one after the other on the same engine."""

    def __init__(self, stage: Stage, sidecar: DemoSidecar, lengths: _Lengths) -> None:
        self._stage = stage
        self._url = sidecar.url
        self._headers = sidecar.authorization()
        self._model = stage.engine.served_model
        self._lengths = lengths
        self._found = ReliefFindings(slice_seconds=lengths.slice_seconds)

    async def measured(self) -> ReliefFindings:
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as self._session:
            await self._trim_in_slices()
            await self._move_everything()
            await self._disturb_traffic()
        return self._found

    async def _trim_in_slices(self) -> None:
        """Fill the encoder cache, then trim it bit by bit; nobody asks meanwhile."""
        await self._reclaim("reset_encoder_cache")
        first = random.getrandbits(40)  # images that no cache has seen
        sent = await send_images(
            self._url,
            self._model,
            images=range(first, first + ENTRIES),
            concurrency=CLIENTS,
            width=IMAGE_SIDE,
            height=IMAGE_SIDE,
        )
        if sent.failed:
            raise DemoError(f"{sent.failed} of {sent.sent} image requests failed: {sent.errors}")
        await asyncio.sleep(SETTLE_SECONDS)  # a reading of before may count as one of just before
        async with self._session.get(f"{self._url}/memory/encoder-cache?limit=10000") as response:
            entries = (await response.json())["ranks"][0]["entries"]
        self._found.largest_group_bytes = max(entry["storage_bytes"] for entry in entries)
        target = {"remedy": "trim_encoder_cache", "free_bytes": ASKED_BYTES}
        self._found.trims = [_done(await self._reclaim(target)) for _ in range(TRIMS)]

    async def _move_everything(self) -> None:
        """To the host and back, again and again, and beside each time a plain copy of as much."""
        await self._restore()
        command = [str(self._stage.engine.environment.python), "-m", "bench.plain_copy", str(ENTRIES), str(ENTRY_BYTES)]
        env = os.environ | {"PYTHONPATH": str(ROOT)} | self._worker_threads()
        pipe = subprocess.PIPE
        copier = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env)
        try:
            for turn in range(self._lengths.copies + 1):
                await asyncio.sleep(SPIN_SECONDS)
                plain = await _one_line(copier)
                trimmed = _done(await self._reclaim("trim_encoder_cache"))["detail"][0]
                restored = await self._restore()
                if turn:  # the first may still move entries that share a storage
                    self._found.moves.append(Move(trimmed, restored, plain))
        finally:
            copier.kill()
            await copier.wait()

    def _worker_threads(self) -> dict[str, str]:
        """How many threads vLLM gave its worker, for another process of torch to take as many."""
        (pid, *_) = worker_pids(self._stage.engine)
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(line.split("=", 1) for line in variables if line.startswith("OMP_NUM_THREADS="))

    async def _disturb_traffic(self) -> None:
        names = (*REMEDIES, NOTHING)
        spans: list[tuple[str, _Slice, _Slice]] = []
        async with image_clients(self._url, self._model) as traffic:
            await asyncio.sleep(WARM_SECONDS)
            for turn in range(self._lengths.rounds):
                start = turn % len(names)
                order = (*names[start:], *names[:start])
                spans += [(name, await self._slice(NOTHING), await self._slice(name)) for name in order]
                print(f"  round {turn + 1}: {len(traffic.first_bytes)} answers so far", flush=True)
            for name in HOLDING:
                while len(self._found.results[name]) < self._lengths.holds:
                    await self._act(name)
                    await asyncio.sleep(EVERY_SECONDS)
        # All are answered only now.
        for name, without, beside in spans:
            pair = Pair(traffic.waits(without.began, without.ended), traffic.waits(beside.began, beside.ended))
            self._found.pairs[name].append(pair)
        self._found.requests = len(traffic.first_bytes)

    async def _slice(self, name: str) -> _Slice:
        """So much time, and in it one remedy every second, or as fast as it goes."""
        await asyncio.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        ended = began + self._lengths.slice_seconds
        while name != NOTHING and (acted := time.monotonic()) < ended:
            await self._act(name)
            await asyncio.sleep(max(min(acted + EVERY_SECONDS, ended) - time.monotonic(), 0))
        await asyncio.sleep(max(ended - time.monotonic(), 0))
        return _Slice(began, ended)

    async def _act(self, name: str) -> None:
        self._found.results[name].append(await self._reclaim(name))

    async def _reclaim(self, wish: str | dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(f"{self._url}/memory/reclaim", json={"remedies": [wish]}) as response:
            results: Sequence[dict[str, Any]] = (await response.json())["results"]
        return results[0]

    async def _restore(self) -> dict[str, Any]:
        async with self._session.post(f"{self._url}/memory/encoder-cache/restore") as response:
            answer: dict[str, Any] = (await response.json())["ranks"][0]
        return answer


def _done(result: dict[str, Any]) -> dict[str, Any]:
    if result["outcome"] != "done":
        raise DemoError(f"{result['remedy']} {result['outcome']}: {result['reason']}")
    return result


async def _one_line(copier: asyncio.subprocess.Process) -> dict[str, Any]:
    assert copier.stdin is not None
    assert copier.stdout is not None
    copier.stdin.write(b"\n")
    answer: dict[str, Any] = json.loads(await copier.stdout.readline())
    return answer
