"""vLLM's own page within ours: as of now or not at all, and never what costs a scraper the whole page."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from highwater.engine.client import Engine
from highwater.http import metrics
from highwater.http.metrics import MAX_BYTES, EnginePage

PAGE = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a\\"b\\\\c\\n{}"} 2.0
# HELP vllm:request_success_created Count of successfully processed requests.
# TYPE vllm:request_success_created gauge
vllm:request_success_created{engine="0",finished_reason="stop",model_name="m"} 1.7636600001234e+09
# HELP vllm:e2e_request_latency_seconds Histogram of e2e request latency in seconds.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf"} 2.0
vllm:e2e_request_latency_seconds_count{engine="0"} 2.0
vllm:e2e_request_latency_seconds_sum{engine="0"} NaN
# HELP process_cpu_seconds_total Total user and system CPU time spent in seconds.
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 12.5
"""
PLAIN = "text/plain; version=0.0.4; charset=utf-8"


def given(content: bytes | AsyncIterator[bytes] = PAGE, **options: Any) -> httpx.Response:
    """A response of the engine."""
    return httpx.Response(200, content=content, headers={"content-type": PLAIN}, **options)


def before(answer: Callable[[httpx.Request], httpx.Response], **options: float) -> EnginePage:
    """The page of an engine that answers like this."""
    return EnginePage(Engine("http://engine:8000", transport=httpx.MockTransport(answer)), **options)


async def read(content: bytes, *, status: int = 200, content_type: str = PLAIN) -> bytes:
    """What becomes of that response."""
    response = httpx.Response(status, content=content, headers={"content-type": content_type})
    return await before(lambda _: response).read()


async def test_a_page_of_vllm_is_passed_on_as_it_is():
    assert await read(PAGE) == PAGE


async def test_it_is_asked_for_uncompressed_in_the_classic_format():
    asked: list[httpx.Request] = []
    await before(lambda request: asked.append(request) or given()).read()
    (request,) = asked
    assert (request.url.path, request.headers["accept-encoding"]) == ("/metrics", "identity")
    assert request.headers["accept"].startswith("text/plain")


@pytest.mark.parametrize(
    "line",
    [
        b"<html><body>502 Bad Gateway</body></html>\n",
        b'{"error": "not found"}\n',
        b"vllm:x 1.0",  # cut off: its value may have been 10
        b"vllm:x one\n",
        b'vllm:x{model="m} 1.0\n',
        b'vllm:x{model="m"} 1.0 then\n',
        b"# TYPE vllm:x number\n",
        b'vllm:x{model="\xff"} 1.0\n',
        b"vllm:\x00 1.0\n",
    ],
)
async def test_one_line_that_is_no_exposition_costs_the_engines_part_alone(line):
    """A scraper that meets it would throw the whole page away, ours included."""
    assert await read(PAGE + line) == b""


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_an_error_page_is_no_page(status):
    assert await read(PAGE, status=status) == b""


async def test_another_format_is_left_out():
    """OpenMetrics ends at its EOF line, and what stands after it would be lost."""
    assert await read(PAGE + b"# EOF\n", content_type="application/openmetrics-text; version=1.0.0") == b""


async def test_families_with_our_names_are_ours():
    foreign = (
        b"# HELP highwater_engine_up Whether another engine is up.\n# TYPE highwater_engine_up gauge\n"
        b"highwater_engine_up 0.0\nhighwater_resets_created 1.0\n"
    )
    assert await read(foreign + PAGE) == PAGE
    assert await read(PAGE + foreign) == PAGE
    assert await read(PAGE + b"highwater_engine_up 0.0\n") == PAGE


@pytest.mark.parametrize("between", [b"", b"# TYPE vllm:y gauge\nvllm:y 1.0\n"])
@pytest.mark.parametrize("declared", [b"# HELP vllm:x X.\n# TYPE vllm:x gauge\n", b"# TYPE vllm:x gauge\n"])
async def test_a_family_that_is_there_twice_is_passed_on_once(declared, between):
    once = declared + b"vllm:x 1.0\n" + between
    assert await read(once + declared + b"vllm:x 2.0\n") == once


async def test_a_page_of_many_engines_is_checked_piece_by_piece(monkeypatch):
    """So that no stream of the proxy waits for all of it; what lies on a border is seen like everything else."""
    monkeypatch.setattr(metrics, "_PIECE_BYTES", 1)
    assert await read(PAGE) == PAGE
    assert await read(PAGE + PAGE) == PAGE
    assert await read(PAGE + b"no exposition\n") == b""


async def test_a_page_that_is_too_large_is_not_read_to_its_end():
    """An engine must not fill the sidecar's memory."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1024 * 1024
            yield b"# \n" * (1024 * 1024 // 3)

    assert await before(lambda _: given(endless()), seconds=60.0).read() == b""
    assert sent <= MAX_BYTES + 2 * 1024 * 1024


@pytest.mark.parametrize("failure", [httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, httpx.ReadTimeout])
async def test_an_engine_that_is_gone_has_no_figures(failure):
    answers: list[httpx.Response | Exception] = [given(), failure("gone")]

    def answer(_: httpx.Request) -> httpx.Response:
        now = answers.pop(0) if len(answers) > 1 else answers[0]  # a broken connection is tried once more
        if isinstance(now, Exception):
            raise now
        return now

    page = before(answer)
    assert await page.read() == PAGE
    assert await page.read() == b""


class Hanging(httpx.AsyncBaseTransport):
    """An engine that takes requests and answers when it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.asked = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        await self.released.wait()
        return given(request=request)


async def test_an_engine_that_hangs_is_waited_for_only_so_long():
    engine = Hanging()
    page = EnginePage(Engine("http://engine:8000", transport=engine), seconds=0.01)
    assert await page.read() == b""
    engine.released.set()
    assert await page.read() == PAGE
    assert engine.asked == 2


async def test_scrapes_at_the_same_time_share_one_question():
    engine = Hanging()
    page = EnginePage(Engine("http://engine:8000", transport=engine), seconds=60.0)
    first, *others = [asyncio.create_task(page.read()) for _ in range(20)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    engine.released.set()
    assert await asyncio.gather(*others) == [PAGE] * 19
    assert first.cancelled()
    assert engine.asked == 1


async def test_each_change_is_logged_once(caplog):
    """Twenty scrapes a second must not fill the log."""
    caplog.set_level("INFO", logger="highwater")
    states = iter([500, 500, 200, 200])
    page = before(lambda _: httpx.Response(next(states), content=PAGE, headers={"content-type": PLAIN}))
    for _ in range(4):
        await page.read()
    assert [record.getMessage() for record in caplog.records] == [
        f"vLLM's own families are left out of /metrics: GET /metrics: status 500, content type '{PLAIN}'",
        "vLLM's own families are in /metrics again",
    ]


def test_the_page_above_is_one_by_the_parsers_of_others():
    assert len(list(text_string_to_metric_families(PAGE.decode()))) == 5
    if promtool := shutil.which("promtool"):
        told = subprocess.run([promtool, "check", "metrics"], input=PAGE, capture_output=True, check=False)
        assert b"error while linting" not in told.stderr
