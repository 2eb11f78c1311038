"""What scraped a real vLLM scrapes the sidecar beside it: the same families, as of now, none of one that is gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.engine.conftest import sidecar_beside
from tests.engines import send_texts
from tests.patience import LIMIT_SECONDS, wait_until
from tests.scrapers import LLM_D, PROMETHEUS_ACCEPTS, llm_d, production_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from highwater.demo.engine import DemoEngine
    from highwater.demo.sidecar import DemoSidecar

PATIENCE_SECONDS = 300.0
ATTEMPTS = 20
PROMPT_SECONDS = 3.0


@pytest.fixture(scope="module")
def scraped(
    engine_factory: Callable[..., DemoEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DemoEngine, DemoSidecar]]:
    """An engine that these tests may end, as anybody starts it, and a sidecar."""
    engine = engine_factory(multimodal=False, dev_mode=False, extension=False)
    with sidecar_beside(engine, tmp_path_factory.mktemp("scraped")) as sidecar:
        yield engine, sidecar
    engine.stop()


def page_of(url: str) -> httpx.Response:
    """The page as Prometheus asks for it."""
    headers = {"Accept": PROMETHEUS_ACCEPTS}
    response = httpx.get(f"{url}/metrics", headers=headers, trust_env=False, timeout=LIMIT_SECONDS)
    assert response.headers["content-type"].startswith("text/plain; version=")
    return response


def both_of(sidecar: DemoSidecar) -> str:
    """The sidecar's page with vLLM's families, which it leaves out where the engine is slow to tell them."""
    pages: list[str] = []

    def is_whole() -> bool:
        pages.append(page_of(sidecar.url).text)
        return "vllm:" in pages[-1]

    wait_until(is_whole)
    return pages[-1]


def declared(text: str) -> list[str]:
    """The families, `_created` as families of their own, as often as they are declared."""
    return [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]


def test_every_family_of_vllm_is_there_and_none_twice(scraped: tuple[DemoEngine, DemoSidecar]) -> None:
    engine, sidecar = scraped
    asyncio.run(send_texts(engine.url, engine.served_model, texts=["one", "two"]))
    direct, beside = page_of(engine.url).text, both_of(sidecar)
    assert [name for name in declared(beside) if not name.startswith("highwater_")] == declared(direct)
    assert len(set(declared(beside))) == len(declared(beside))
    assert "vllm:request_success_created" in declared(beside)
    assert set(LLM_D) <= set(declared(beside))
    if promtool := shutil.which("promtool"):
        told = subprocess.run([promtool, "check", "metrics"], input=beside.encode(), capture_output=True, check=False)
        assert b"error while linting" not in told.stderr


def test_routers_see_the_load_while_there_is_some(scraped: tuple[DemoEngine, DemoSidecar]) -> None:
    """Requests that go past the sidecar too: it is vLLM that counts them."""
    engine, sidecar = scraped
    texts = [f"Count from {number} on." for number in range(4)]
    seen: list[tuple[float, float]] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    # A slow machine may scrape past one load, and vLLM's families are left out where it is slow to tell them.
    while not any(running > 0 for running, _ in seen) and time.monotonic() < deadline:
        load = threading.Thread(
            target=lambda: asyncio.run(send_texts(engine.url, engine.served_model, texts=texts, max_tokens=400))
        )
        load.start()
        while load.is_alive():
            text = page_of(sidecar.url).text
            seen.append((production_stack(text)[0], llm_d(text).get("vllm:num_requests_running", -1.0)))
        load.join()
    assert max(running for running, _ in seen) > 0
    assert all(one == other for one, other in seen if other >= 0)
    assert any(other >= 0 for _, other in seen)


def test_no_figure_is_frozen(scraped: tuple[DemoEngine, DemoSidecar]) -> None:
    engine, sidecar = scraped
    both_of(sidecar)
    stopped = engine.pids()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        times: list[float] = []
        # A quarter of a second, on a machine that has time; one that waits for the engine waits for 5 s, each time.
        while len(times) < ATTEMPTS and (not times or min(times) > PROMPT_SECONDS):
            began = time.monotonic()
            text = page_of(sidecar.url).text
            times.append(time.monotonic() - began)
        assert min(times) < PROMPT_SECONDS
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert (production_stack(text), llm_d(text)) == ((0, 0), {})
    assert "highwater_engine_up" in declared(text)
    both_of(sidecar)
    engine.stop()
    text = page_of(sidecar.url).text
    assert "vllm:" not in text
    assert "highwater_engine_up" in declared(text)
