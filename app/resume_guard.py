"""A process beside the sidecar that resumes a paused engine when the sidecar dies or takes too long.

``python -m app.resume_guard ENGINE_URL SECONDS`` says ``armed`` when it is; then it waits for one line on its standard
input. The line means that all is well. The end of the input means that whoever armed it is gone; silence, that it is
too late: in both cases it resumes the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import sys
from dataclasses import dataclass

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from app.engine import Engine
from app.errors import EngineError

ARM_SECONDS = 15.0
RESUME_SECONDS = 60.0
_ARMED = b"armed\n"


@dataclass(frozen=True, slots=True)
class Guard:
    """A guard that is armed."""

    process: asyncio.subprocess.Process

    async def disarm(self) -> None:
        """Tell it that the engine is resumed, and see it off."""
        stdin = self.process.stdin
        with contextlib.suppress(ConnectionError):  # it may be gone: its time was up
            if stdin is not None:
                stdin.write(b"disarm\n")
                await stdin.drain()
        await self.process.wait()

    def take_over(self) -> None:
        """Have it resume the engine now, and go on trying for a while."""
        if self.process.stdin is not None:
            self.process.stdin.close()


async def arm(engine_url: str, seconds: float) -> Guard:
    """Start a guard, and return when it is ready.

    Args:
        engine_url: The engine to resume.
        seconds: After so long it resumes in any case.

    Raises:
        OSError: It could not be started.
        TimeoutError: It was not ready in time.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.resume_guard", engine_url, str(seconds)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # what ends our process group must not end it
    )
    assert process.stdout is not None  # noqa: S101 - asked for above
    try:
        async with asyncio.timeout(ARM_SECONDS):
            said = await process.stdout.readline()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if said != _ARMED:
        raise OSError(f"the guard ended with status {await process.wait()}")
    return Guard(process)


def main(engine_url: str, seconds: str) -> int:
    """Wait, and resume if need be; returns the exit status."""
    sys.stdout.buffer.write(_ARMED)
    sys.stdout.buffer.flush()
    heard, _, _ = select.select([sys.stdin.buffer], [], [], float(seconds))
    if heard and sys.stdin.buffer.readline():
        return 0
    asyncio.run(_resume(engine_url))
    return 0


async def _resume(engine_url: str) -> None:
    until_it_answers = AsyncRetrying(
        retry=retry_if_exception_type(EngineError),
        wait=wait_fixed(0.5),
        stop=stop_after_delay(RESUME_SECONDS),
        reraise=True,
    )
    async with Engine(engine_url, request_seconds=10.0) as engine:
        await until_it_answers(engine.resume)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
