"""An attack on the data port while probes ask the control port: the kubelet has no reason to restart anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from highwater.terminal.demo.sidecar import DemoSidecar
from tests.fakes.engine import FakeEngine
from tests.http.conftest import Wire, serving
from tests.http.test_two_ports import process
from tests.patience import patiently, until

ROOT = Path(__file__).resolve().parents[2]
MAX_CONNECTIONS = 64
# Slow heads, half-sent uploads, every connection taken, and floods for the processor.
ATTACKS = ("head drips", "half uploads", "body drips", "idle connections", "tiny chunks", "refused floods", "leavers")
PROBES = ("/livez", "/readyz", "/health/deep")
ROUNDS = 40


@contextlib.contextmanager
def attacked(port: int) -> Iterator[subprocess.Popen[str]]:
    """From another process, with twice the connections that the soak has, until the block ends."""
    command = [sys.executable, "-m", "tests.security.soak.attackers", str(port), "2", "1", *ATTACKS]
    attackers = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield attackers
    finally:
        attackers.kill()
        attackers.wait()
        for pipe in (attackers.stdin, attackers.stdout):
            pipe.close()


async def asked(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET on a connection of its own, as the kubelet asks."""
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port, limit=2**24))
    try:
        await wire.request("GET", path, ("connection", "close"))
        answer = await wire.answer()
        return answer.status, answer.body
    finally:
        await wire.leave()


def cpu_seconds(pids: list[int]) -> float:
    """What these processes have used."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


async def refusals(sidecar: DemoSidecar) -> float:
    """How many clients of the data port got no place."""
    _, text = await asked(sidecar.control_port, "/metrics")
    wanted = 'highwater_proxy_refused_total{reason="too_many_connections"}'
    return sum(float(line.split()[1]) for line in text.decode().splitlines() if line.startswith(wanted))


async def test_a_flood_of_the_data_port_holds_up_no_probe(tmp_path):
    """Each is answered 200 within a second; where the machine is busy, of the sidecar's own time."""
    async with (
        serving(FakeEngine()) as engine,
        process(tmp_path, engine, HIGHWATER_PROXY__MAX_CONNECTIONS=str(MAX_CONNECTIONS)) as sidecar,
    ):

        async def is_ready() -> bool:
            return (await asked(sidecar.control_port, "/readyz"))[0] == 200

        async def is_full() -> bool:
            return await refusals(sidecar) > MAX_CONNECTIONS

        await until(is_ready, pause_seconds=0.02)
        pids = sidecar.pids()
        with attacked(sidecar.port) as attackers:
            await until(is_full, pause_seconds=0.02)
            statuses: Counter[int] = Counter()
            slowest = 0.0
            for path in PROBES * ROUNDS:
                began, used = time.monotonic(), cpu_seconds(pids)
                status, _ = await patiently(asked(sidecar.control_port, path))
                slowest = max(slowest, min(time.monotonic() - began, cpu_seconds(pids) - used))
                statuses[status] += 1
                await asyncio.sleep(0.02)
            # The attack has gone on, and whoever comes to the data port now gets no place.
            assert attackers.poll() is None
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                assert (await asked(sidecar.port, "/version"))[0] == 503
            attackers.stdin.close()
            counts = json.loads(await asyncio.to_thread(attackers.stdout.read))
        assert statuses == {200: len(PROBES) * ROUNDS}
        assert slowest < 1.0
        assert {name for name, count in counts.items() if count["connections"]} == set(ATTACKS)
        assert (await asked(sidecar.control_port, "/livez"))[0] == 200
