"""Where readings come from: what each source makes of the engine's answers, good and odd."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.engine.capabilities import Capabilities
from highwater.model.engine import EngineLoad, WorkCounts
from highwater.process.errors import EngineGarbled, EngineRefused
from highwater.watch.sources import EngineBudgets, EngineMetrics, PauseState, Workers, parse_load, polled_sources
from tests.fakes.engine import USED_READY, changed

# --- the workers ---


async def test_the_workers_memory_is_read_as_it_came(engine, fake):
    workers = (await Workers(engine, EngineBudgets(engine, None)).read()).workers
    assert workers is not None
    assert [(worker.rank, worker.used_bytes, worker.pid) for worker in workers] == [
        (0, USED_READY, 4242),
        (1, USED_READY, 4243),
    ]
    assert workers[0].taken_at == fake._clock()
    assert (workers[0].device.type, workers[0].torch.ooms) == ("npu", 0)


async def test_a_newer_extension_may_say_more(engine, fake):
    """Keys that are not known yet are no error: schema tells what must be."""
    fake.garble = changed(spilled_bytes=5, torch={"allocated_bytes": 7, "expandable": True})
    workers = (await Workers(engine, EngineBudgets(engine, None)).read()).workers
    assert workers[1].torch.allocated_bytes == 7


async def test_what_a_worker_cannot_tell_is_none(engine, fake):
    """A text model on CPU: no encoder cache, no allocator figures, no budget."""
    nothing = dict.fromkeys(("total_bytes", "free_bytes", "used_bytes", "weights_bytes", "kv_cache_bytes"))
    fake.garble = changed(**nothing, encoder_cache=None, dp_rank=None, torch={}, budget={}, notes=[])
    workers = (await Workers(engine, EngineBudgets(engine, None)).read()).workers
    assert (workers[1].used_bytes, workers[1].encoder_cache, workers[1].torch.reserved_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ok": False, "error": {"code": "failed", "message": "no device"}}, "rank 1 could not read.*no device"),
        ({"schema": 2}, "speaks schema 2, the sidecar 1"),
        ({"schema": None}, "speaks schema None"),
        ({"total_bytes": "many"}, r"1\.total_bytes"),
        ({"device": None}, r"1\.device"),
        ({"taken_at": None}, r"1\.taken_at"),
        ({"encoder_cache": {"entries": 1}}, r"1\.encoder_cache\.device_bytes"),
        ({"notes": "none"}, r"1\.notes"),
    ],
)
async def test_an_answer_that_is_not_the_contracts_is_garbled(engine, fake, changes, word):
    fake.garble = changed(**changes)
    with pytest.raises(EngineGarbled, match=word):
        await Workers(engine, EngineBudgets(engine, None)).read()


# --- the engine's own metrics ---


async def test_the_load_is_the_engines_own_count(engine, fake):
    fake.running, fake.waiting, fake.kv_usage = 3, 2, 0.41
    seen = await EngineMetrics(engine).read()
    assert seen.load == EngineLoad(
        requests_running=3,
        requests_waiting=2,
        kv_cache_usage_ratio=0.41,
        sleeping=False,
        work_done=0.0,
        work=WorkCounts(tokens=0.0),
    )


async def test_before_0_12_the_kv_usage_had_another_name(engine, fake):
    fake.version, fake.kv_usage = "0.11.0", 0.25
    load = (await EngineMetrics(engine).read()).load
    assert (load.kv_cache_usage_ratio, load.sleeping) == (0.25, None)


def test_engines_are_summed_and_the_fullest_counts():
    text = """
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.7
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="1",sleep_state="weights_offloaded"} 1.0
vllm:num_requests_running_of_something_else 99.0
"""
    each = {
        "0": EngineLoad(requests_running=3, requests_waiting=1, kv_cache_usage_ratio=0.2, sleeping=None),
        "1": EngineLoad(requests_running=4, kv_cache_usage_ratio=0.7, sleeping=True),
    }
    assert parse_load(text) == EngineLoad(
        requests_running=7, requests_waiting=1, kv_cache_usage_ratio=0.7, sleeping=True, engines=each
    )


def test_work_done_moves_when_anything_ran():
    """Tokens and ended requests of every engine: the same sum twice means that nothing ran in between."""
    text = """
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:generation_tokens_total{engine="0"} 20.0
vllm:request_success_total{engine="0",finished_reason="stop"} 3.0
vllm:request_success_total{engine="1",finished_reason="length"} 4.0
vllm:prompt_tokens_created{engine="0"} 9.0
"""
    load = parse_load(text)
    assert (load.work_done, load.is_idle) == (127.0, False)
    assert EngineLoad(requests_running=0, requests_waiting=0).is_idle


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_a_count_that_is_no_number_is_not_known(value):
    """Not an internal error: the engine may say anything."""
    text = f'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{engine="0"}} {value}\n'
    assert parse_load(text).requests_running is None


def test_without_statistics_nothing_is_known():
    """--disable-log-stats: None, never 0."""
    assert parse_load("process_cpu_seconds_total 5.0\n") == EngineLoad()


@given(st.text() | st.text(alphabet='vllm:num_requests_running{}" 0.\n'))
def test_no_text_breaks_the_parser(text):
    for page in (text, f"vllm:num_requests_running {text}"):
        try:
            load = parse_load(page)
        except EngineGarbled:
            continue
        assert isinstance(load, EngineLoad)


async def test_a_metrics_page_that_fails_is_an_engine_error(engine, fake):
    fake.failing["/metrics"] = 500
    with pytest.raises(EngineRefused):
        await EngineMetrics(engine).read()


# --- pause ---


@pytest.mark.parametrize("paused", [True, False])
async def test_paused_is_what_the_engine_says(engine, fake, paused):
    fake.paused = paused
    assert (await PauseState(engine).read()).paused is paused


async def test_an_answer_without_a_word_on_pause_is_garbled(engine, fake):
    fake.failing["/is_paused"] = 500
    with pytest.raises(EngineGarbled):
        await PauseState(engine).read()


# --- all of them ---


async def test_sources_are_asked_only_where_they_are_available(engine):
    metrics, workers, pause = polled_sources(engine, EngineBudgets(engine, None))
    assert [source.name for source in (metrics, workers, pause)] == ["engine_metrics", "workers", "pause_state"]
    nothing = Capabilities()
    assert [source.available(nothing) for source in (metrics, workers, pause)] == [True, False, False]
    assert workers.available(replace(nothing, collective_rpc=True))
    assert pause.available(replace(nothing, is_paused=True))
