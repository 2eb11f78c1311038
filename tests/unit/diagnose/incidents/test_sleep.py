"""A wake-up that failed is an event: what it needs, what is free, and what others took meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.diagnose.log.story import story_of
from highwater.diagnose.rules.device import Sleep, wake_up_failed
from highwater.model.units import GIB
from tests.fakes.incident import reading

CORE = "(EngineCore pid=418) ERROR 09-02 00:55:35 [core.py:1210] "
FAILED = [
    "(EngineCore pid=418) CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163",
    f"{CORE}Invocation of wake_up method failed",
    f"{CORE}RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163",
]


def ranks(*used: int, sleeps: bool = True):
    """Of devices of 80 GiB."""
    return tuple(
        reading(
            number,
            total_bytes=80 * GIB,
            used_bytes=size * GIB,
            free_bytes=(80 - size) * GIB,
            asleep_tags=("weights", "kv_cache") if sleeps else (),
        )
        for number, size in enumerate(used)
    )


def asleep() -> Sleep:
    known = Sleep()
    for readings in (ranks(70, 70, sleeps=False), ranks(72, 71, sleeps=False), ranks(3, 3), ranks(40, 50)):
        known.note(readings)
    return known


@pytest.fixture
def sleep() -> Sleep:
    return asleep()


def test_it_says_what_is_missing_on_the_rank_that_lacks_most(sleep):
    found = wake_up_failed(story_of(FAILED), ranks(40, 50), sleep)
    assert found.title == "the engine was told to wake up and could not: the device's memory was short"
    assert found.text.startswith(
        "On rank 1 it needs about 68.00 GiB, which is what the sleep gave back, and 30.00 GiB are free. 47.00 GiB "
        "more of the device are in use than when it fell asleep: other processes hold them"
    )


def test_where_nobody_saw_it_fall_asleep_the_failure_is_told():
    found = wake_up_failed(story_of(FAILED), ranks(40), Sleep())
    assert "needs about" not in found.text
    assert "goes on sleeping" in found.text


def test_another_reason_is_not_called_memory(sleep):
    found = wake_up_failed(story_of([FAILED[1], f"{CORE}KeyError: 'weights'"]), ranks(4, 4), sleep)
    assert found.title == "the engine was told to wake up and could not"
    assert (
        wake_up_failed(story_of(["(EngineCore pid=9) INFO 09-02 00:55:35 [core.py:1] hello"]), ranks(4), sleep) is None
    )


def test_the_next_sleep_counts_anew(sleep):
    for readings in (ranks(60, 60, sleeps=False), ranks(10, 10)):
        sleep.note(readings)
    assert wake_up_failed(story_of(FAILED), ranks(40, 41), sleep).figures["needed_bytes"] == 50 * GIB
    others = tuple(replace(one, pid=1) for one in ranks(40, 41))
    assert wake_up_failed(story_of(FAILED), others, sleep).figures["needed_bytes"] is None
