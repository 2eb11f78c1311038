"""The guard as the process that it is: it resumes when its sidecar is gone or too late, and only then."""

from __future__ import annotations

import asyncio
import sys

import pytest

from app.resume_guard import arm
from tests.fakes.upstream import Upstream

PATIENCE = 20.0


@pytest.fixture
async def engine():
    """An engine that only counts how often it is resumed."""
    async with Upstream() as upstream:
        yield upstream


def resumed(engine: Upstream) -> asyncio.Event:
    """Set when the engine has been told to resume."""
    told = asyncio.Event()

    async def answer(call) -> None:
        await call.answer(b'{"status": "resumed"}')
        told.set()

    engine.on("/resume")(answer)
    return told


async def test_a_guard_that_is_disarmed_does_nothing(engine):
    """It ends at once."""
    told = resumed(engine)
    guard = await arm(engine.url, 60.0)
    async with asyncio.timeout(PATIENCE):
        await guard.disarm()
    assert (guard.process.returncode, told.is_set()) == (0, False)


async def test_a_guard_that_hears_nothing_resumes_when_the_time_is_up(engine):
    """The sidecar hangs."""
    told = resumed(engine)
    guard = await arm(engine.url, 0.01)
    async with asyncio.timeout(PATIENCE):
        await told.wait()
        await guard.disarm()  # too late, and harmless


async def test_a_guard_that_takes_over_resumes_at_once(engine):
    """The sidecar lives, and has given up."""
    told = resumed(engine)
    guard = await arm(engine.url, 600.0)
    guard.take_over()
    async with asyncio.timeout(PATIENCE):
        await told.wait()
        assert await guard.process.wait() == 0


async def test_a_guard_whose_sidecar_is_killed_resumes_at_once(engine):
    """SIGKILL: nobody could say anything any more."""
    told = resumed(engine)
    program = (
        "import asyncio\nfrom app.resume_guard import arm\n"
        f"async def main():\n await arm({engine.url!r}, 600.0)\n print('armed', flush=True)\n"
        " await asyncio.Event().wait()\nasyncio.run(main())"
    )
    sidecar = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(PATIENCE):
        assert await sidecar.stdout.readline() == b"armed\n"
        assert not told.is_set()
        sidecar.kill()
        await sidecar.wait()
        await told.wait()


async def test_a_guard_tries_until_the_engine_listens(engine):
    """One refused call is not the end."""
    told = asyncio.Event()
    answers = iter((500, 503, 200))

    async def answer(call) -> None:
        status = next(answers)
        await call.answer(b"{}", status)
        if status == 200:
            told.set()

    engine.on("/resume")(answer)
    guard = await arm(engine.url, 0.01)
    async with asyncio.timeout(PATIENCE):
        await told.wait()
        assert await guard.process.wait() == 0


async def test_a_guard_that_cannot_start_is_told(monkeypatch):
    """An error at once, no process left."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(OSError, match="the guard ended with status 1"):
        await arm("http://127.0.0.1:1", 1.0)
