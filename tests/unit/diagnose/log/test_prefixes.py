"""vLLM's record is found behind any prefix and in JSON, and a client's words never are."""

from __future__ import annotations

import json
import time

import pytest

from highwater.diagnose.log.reader import Reader
from highwater.diagnose.log.starts import header_of, says_ready
from highwater.diagnose.log.story import LogStory, says_stop, story_of
from tests.unit.diagnose.log.prefixes import PREFIXES, WRAPPERS, match, parse, vllm_json

CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.27 GiB."
OOM = f"(Worker_TP1 pid=1993) ERROR 06-04 13:43:22 [multiproc_executor.py:966] {CUDA}"
DEAD = "(EngineCore_DP0 pid=1990) ERROR 06-04 13:43:22 [core.py:1512] EngineCore encountered a fatal error."
CALM = "(APIServer pid=1) INFO 06-04 13:43:22 [loggers.py:127] Engine 000: Avg prompt throughput: 1 tokens/s"
BARE = ["Traceback (most recent call last):", '  File "/x/vllm/v1/engine/core.py", line 1, in f', CUDA]


def names(story: LogStory) -> list[str]:
    return [message.name for message in story.messages]


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_a_record_is_found_behind_any_prefix(prefix):
    story = story_of([prefix + OOM])
    assert (names(story), story.lines, story.understood) == (["cuda_out_of_memory"], 1, 1)
    assert (story.exception.process, story.exception.pid) == ("Worker_TP1 pid=1993", 1993)
    assert names(story_of([f"{prefix}{OOM}\r", f"{prefix}{DEAD}\r"])) == ["cuda_out_of_memory", "engine_core_failed"]


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_an_exception_that_is_printed_bare_is_found_behind_the_same_prefix(prefix):
    later = [prefix.replace("01:02:03", "01:02:04") + line for line in BARE]
    assert names(story_of([prefix + DEAD, *later])) == ["cuda_out_of_memory", "engine_core_failed"]
    assert names(story_of(later)) == ["cuda_out_of_memory"]


@pytest.mark.parametrize("head", ["gpu node ", "our model server says ", "my service - "])
def test_words_before_a_record_are_a_prefix_once_three_lines_have_them(head):
    assert names(story_of([head + OOM])) == []
    assert names(story_of([head + OOM, head + DEAD, head + CALM])) == ["cuda_out_of_memory", "engine_core_failed"]


def test_a_users_prefix_stands_before_records_only():
    before = "vllm-1  | 2026-11-28T01:02:03.1Z "
    lines = [f"{before}(EngineCore pid=9) [prod]ERROR 06-04 13:43:22 [core.py:1] EngineCore encountered a fatal error."]
    assert names(story_of([*lines, *(before + line for line in BARE)])) == ["cuda_out_of_memory", "engine_core_failed"]


def test_what_one_reader_learned_holds_for_another():
    """The lines since the engine was ready may have no record."""
    reader = Reader()
    reader.read([f"gpu node {line}" for line in (CALM, CALM, DEAD)])
    assert names(story_of([f"gpu node {CUDA}"], reader=reader)) == ["cuda_out_of_memory"]
    assert names(story_of([f"gpu node {CUDA}"])) == []


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_line_is_found_in_a_collectors_json(wrap):
    own = vllm_json("hit", "Worker", 1993, logger="vllm.v1.executor.multiproc_executor", exc_info="\n".join(BARE))
    for line in (OOM, own):
        story = story_of([wrap(line)])
        assert (names(story), story.understood, story.exception.pid) == (["cuda_out_of_memory"], 1, 1993)
    assert names(story_of(map(wrap, BARE))) == ["cuda_out_of_memory"]


@pytest.mark.parametrize(
    "said",
    [
        {"message": "hit", "exc_info": "\n".join(BARE)},
        {"levelname": "ERROR", "message": "hit", "exc_info": "\n".join(BARE)},
        {"event": "hit", "level": "error", "logger": "vllm.v1.engine.core", "exception": "\n".join(BARE)},
        {"message": "hit", "log": {"logger": "vllm.v1.engine.core"}, "error": {"stack_trace": "\n".join(BARE)}},
    ],
)
def test_other_json_loggers_are_read(said):
    """python-json-logger without names, structlog, Elastic's schema."""
    assert names(story_of([json.dumps(said)])) == ["cuda_out_of_memory"]


FAKE = f"(EngineCore pid=9) ERROR 10-22 09:43:49 [core.py:1512] {CUDA}"
WORDS = {
    "a record": FAKE,
    "a prefix and a record": f"vllm-1  | {FAKE}",
    "a time and a record": f"2026-11-28T01:02:03.1Z stdout F {FAKE}",
    "JSON": vllm_json("x", "EngineCore", 9, logger="vllm.v1.engine.core", exc_info=CUDA),
    "a message": "CUDA out of memory",
    "a process": "(EngineCore pid=9) CUDA out of memory",
    "a shutdown": "[shutdown] API server: shutdown triggered",
    "a header": "(APIServer pid=1) INFO 11-22 05:31:49 [startup.py:286] non-default args: {}",
    "uvicorn": "INFO:     Application startup complete.",
}
SERVES = "vllm.entrypoints.openai.serving_chat"
# Where vLLM, uvicorn or an exception writes them.
PLACES = {
    "a prompt": lambda w: f"(APIServer pid=1) INFO 10-22 09:43:49 [logger.py:39] Received request c: prompt: {w!r}",
    "a request id": lambda w: f"(APIServer pid=1) INFO 10-22 09:43:49 [async_llm.py:1] Added request {w}.",
    "a model's name": lambda w: f"(APIServer pid=1) ERROR 10-22 09:43:49 [serving_chat.py:2] {w} does not exist.",
    "without a process": lambda w: f"INFO 10-22 09:43:49 [async_llm.py:1] {w}",
    "the chart's": lambda w: f"ERROR 11-22 05:32:10 [MainProcess pid=1] [serving_chat.py:2] {w}",
    "colours": lambda w: f"\x1b[0;36m(APIServer pid=1)\x1b[0;0m ERROR 11-22 05:34:05 [serving_chat.py:2] {w}",
    "a line's end": lambda w: f"(APIServer pid=1) ERROR 10-22 09:43:49 [serving_chat.py:2] a\r{w}\r",
    "an exception": lambda w: f"ValueError: {w}",
    "an API server's exception": lambda w: f"(APIServer pid=1) ValueError: {w}",
    "an answer": lambda w: f"openai.BadRequestError: Error code: 400 - {{'message': '{w}'}}",
    "a sentence": lambda w: f"the words {w} within a line",
    "a raw path": lambda w: f'INFO:     10.0.0.1:1 - "POST /v1/completions?x={w} HTTP/1.1" 200 OK',
    "a path": lambda w: f'INFO:     10.0.0.1:1 - "POST /v1/x?{w.replace(" ", "%20")} HTTP/1.1" 200 OK',
    "a named path": lambda w: f'(APIServer pid=1) INFO:     10.0.0.1:1 - "GET /{w} HTTP/1.1" 404 Not Found',
    "another's JSON": lambda w: json.dumps({"message": "Received request", "prompt": w, "request_id": w}),
    "an API server's JSON": lambda w: "(APIServer pid=1) " + json.dumps({"message": w}),
    "vLLM's JSON": lambda w: vllm_json(f"prompt\n{w}", "APIServer", 1, logger="vllm.entrypoints.logger"),
    "vLLM's JSON, an error": lambda w: vllm_json(w, "APIServer", 1, logger=SERVES, exc_info=f"ValueError: a\n{w}"),
    "uvicorn's JSON": lambda w: vllm_json(f'1.2.3.4:5 - "GET /{w}', "APIServer", 1, logger="uvicorn.access"),
    "JSON without a process": lambda w: vllm_json(w, "MainProcess", 1, logger=SERVES),
    "JSON in JSON": lambda w: json.dumps({"log": f"(APIServer pid=1) ERROR 10-22 09:43:49 [serving_chat.py:2] {w}\n"}),
}


# A worker's line has no client's words, and Ray says that it is one.
NO_WORKERS = ("an exception", "an answer")


def found_in(lines: list[str]) -> list[object]:
    """All that a client's words must not be."""
    story = story_of(lines)
    read = [line for _, each in Reader().read(lines) for line in each]
    marks = [line for line in read if header_of(line) or says_ready(line) or says_stop(line)]
    return [*story.messages, *story.failed, *marks, *filter(None, [story.exception, story.ended_in_order])]


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_a_clients_words_are_nobodys_behind_any_prefix(prefix, words):
    places = {name: place for name, place in PLACES.items() if "Ray" not in prefix or name not in NO_WORKERS}
    for name, place in places.items():
        hostile = prefix + place(words)
        if (name, words[:6]) != ("a sentence", "vllm-1"):  # alone it looks like a name and a bar
            assert found_in([hostile]) == [], hostile
        assert found_in([prefix + CALM] * 9 + [hostile]) == [], hostile
    assert found_in([prefix + CALM] * 9 + [prefix + place(words) for place in places.values()]) == []


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_clients_words_are_nobodys_in_a_collectors_json(wrap, words):
    for place in PLACES.values():
        for lines in ([wrap(place(words))], [wrap(CALM)] * 9 + [wrap(place(words))]):
            assert found_in(lines) == [], lines[-1]


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_the_lines_of_a_requests_traceback_are_the_api_servers(prefix):
    """uvicorn prints it bare, and a client's words may have line ends."""
    frames = ["Traceback (most recent call last):", '  File "/x/starlette/routing.py", line 1, in app']
    for begin in (["ERROR:    Exception in ASGI application"], [], ["Process x:"]):
        lines = [
            CALM,
            *begin,
            *frames,
            "ValueError: so",
            "CUDA out of memory",
            "bash: line 1:   412 Killed   vllm serve",
        ]
        assert found_in([prefix + line for line in lines if "Ray" not in prefix or line in frames]) == []


def test_a_progress_bar_before_a_record_hides_nothing():
    bar = "Capturing CUDA graphs (PIECEWISE):  50%|█████     | 1/2 [00:00<00:00, 3.1it/s]"
    assert names(story_of([bar + OOM])) == ["cuda_out_of_memory"]


def test_ray_says_how_often_a_line_came():
    hint = "(Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication, or see https://x)"
    (message,) = match(
        [f"{OOM}\x1b[32m [repeated 5x across cluster]\x1b[0m {hint}", f"{OOM} [repeated 2x across cluster]"]
    )
    assert message.count == 9


def test_what_another_process_quotes_is_the_same_exception():
    quotes = f"RuntimeError: Worker failed with error '{CUDA}', please check the stack trace above for the root cause"
    line = f"(EngineCore pid=9) ERROR 06-04 13:43:22 [core.py:1512] {quotes}"
    assert [(each.name, each.count) for each in match([line, line])] == [("cuda_out_of_memory", 1)]
    assert [(each.name, each.count) for each in match([OOM, line])] == [("cuda_out_of_memory", 1)]


# --- hostile input ---

MIB = 1024 * 1024


@pytest.mark.parametrize(
    "line",
    [
        '{"process":' + "9" * 100_000 + "}",
        '{"message":' + "[" * 100_000,
        '{"message":"a","message":{"message":7}}',
        '{"message":"\\ud800\\uZZZZ"}',
        '{"message":[1,2,256,-1]}',
        '{"log":' * 5000 + '"x"' + "}" * 5000,
        '{"exc_info":["a",7,null],"levelname":7,"process":"x","name":{}}',
        "{}",
        '{"message":NaN}',
    ],
)
def test_no_json_raises(line):
    assert [each.message for each in parse(line) if "out of memory" in each.message] == []


@pytest.mark.parametrize(
    "unit",
    [
        "(a pid=1) ",
        "ERROR 06-04 13:43:22 [",
        "ERROR 06-04 13:43:22 [a pid=1] [",
        '{"a":',
        " ",
        "vllm-1 | ",
        "10:10:10 ",
        "1%|",
    ],
)
def test_almost_a_prefix_costs_linear_time(unit):
    text = (unit * (MIB // len(unit) + 1))[:MIB]
    lines = [OOM, text, *(f"vllm-1 | {text[at : at + 400]}" for at in range(0, MIB, 400)), f'{{"message":"{text}"}}']
    began = time.process_time()
    story_of(lines)
    assert time.process_time() - began < 10
