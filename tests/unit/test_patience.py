"""The waits of tests: their limit is counted in turns, which a busy machine does not use up."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests import patience
from tests.patience import patiently, until, wait_until


async def test_patience_counts_turns_of_the_loop(monkeypatch):
    monkeypatch.setattr(patience, "LIMIT_SECONDS", 0.2)
    arrived = asyncio.Event()
    asyncio.get_running_loop().call_later(0.03, lambda: (time.sleep(0.4), arrived.set()))
    await patiently(arrived.wait())
    with pytest.raises(TimeoutError):
        await patiently(asyncio.Event().wait())
    with pytest.raises(TimeoutError):
        await until(lambda: False)


def test_without_a_loop_looks_are_counted(monkeypatch):
    monkeypatch.setattr(patience, "LIMIT_SECONDS", 0.03)
    looks = iter([False, True])
    wait_until(lambda: time.sleep(0.05) or next(looks))
    never_comes = []
    with pytest.raises(TimeoutError, match=r"not true for 0\.03 s: wait_until\(lambda: never_comes\)"):
        wait_until(lambda: never_comes)
    with pytest.raises(TimeoutError, match=r"not true for 0\.03 s: <built-in method "):
        wait_until("".isdigit)
