"""A process beside the sidecar that resumes a paused engine when the sidecar dies or takes too long.

``python -m app.resume_guard ENGINE_URL SECONDS CA_FILE CERT_FILE KEY_FILE`` says ``armed`` when it is; then it waits
for one line on its standard input. The line means that all is well. The end of the input means that whoever armed it is
gone; silence, that it is too late: in both cases it resumes the engine. The files are for TLS, an empty name for none.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from app.engine import Engine
from app.errors import EngineError
from app.tls import TlsFiles, engine_context

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


async def arm(engine_url: str, seconds: float, *, tls: TlsFiles | None = None) -> Guard:
    """Start a guard, and return when it is ready.

    Args:
        engine_url: The engine to resume.
        seconds: After so long it resumes in any case.
        tls: For an https ``engine_url``.

    Raises:
        OSError: It could not be started.
        TimeoutError: It was not ready in time.
    """
    files = tls or TlsFiles()
    names = [str(path or "") for path in (files.ca_file, files.cert_file, files.key_file)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.resume_guard", engine_url, str(seconds), *names),
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


def main(engine_url: str, seconds: str, *tls_files: str) -> int:
    """Wait, and resume if need be; returns the exit status."""
    # Before it says that it is armed: what does not load must not come to light when it has to act.
    context = engine_context(engine_url, TlsFiles(*(Path(name) if name else None for name in tls_files)))
    sys.stdout.buffer.write(_ARMED)
    sys.stdout.buffer.flush()
    heard, _, _ = select.select([sys.stdin.buffer], [], [], float(seconds))
    if heard and sys.stdin.buffer.readline():
        return 0
    asyncio.run(_resume(engine_url, context))
    return 0


async def _resume(engine_url: str, context: ssl.SSLContext | None) -> None:
    until_it_answers = AsyncRetrying(
        retry=retry_if_exception_type(EngineError),
        wait=wait_fixed(0.5),
        stop=stop_after_delay(RESUME_SECONDS),
        reraise=True,
    )
    async with Engine(engine_url, request_seconds=10.0, ssl_context=context) as engine:
        await until_it_answers(engine.resume)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
