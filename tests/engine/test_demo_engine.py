"""The demonstration's engine is a real one, its encoder cache can be seen in its memory, and it ends cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from app.demo.engine import Engine, EngineOptions
from app.demo.errors import DemoError
from app.demo.model import CACHE_TOKENS, image_cache_bytes, image_tokens
from app.demo.process import answers
from app.demo.traffic import IMAGE_SIDE, send_images, send_texts

if TYPE_CHECKING:
    from pathlib import Path

    from app.demo.environment import EngineEnvironment

MIB = 1024**2


def worker_rss_bytes(engine: Engine) -> int:
    (pid,) = engine.worker_pids()
    return psutil.Process(pid).memory_info().rss


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


async def test_a_text_and_an_image_are_answered(engine: Engine) -> None:
    texts = await send_texts(engine.url, engine.served_model, texts=["hello"])
    images = await send_images(engine.url, engine.served_model, images=[1])
    assert (texts.errors, images.errors) == ((), ())


async def test_distinct_images_grow_the_worker(engine: Engine) -> None:
    """The property that the demonstration stands on: what the encoder cache keeps shows in the worker's RSS."""
    first = await send_images(engine.url, engine.served_model, images=range(1000, 1004))
    before = worker_rss_bytes(engine)
    rest = await send_images(engine.url, engine.served_model, images=range(2000, 2000 + cache_capacity_images()))
    assert first.errors + rest.errors == ()
    assert worker_rss_bytes(engine) - before >= 200 * MIB


def cache_capacity_images() -> int:
    return CACHE_TOKENS // image_tokens(IMAGE_SIDE, IMAGE_SIDE)


def test_the_encoder_cache_can_hold_enough_to_be_seen() -> None:
    assert cache_capacity_images() * image_cache_bytes(IMAGE_SIDE, IMAGE_SIDE) == 384 * MIB


def test_a_wrong_argument_fails_early_and_says_why(engine_environment: EngineEnvironment, tmp_path: Path) -> None:
    began = time.monotonic()
    wrong = Engine(engine_environment, EngineOptions(extra_args=("--no-such-argument",)), folder=tmp_path)
    with pytest.raises(DemoError, match=r"ended with status 2(.|\n)*--no-such-argument"):
        wrong.start()
    assert time.monotonic() - began < 60
    assert wrong.pids() == []


STARTER = """
import sys
from pathlib import Path
from app.demo.engine import Engine, EngineOptions
from app.demo.environment import EngineEnvironment

engine = Engine(EngineEnvironment("", Path(sys.argv[1])), EngineOptions(multimodal=False), folder=Path(sys.argv[2]))
engine.start()
print(engine.port, *engine.pids(), flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_an_engine_whose_starter_was_killed(
    engine_environment: EngineEnvironment, tmp_path: Path
) -> None:
    """Nobody calls stop() after a SIGKILL; every process goes all the same, whatever its title."""
    command = [sys.executable, "-c", STARTER, str(engine_environment.root), str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as starter:
        assert starter.stdout is not None
        port, *pids = map(int, starter.stdout.readline().split())
        assert len(alive(pids)) >= 3  # API server, EngineCore, worker
        starter.send_signal(signal.SIGKILL)
    wait_until_gone(pids, seconds=30)
    assert not answers(port, "/health")


def wait_until_gone(pids: list[int], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := alive(pids):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


async def test_stop_leaves_nothing_and_start_brings_it_back(engine: Engine) -> None:
    """The last test of this file: the shared engine comes back fresh, on the same port."""
    pids, port = engine.pids(), engine.port
    engine.stop()
    engine.stop()
    assert alive(pids) == []
    engine.start()
    assert engine.port == port
    answers = await send_texts(engine.url, engine.served_model, texts=["hello"])
    assert answers.errors == ()
