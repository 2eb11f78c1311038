"""The recorder in a live engine of two workers: what their files say is what the processes are."""

from __future__ import annotations

import asyncio
import json
import mmap
from pathlib import Path
from typing import Any

import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.traffic import send_images
from tests.engines import send_texts, worker_pids
from tests.patience import wait_until
from tests.unit.worker_ext.ring_bytes import heartbeat, parse, table

from .conftest import ask_all
from .test_worker_ext_real import reset_encoder_cache

INSTANCE = "00112233445566ff"


def start(engine: DemoEngine, folder: Path, **arguments: Any) -> list[dict[str, Any]]:
    given = {"directory": str(folder), "instance": INSTANCE} | arguments
    return ask_all(engine, "recorder_start", json.dumps(given))


def wait_for_entries(paths: list[Path], entries: int) -> None:
    """The step after the last request has them all; a file on a disk has them a little later."""

    def totals() -> set[int]:
        return {found[0]["total"] for path in paths if (found := table(path)) is not None}

    wait_until(lambda: totals() == {entries}, pause_seconds=0.1)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


async def test_both_ranks_files_say_what_their_processes_are(two_workers: DemoEngine, tmp_path: Path) -> None:
    await asyncio.to_thread(reset_encoder_cache, two_workers)
    started = start(two_workers, tmp_path, rate=20)
    assert [(one["ok"], one["already"], one["notes"]) for one in started] == [(True, False, [])] * 2
    assert [one["already"] for one in start(two_workers, tmp_path, rate=20)] == [True, True]
    model = two_workers.served_model
    assert (await send_texts(two_workers.url, model, texts=[f"text {n}" for n in range(8)], max_tokens=16)).failed == 0
    assert (await send_images(two_workers.url, model, images=range(70_000, 70_004))).failed == 0
    paths = [Path(one["path"]) for one in started]
    wait_for_entries(paths, 4)
    sizes = {one["rank"]: resident_bytes(one["pid"]) for one in started}
    stopped = ask_all(two_workers, "recorder_stop", json.dumps({"instance": INSTANCE}))
    assert [(one["stopped"], one["path"]) for one in stopped] == [(True, one["path"]) for one in started]

    files = [parse(path) for path in paths]
    heads = [identity for identity, _ in files]
    assert {head["instance"] for head in heads} == {INSTANCE}
    assert [(head["rank"], head["local_rank"], head["tp_rank"]) for head in heads] == [(0, 0, 0), (1, 1, 1)]
    assert {head["pid"] for head in heads} == set(worker_pids(two_workers))
    assert {head["device"]["type"] for head in heads} == {"cpu"}
    assert len({head["boot_id"] for head in heads}) == 1

    samples = [[*found.values()][-1] for _, found in files]
    for head, path, sample in zip(heads, paths, samples, strict=True):
        last, told = heartbeat(path), table(path)
        assert last is not None
        assert last["kind"] == "stopped"
        moving, memory = sample["moving"], sample["memory"]
        # Sixteen tokens of a text are sixteen steps, with four texts in each.
        assert moving["steps_begun"] == moving["steps_ended"] > 30
        assert (moving["step_seconds"], moving["last_step_mono"] < sample["mono"]) == (None, True)
        assert memory["used_bytes"] == pytest.approx(sizes[head["rank"]], rel=0.05)
        assert (memory["kv_cache_bytes"] > 0, memory["weights_bytes"] > 0) == (True, True)
        assert told is not None
        assert (memory["encoder_cache"]["entries"], told[0]["total"], len(told[1])) == (4, 4, 4)
        assert sum(size for _, size, _, _ in told[1]) == memory["encoder_cache"]["device_bytes"]
    assert samples[0]["moving"]["steps_begun"] == samples[1]["moving"]["steps_begun"]
