"""The demonstration's engine is a real one, its encoder cache can be seen in its memory, and it ends cleanly."""

from __future__ import annotations

import os
import signal
import tempfile
from typing import TYPE_CHECKING

import psutil
import pytest

from highwater.demo import story
from highwater.demo.engine import DemoEngine, EngineOptions
from highwater.demo.errors import DemoError
from highwater.demo.model import CACHE_TOKENS
from highwater.demo.traffic import IMAGE_SIDE, send_images
from tests.engines import image_cache_bytes, image_tokens, send_texts, worker_pids
from tests.tested import Ran, confirm

from .conftest import ask_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from highwater.demo.environment import EngineEnvironment

MIB = 1024**2


def worker_rss_bytes(engine: DemoEngine) -> int:
    (pid,) = worker_pids(engine)
    return psutil.Process(pid).memory_info().rss


async def test_a_text_and_an_image_are_answered(engine: DemoEngine) -> None:
    texts = await send_texts(engine.url, engine.served_model, texts=["hello"])
    images = await send_images(engine.url, engine.served_model, images=[1])
    assert (texts.errors, images.errors) == ((), ())
    (hello,) = ask_all(engine, "hello")
    confirm(Ran.of_worker(hello, __file__))


async def test_distinct_images_grow_the_worker(engine: DemoEngine) -> None:
    first = await send_images(engine.url, engine.served_model, images=range(1000, 1004))
    before = worker_rss_bytes(engine)
    rest = await send_images(engine.url, engine.served_model, images=range(2000, 2000 + cache_capacity_images()))
    assert first.errors + rest.errors == ()
    assert worker_rss_bytes(engine) - before >= 200 * MIB


def cache_capacity_images() -> int:
    return CACHE_TOKENS // image_tokens(IMAGE_SIDE, IMAGE_SIDE)


def test_the_encoder_cache_can_hold_enough_to_be_seen() -> None:
    assert cache_capacity_images() * image_cache_bytes(IMAGE_SIDE, IMAGE_SIDE) == 384 * MIB


def failure(environment: EngineEnvironment, *extra_args: str, kills: bool = False) -> list[str]:
    """Tell the story, which fails; return the lines of its failure."""
    try:
        with story.stage(environment, EngineOptions(extra_args=extra_args), None, say=print) as (engine, sidecar):
            for pid in worker_pids(engine) if kills else ():
                os.kill(pid, signal.SIGKILL)
            story.tell(engine, sidecar, images=20, say=print)
    except DemoError as exc:
        return str(exc).splitlines()
    return []


@pytest.fixture
def incidents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return the kinds of the incidents that are kept of it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: [path.stem.partition("-")[2] for path in tmp_path.glob("*/incidents/*.json")]


@pytest.mark.soak
def test_an_engine_that_is_killed_in_the_story_has_died_in_the_words_of_its_incident(
    engine_environment: EngineEnvironment, incidents: Callable[[], list[str]]
) -> None:
    lines = failure(engine_environment, kills=True)
    assert lines[0].startswith("The engine died: the log says that a worker's process ended")
    # On a busy machine what it leaves may have been seen to hang first: that incident's name stays.
    assert lines[-1] == lines[0]
    assert incidents() in (["died"], ["hung"])


@pytest.mark.soak
def test_an_engine_that_cannot_start_is_told_by_its_log_first_and_last(
    engine_environment: EngineEnvironment, incidents: Callable[[], list[str]]
) -> None:
    lines = failure(engine_environment, "--max-model-len", "100000000")
    assert lines[0].startswith("The engine did not start: the log says that ")
    assert lines[1] == "the engine ended with status 1 while it started"
    assert (lines[-1], incidents()) == (lines[0], ["start-failed"])
