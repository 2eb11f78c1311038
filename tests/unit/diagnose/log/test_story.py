"""What a log says as a whole: its messages and figures, the exception nearest to the cause, an orderly end."""

from __future__ import annotations

import pytest

from highwater.diagnose.log.story import LogStory, story_of
from highwater.model.units import GIB
from tests.unit.diagnose.log.prefixes import PREFIXES, run_of, vllm_json

FIGURES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.27 GiB. GPU 0 has a total capacity of 94.97 GiB "
    "of which 15.08 GiB is free. Including non-PyTorch memory, this process has 79.89 GiB memory in use. Of the "
    "allocated memory 78.22 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
QUOTED = f"RuntimeError: Worker failed with error '{FIGURES}', please check the stack trace above for the root cause"
HIT = "ERROR 06-04 13:43:22 [multiproc_executor.py:966] "
FATAL = "ERROR 06-04 13:43:22 [core.py:1512] "
OUTPUT_FAILED = "(APIServer pid=1) ERROR 06-04 13:43:23 [async_llm.py:1012] AsyncLLM output_handler failed."


def worker(text: str, pid: int = 1993) -> str:
    return f"(Worker_TP0 pid={pid}) {HIT}{text}"


def core(text: str) -> str:
    return f"(EngineCore_DP0 pid=900) {FATAL}{text}"


def counts(story: LogStory) -> list[tuple[str, int]]:
    return [(message.name, message.count) for message in story.messages]


def said(*lines: str) -> tuple[str, str] | None:
    """The exception of a story: who, and how it begins."""
    exception = story_of(lines).exception
    return None if exception is None else (exception.process, exception.text)


def test_a_log_of_docker_compose():
    lines = [worker("WorkerProc hit an exception."), worker(FIGURES), core("EngineCore encountered a fatal error.")]
    story = story_of([f"vllm-sm120  | {line}" for line in [*lines, OUTPUT_FAILED]])
    assert counts(story) == [("cuda_out_of_memory", 1), ("engine_core_failed", 1), ("engine_dead", 1)]
    assert (story.lines, story.understood, story.was_understood) == (4, 4, True)
    assert [(one.pid, one.tried_bytes, one.free_bytes) for one in story.failed] == [
        (1993, int(18.27 * GIB), int(15.08 * GIB))
    ]
    assert (story.exception.process, story.exception.pid) == ("Worker_TP0 pid=1993", 1993)


def test_a_log_in_vllms_own_json():
    core_says = f'Traceback (most recent call last):\n  File "/x/vllm/v1/engine/core.py", line 5, in f\n{QUOTED}'
    story = story_of(
        [
            vllm_json("vLLM server version 0.32.0", "APIServer", 1, logger="vllm.entrypoints.openai.api_server"),
            vllm_json(
                "hit", "Worker", 1993, logger="vllm.v1.executor.multiproc_executor", exc_info=f"Trace\n{FIGURES}"
            ),
            vllm_json("EngineCore encountered a fatal error.", "EngineCore", 9, logger="v.core", exc_info=core_says),
        ]
    )
    assert counts(story) == [("cuda_out_of_memory", 1), ("engine_core_failed", 1)]
    assert (story.lines, story.understood) == (3, 3)
    assert [(one.pid, one.free_bytes) for one in story.failed] == [(1993, int(15.08 * GIB))]
    assert (story.exception.process, story.exception.text[:22]) == ("Worker pid=1993", "torch.OutOfMemoryError")


def test_a_log_of_rays_workers():
    ray = "(EngineCore_DP0 pid=1769) (RayWorkerWrapper pid=301, ip=10.2.1.15) "
    task = core("ray.exceptions.RayTaskError(OutOfMemoryError): ray::RayWorkerWrapper.execute_method() (pid=301)")
    story = story_of(
        [f"{ray}{HIT}{FIGURES} [repeated 5x across cluster]", task, core("EngineCore encountered a fatal")]
    )
    assert counts(story)[0] == ("cuda_out_of_memory", 6)
    assert (story.failed[0].pid, story.exception.pid) == (301, 301)
    assert story.exception.process == "RayWorkerWrapper pid=301, ip=10.2.1.15"


def test_rays_memory_monitor_is_quoted():
    killed = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
    lines = [
        "EngineCore encountered a fatal error.",
        "Traceback (most recent call last):",
        killed,
        "Memory on the node",
    ]
    assert said(*map(core, lines)) == ("EngineCore_DP0 pid=900", killed)


def test_a_log_that_is_not_understood_says_so():
    story = story_of(["", "GET / 200", '{"status": 200}', "what a day", ""])
    assert (story.lines, story.understood, story.was_understood) == (3, 0, False)


# --- the exception ---

ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
TRACE = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    "lines",
    [
        [worker(ILLEGAL), core("RuntimeError: cancelled"), core("Exception: WorkerProc initialization failed due to")],
        [core("RuntimeError: Executor failed."), worker(ILLEGAL)],
        [
            worker(TRACE),
            worker("KeyError: 1"),
            worker("During handling of the above exception, another"),
            worker(ILLEGAL),
        ],
        [worker(TRACE), worker('  File "x.py", line 1'), worker("    raise ValueError: x"), worker(ILLEGAL)],
        [worker(ILLEGAL), worker("CUDA kernel errors might be reported elsewhere"), worker("RuntimeError: cancelled")],
        [worker(ILLEGAL), worker("RuntimeError: NCCL communicator was aborted", 1994), core(QUOTED)],
        [worker(ILLEGAL), OUTPUT_FAILED, "(APIServer pid=1) ERROR 06-04 13:43:23 [async_llm.py:1] ValueError: theirs"],
        [worker("OSError: long ago", 1).replace("13:43", "11:43"), worker(ILLEGAL)],
        [worker(ILLEGAL), "(Worker_TP1 pid=5) WARNING 06-04 13:43:22 [x.py:1] ImportError: no matter"],
    ],
)
def test_the_exception_nearest_to_the_cause_is_quoted(lines):
    assert said(*lines) == ("Worker_TP0 pid=1993", ILLEGAL)


def test_what_follows_is_quoted_where_there_is_nothing_else():
    assert said(core("vllm.v1.engine.exceptions.EngineDeadError: it"))[1].startswith("vllm.v1.engine.exceptions")
    assert said(core("RuntimeError: Executor failed."), core(QUOTED)) == ("EngineCore_DP0 pid=900", FIGURES)


def test_a_name_that_no_rule_knows_is_one_after_a_traceback():
    out = "triton.runtime.errors.OutOfResources: out of resource: shared memory"
    assert said(worker(TRACE), worker('  File "x.py", line 1'), worker(out)) == ("Worker_TP0 pid=1993", out)
    assert said(worker(out)) is None


FRAME = '  File "/opt/vllm/{}", line 1, in f'


@pytest.mark.parametrize(
    ("lines", "process"),
    [
        (["Process EngineCore_DP0:", TRACE, FRAME.format("v1/engine/core.py"), ILLEGAL], "EngineCore_DP0"),
        ([TRACE, FRAME.format("v1/worker/gpu_worker.py"), ILLEGAL], ""),
        ([TRACE, FRAME.format("vllm/entrypoints/cli/main.py"), ILLEGAL], None),
        (["Process ApiServer_0:", TRACE, FRAME.format("x.py"), ILLEGAL], None),
        (["ERROR:    Exception in ASGI application", TRACE, FRAME.format("x.py"), ILLEGAL], None),
        ([ILLEGAL], None),
        (
            ["(EngineCore pid=9) " + TRACE, "(EngineCore pid=9)   File", f"(EngineCore pid=9) {ILLEGAL}"],
            "EngineCore pid=9",
        ),
        (["(APIServer pid=9) " + TRACE, "(APIServer pid=9)   File", f"(APIServer pid=9) {ILLEGAL}"], None),
    ],
)
def test_a_bare_traceback_is_nobodys_where_its_frames_are_the_api_servers(lines, process):
    """Python names the process before it, or its frames tell."""
    exception = said(*lines)
    assert exception == (None if process is None else (process, ILLEGAL))


@pytest.mark.parametrize(
    ("lines", "process", "text"),
    [
        (["(Worker_TP1 pid=7) Fatal Python error: Segmentation fault"], "Worker_TP1 pid=7", "Fatal Python error: "),
        (["terminate called after throwing an instance of 'c10::Error'", f"  what():  {ILLEGAL}"], "", ILLEGAL),
        (["/entry.sh: line 3:    12 Segmentation fault      (core dumped) vllm serve x"], "", "/entry.sh"),
        (["!!!!!!! Segfault encountered !!!!!!!"], "", "!!!!!!! Segfault"),
    ],
)
def test_what_aborts_a_process_is_its_last_word(lines, process, text):
    lines += [core("Worker proc VllmWorker-1 died unexpectedly"), core("RuntimeError: cancelled"), OUTPUT_FAILED]
    exception = story_of([core("hello").replace("13:43", "11:43"), *lines]).exception
    assert (exception.process, exception.text[: len(text)], exception.before) == (process, text, "")
    assert not exception.follows


def test_a_peer_that_is_gone_is_a_consequence():
    peers = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:30110"
    assert said(worker(peers, 5), worker("IndexError: list index out of range")) == (
        "Worker_TP0 pid=1993",
        "IndexError: list index out of range",
    )
    assert story_of([worker(peers)]).exception.follows


@pytest.mark.parametrize(
    "lines",
    [
        [worker("WorkerProc hit an exception."), worker(TRACE), worker('  File "x.py", line 1, in f')],
        [worker("WorkerProc hit an exception."), core("EngineCore encountered a fatal error."), OUTPUT_FAILED],
        [worker("WorkerProc hit an exception."), core("RuntimeError: cancelled")],
    ],
)
def test_an_exception_that_is_announced_and_missing_is_told_as_such(lines):
    assert said(*lines) == ("Worker_TP0 pid=1993", "")
    assert said(*lines, worker(ILLEGAL)) == ("Worker_TP0 pid=1993", ILLEGAL)
    assert said(*lines, core(QUOTED)) == ("EngineCore_DP0 pid=900", FIGURES)


LATER = "(APIServer pid=1) INFO 06-04 14:02:22 [loggers.py:127] Engine 000: Avg prompt throughput: 1.0 tokens/s"


def test_an_exception_that_was_lived_through_says_how_long_ago():
    assert story_of([worker(ILLEGAL), LATER]).exception.before == "19 min"
    untimed = ["(EngineCore pid=9) it goes on"] * 300
    assert story_of([f"(Worker pid=7) {ILLEGAL}", *untimed]).exception.before == "300 lines"
    assert story_of([worker(ILLEGAL), LATER, STOPS[0].replace("13:43", "14:03")]).ended_in_order


@pytest.mark.parametrize(
    "line",
    [
        '(APIServer pid=1) INFO:     1.2.3.4:5 - "GET /v1/models?at=06-04T19:00:00 HTTP/1.1" 200 OK',
        "(APIServer pid=1) 06-04 19:00:00 what a client wrote",
    ],
)
def test_no_clients_words_are_a_time(line):
    assert story_of([worker(ILLEGAL), line]).exception.before == ""
    assert [one.pid for one in story_of([worker(FIGURES), line]).failed] == [1993]


def test_a_line_without_a_time_is_as_old_as_the_next_one():
    lines = [core("hello").replace("13:43", "02:00"), f"(Worker pid=7) {FIGURES}", OUTPUT_FAILED]
    assert [one.pid for one in story_of(lines).failed] == [7]


def test_a_module_is_no_process():
    """Up to 0.9 the log names none."""
    assert said(f"{FATAL}KeyError: 'model.layers.17'") == ("", "KeyError: 'model.layers.17'")


def test_a_worker_that_was_told_to_end_has_no_exception():
    assert said(worker(TRACE), worker("KeyboardInterrupt"), worker(TRACE), worker("SystemExit: 0")) is None


# --- an orderly end ---

# As vLLM 0.32.0 logs it on SIGTERM.
STOPS = [
    "(APIServer pid=1) INFO 06-04 13:43:22 [launcher.py:254] [shutdown] API server: shutdown triggered",
    "(EngineCore pid=9) INFO 06-04 13:43:22 [core.py:1455] [shutdown] EngineCore: trigger received signal=SIGTERM",
    "(APIServer pid=1) INFO 06-04 13:43:22 [launcher.py:304] [shutdown] API server: shutting down FastAPI HTTP server",
    "INFO:     Shutting down",
    "INFO:     Application shutdown complete.",
    "(APIServer pid=1) INFO 06-04 13:43:22 [launcher.py:110] Shutting down FastAPI HTTP server.",
    vllm_json("Application shutdown complete.", "APIServer", 1, logger="uvicorn.error").replace(
        "11-27 17:12", "06-04 13:43"
    ),
]


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_an_orderly_end_is_told_behind_any_prefix(prefix):
    """By vLLM's own words or uvicorn's."""
    for line in STOPS[:3]:
        assert story_of([prefix + line]).ended_in_order
    for line in STOPS[3:] if "Ray" not in prefix else []:
        assert story_of([prefix + line]).ended_in_order, line


@pytest.mark.parametrize(
    "before",
    [
        worker(ILLEGAL),
        OUTPUT_FAILED,
        core("Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."),
    ],
)
def test_the_end_of_an_engine_that_failed_is_not_orderly(before):
    assert not story_of([before, *STOPS]).ended_in_order
    assert story_of([*STOPS, before]).ended_in_order


def test_an_api_server_that_fails_stops_its_engine_and_is_no_orderly_end():
    fails = [TRACE, FRAME.format("vllm/entrypoints/cli/main.py"), "OSError: [Errno 98] Address already in use"]
    assert not story_of([STOPS[1], *fails]).ended_in_order
    assert story_of([STOPS[1], *fails[:2], "KeyboardInterrupt"]).ended_in_order


def test_an_api_server_that_clears_up_after_its_engine_core_was_not_told_to_end():
    """Word by word as vLLM 0.32.0 after SIGKILL of EngineCore; of a planned stop the same lines come later."""
    stamp = "11-28 07:51:44"
    clears_up = [
        f"(APIServer pid=1) INFO {stamp} [utils.py:628] [shutdown] Process manager: send sigterm to process EngineCore",
        f"(APIServer pid=1) WARNING {stamp} [core_client.py:817] [shutdown] MPClient: engine core exited unexpectedly; "
        "starting cleanup",
        f"(APIServer pid=1) INFO {stamp} [core_client.py:770] [shutdown] MPClient: start timeout=default",
        f"(APIServer pid=1) INFO {stamp} [core_client.py:777] [shutdown] MPClient: complete",
    ]
    told = f"(APIServer pid=1) INFO {stamp} [launcher.py:254] [shutdown] API server: shutdown triggered"
    assert not story_of([*clears_up, "INFO:     Shutting down"]).ended_in_order
    assert story_of([told, *clears_up[2:], "INFO:     Shutting down"]).ended_in_order


DEAD = "(APIServer pid=1) ERROR 06-04 {time} [serving.py:760] vllm.v1.engine.exceptions.EngineDeadError: EngineCore"


def test_a_log_cut_within_its_last_minute_is_not_understood():
    flood = [DEAD.format(time="13:43:22")] * 3
    assert not story_of(flood, is_cut=True).was_understood
    assert story_of(flood).was_understood


def test_a_log_cut_before_its_last_minute_is_understood():
    lines = [DEAD.format(time="13:40:00"), DEAD.format(time="13:43:22")]
    assert story_of(lines, is_cut=True).was_understood


def test_a_log_without_times_that_is_cut_is_not_understood():
    assert not story_of([core("x").replace("06-04 13:43:22", "")] * 3, is_cut=True).was_understood


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
STOP = "(APIServer pid=1) INFO 06-05 01:45:00 [launcher.py:254] [shutdown] API server: shutdown triggered"


def test_what_the_engine_lived_on_with_is_no_cause():
    story = story_of([core(OOM), core("step").replace("06-04", "06-05")])
    (older,) = story.older
    assert (story.messages, older.name, older.advice) == ((), "cuda_out_of_memory", ())
    assert older.title.startswith("PyTorch found no room on the GPU, ")
    assert older.title.endswith(" before the log's end")


def test_a_message_that_came_again_is_a_cause():
    story = story_of([core(OOM), core(OOM).replace("06-04", "06-05")])
    assert (counts(story), story.older) == ([("cuda_out_of_memory", 2)], ())


def test_a_bare_message_of_an_idle_engine_is_as_young_as_the_next_line():
    story = story_of([core("step"), OOM, core("step").replace("06-04", "06-05")])
    assert counts(story) == [("cuda_out_of_memory", 1)]


def test_what_the_engine_lived_on_with_does_not_block_an_orderly_end():
    assert story_of([core(OOM), STOP]).ended_in_order
    assert not story_of([core(OOM).replace("06-04 13:43", "06-05 01:44"), STOP]).ended_in_order


def test_an_end_of_a_process_does_not_age():
    dead = core("EngineCore encountered a fatal error.")
    assert not story_of([dead, STOP]).ended_in_order
    assert counts(story_of([dead, STOP])) == [("engine_core_failed", 1)]


def record(
    *lines: str, process: str = "EngineCore pid=900", file: str = "core.py:5", level: str = "ERROR"
) -> list[str]:
    """A record of several lines, as vllm 0.32.0 logging_utils/formatter.py writes it."""
    return [f"({process}) {level} 06-04 13:43:22 [{file}] {line}" for line in lines]


@pytest.mark.parametrize(
    "opening",
    [
        "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[NewRequestData(req_id=x",
        "Failed to compile grammar for request chatcmpl-x",
        "anything else",
    ],
)
def test_a_clients_new_line_in_a_record_is_no_message(opening):
    story = story_of(record(opening, f"{OOM}-0-1a2b"))
    assert (story.messages, story.failed, story.exception) == ((), (), None)


def test_a_clients_new_line_and_a_traceback_of_its_own_are_no_message():
    story = story_of(record("Failed to compile grammar for request x", TRACE, '  File "x.py", line 1', OOM))
    assert (story.messages, story.exception) == ((), None)


def test_an_exception_within_a_records_traceback_is_a_message():
    story = story_of(record("step", TRACE, '  File "x.py", line 1', OOM))
    assert (counts(story), story.exception.text) == ([("cuda_out_of_memory", 1)], OOM)


def test_a_clients_new_line_is_no_stop():
    lines = record("Using x", STOP.partition("] ")[2], process="APIServer pid=1", file="utils.py:370", level="WARNING")
    assert not story_of(lines).ended_in_order


def test_a_clients_new_line_in_vllms_json_is_no_message():
    assert story_of([vllm_json(f"for request x\n{OOM}", "EngineCore", 9, logger="vllm.v1.core")]).messages == ()


STEPS = "(APIServer pid=1) INFO 06-05 01:45:10 [loggers.py:259] Engine 000: Avg prompt throughput: 1.0 tokens/s"
ACCESS = '(APIServer pid=1) INFO:     10.0.0.1:5000 - "GET /health HTTP/1.1" 200 OK'
PRINTED = "(APIServer pid=1) INFO:     Shutting down"


@pytest.mark.parametrize("serves", [STEPS, ACCESS])
@pytest.mark.parametrize("stop", [STOP, PRINTED])
def test_a_stop_that_serving_follows_is_none(stop, serves):
    assert not story_of([stop, serves]).ended_in_order
    assert story_of([stop, serves, PRINTED]).ended_in_order


STAMP = "(APIServer pid=1) {level} 06-05 01:45:02 "
TOLD = STAMP.format(level="INFO") + "[launcher.py:270] [shutdown] API server: stopping engine client"
FINDS_IT_DEAD = STAMP.format(level="ERROR") + "[async_llm.py:906] AsyncLLM output_handler failed."
CLOSES = STAMP.format(level="INFO") + "[launcher.py:304] [shutdown] API server: shutting down FastAPI HTTP server"
FAILS = 'INFO:     10.0.0.1:0 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'


def test_a_server_that_finds_the_engine_dead_that_it_has_ended_was_told_to_end():
    """Word by word as vLLM 0.32.0 that is evicted under load: requests in flight are answered before it closes."""
    assert story_of([STOP, TOLD, FINDS_IT_DEAD, FAILS, FAILS, CLOSES, PRINTED]).ended_in_order
    assert not story_of([FINDS_IT_DEAD, FAILS, STOP, TOLD, CLOSES, PRINTED]).ended_in_order


@pytest.mark.parametrize("serves", [ACCESS, FAILS])
@pytest.mark.parametrize("closes", [CLOSES, PRINTED])
def test_what_a_closed_server_still_answers_takes_no_stop_back(closes, serves):
    """As vLLM 0.32.0 that is evicted under load, and killed before it says more."""
    assert story_of([STOP, closes, serves, serves]).ended_in_order


@pytest.mark.parametrize("serves", [[STEPS], [ACCESS] * 300])
def test_an_engine_that_steps_after_it_closed_has_not_ended(serves):
    assert not story_of([STOP, CLOSES, *serves]).ended_in_order


def test_a_printed_stop_long_before_a_failure_excuses_none():
    assert not story_of([PRINTED, ACCESS, FINDS_IT_DEAD, FAILS, CLOSES, PRINTED]).ended_in_order


def test_a_stop_long_before_the_logs_end_is_none():
    assert not story_of([STOP, core("step").replace("06-04 13:43", "06-05 01:47")]).ended_in_order


def test_a_start_that_the_same_engine_serves_after_is_a_clients_words():
    begins = "(APIServer pid=1) INFO 06-05 01:45:00 [api_server.py:1] vLLM API server version 0.32.0"
    assert run_of([begins, STEPS, OOM], begins_ready=True) == [begins, STEPS, OOM]
    assert run_of([STEPS, begins, OOM], begins_ready=True) == [STEPS]
