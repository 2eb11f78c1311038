"""What is concluded from the log's words, and from their absence: silence acquits nothing that was not understood."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from highwater.diagnose.case import of_incident
from highwater.diagnose.evidence import Evidence
from highwater.diagnose.finding import ADVICE, all_advice
from highwater.diagnose.incidents.diagnosis import advised, ended_in_order, memory_at_end, summarize
from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.incidents.store import IncidentStore
from highwater.diagnose.log.messages import KNOWN
from highwater.diagnose.log.story import NO_LOG, LogStory, QuotedException, story_of
from highwater.host.needs import ProcessorCaches
from highwater.host.past import Fill, HostFacts
from highwater.host.reading import HostReading
from highwater.host.report import OomKills
from highwater.http.text.incidents import incident_markdown
from highwater.model.engine import EngineStatus
from highwater.model.rank import Device, Launch
from tests.fakes.incident import AT, MIB, TOTAL, diagnosed, evidence, incident, rank, reading, summarized, unknown
from tests.golden import golden
from tests.unit.diagnose.incidents.test_diagnosis import FULL, GREW, KILLED, headline

GOLDEN = Path(__file__).parents[1] / "golden" / "headlines.txt"
SHORT = "device memory was not short"
CORE = "(EngineCore pid=900) ERROR 09-02 08:04:02 [core.py:1512] "
WORKER = "(Worker_TP0 pid=4242) ERROR 09-02 08:04:02 [multiproc_executor.py:1020] "
TRACE = f"{WORKER}Traceback (most recent call last):"
ILLEGAL = f"{WORKER}torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
DEAD = f"{CORE}EngineCore encountered a fatal error."
CALM = "(EngineCore pid=900) INFO 09-02 08:04:01 [loggers.py:127] Engine 000: Avg prompt throughput: 1.0 tokens/s"
GONE = f"{CORE}Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down executor."
API = "(APIServer pid=19) ERROR 09-02 08:04:02 [async_llm.py:430] AsyncLLM output_handler failed."
PREFIXES = ["", "vllm-1  | ", "2026-09-02T08:04:02.123456789Z stderr F ", "[pod/qwen-0/vllm] "]


def said(given, log: LogStory) -> str:
    return summarized(given, log)


# --- silence ---


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_log_that_is_silent_and_understood_acquits_the_device(prefix):
    log = story_of([f"{prefix}{line}" for line in (GONE, API)])
    assert f"{SHORT} (every rank had at least 21.89 GiB free)" in said(evidence("died"), log)
    room = next(one for one in diagnosed(evidence("died"), log) if one.name == "device_had_room")
    assert room.text.endswith("the device's memory is not what ended it.")


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (NO_LOG, "what the engine's log says is not known: it has no line of this run"),
        (LogStory(problem="engine_log is not set"), "what the engine's log says is not known"),
        (
            story_of(["a line", "another", "", "of a form that nobody knows"]),
            "the engine's log was not understood: 3 lines, none of vLLM's form",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["died", "hung", "start_failed"])
def test_a_log_that_was_not_understood_acquits_nothing(log, words, kind):
    given = evidence(kind)
    summary = said(given, log)
    assert words in summary
    assert "not short" not in summary
    room = next(one for one in diagnosed(given, log) if one.name == "device_had_room")
    assert room.text.endswith("readings alone do not say that memory was enough.")


ACCESS = 'INFO:     127.0.0.1:40412 - "GET /v1/models?q=out%20of%20memory HTTP/1.1" 200 OK'
SHORTAGES = [
    "2026-09-02 08:04:02,118 - vllm.worker - ERROR - torch.OutOfMemoryError: CUDA out of memory",
    "2026-09-02 08:04:02.118 | ERROR    | vllm.worker:step:120 - torch.OutOfMemoryError: CUDA out of memory",
    "E0902 08:04:02.118204 4242 worker.cc:120] CUDA out of memory",
    "ERROR:root:torch.OutOfMemoryError: CUDA out of memory",
    "ERROR: step failed: torch.OutOfMemoryError: CUDA out of memory",
    json.dumps({"ts": 1, "lvl": "error", "what": "torch.OutOfMemoryError: CUDA out of memory"}),
    "[PID: 4242] 2026-09-02-08:04:02.118.204 the device has no resource left, tried to allocate",
    "(Worker_TP0 pid=4242) 2026-09-02 08:04:02,118 - ERROR - torch.OutOfMemoryError: CUDA out of memory",
]


@pytest.mark.parametrize("line", SHORTAGES)
def test_an_access_line_makes_no_log_understood(line):
    """It is uvicorn's, in a log of which no other form is known."""
    calm = line.replace("ERROR", "INFO").partition("torch.")[0] or "calm"
    log = story_of([*[calm] * 500, ACCESS, line])
    assert not log.was_understood
    assert SHORT not in said(evidence("died"), log)
    assert not log.messages


@pytest.mark.parametrize("line", SHORTAGES)
def test_a_line_of_another_form_that_may_be_of_memory_acquits_nothing(line):
    """Beside vLLM's own records: nobody knows what it says, and it accuses nothing either."""
    log = story_of([*[GONE] * 500, line])
    assert (log.understood >= 500, log.doubtful, log.was_understood) == (True, 1, False)
    assert SHORT not in said(evidence("died"), log)
    words = "not wholly understood: 501 lines, 500 of vLLM's form, 1 of another may be of memory"
    assert line.startswith("(") or words in said(evidence("died"), story_of([*[CALM] * 500, line]))


@pytest.mark.parametrize(
    "line",
    [
        ACCESS,
        "(APIServer pid=19) ValueError: out of memory, says a client",
        '  File "/x/vllm/v1/worker/gpu_worker.py", line 5, in determine_available_memory',
        "[rank0]:[W902 08:04:02.780240321 ProcessGroupNCCL.cpp:1479] Warning: WARNING: destroy_process_group() was not "
        "called before program exit, which can leak resources.",
        "/x/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked "
        "shared_memory objects to clean up at shutdown",
        "+ exec vllm serve /models/m --gpu-memory-utilization 0.9",
        "frame #3: c10::cuda::CUDACachingAllocator::raw_alloc(unsigned long) + 0x1f (0x7f in libc10_cuda.so)",
    ],
)
def test_a_line_of_no_shortage_stands_in_no_acquittals_way(line):
    assert SHORT in said(evidence("died"), story_of([GONE, API, line]))


def test_a_log_is_understood_by_a_tenth_of_its_lines():
    other = "a line in a form that nobody knows"
    assert story_of([GONE, *[other] * 9, *[ACCESS] * 50]).was_understood
    assert not story_of([GONE, *[other] * 10]).was_understood
    assert not story_of([ACCESS] * 3).was_understood


@pytest.mark.parametrize(
    "raised",
    [
        "RuntimeError: VX0099: the ring's memory could not be had",
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::RayWorkerWrapper.execute_method()",
        "SomeError: no space left for the buffer",
        "VendorError: out of device resources",
    ],
)
def test_an_exception_that_may_be_of_memory_is_no_alibi(raised):
    log = story_of([TRACE, f"{WORKER}{raised}", DEAD])
    assert "not short" not in said(evidence("died"), log)
    assert "21.89 GiB free" in said(evidence("died"), log)


def test_an_illegal_access_is_no_shortage():
    assert SHORT in said(evidence("died"), story_of([TRACE, ILLEGAL, DEAD]))


@pytest.mark.parametrize(
    ("age", "words"),
    [(2, ""), (59, ""), (61, ", 1 min 1 s before"), (600, ", 10 min before"), (36_000, ", 10 h before")],
)
def test_an_old_reading_acquits_nothing(age, words):
    given = evidence("died", rank(reading(taken_at=AT - age)))
    told = said(given, story_of([GONE]))
    assert f"every rank had at least 21.89 GiB free{words}" in told
    assert (SHORT in told) is (words == "")
    room = next(one for one in diagnosed(given, story_of([GONE])) if one.name == "device_had_room")
    assert ("What was free at the end is not known" in room.text) is (words != "")


def test_readings_of_some_ranks_acquit_nothing():
    seven = [rank(reading(number)) for number in range(7)]
    eight = tuple(reading(number) for number in range(8))
    for given in (replace(evidence("died", *seven), ranks_expected=8), evidence("died", *seven, baseline=eight)):
        told = said(given, story_of([GONE]))
        assert "7 of 8 ranks had at least 21.89 GiB free" in told
        assert "not short" not in told
    assert SHORT in said(replace(evidence("died", *seven), ranks_expected=7), story_of([GONE]))


def test_of_an_engine_of_unknown_size_only_the_ranks_that_were_read_had_room():
    given = replace(evidence("start_failed", rank(reading())), ranks_expected=None)
    told = said(given, story_of([GONE]))
    assert "every rank that was read had at least 21.89 GiB free" in told
    assert "not short" not in told


UNTOLD = "which lines of the engine's log are of this start is not known"


@pytest.mark.parametrize("log", [LogStory(problem=UNTOLD), NO_LOG, story_of(["hello", "there", "friend"])])
@pytest.mark.parametrize("kind", ["died", "start_failed"])
def test_a_log_that_is_set_is_not_said_to_be_unread(kind, log):
    told = [one.text for one in diagnosed(evidence(kind), log)]
    assert "was not read" not in " ".join(told)
    assert all("engine_log" not in advice.change for one in diagnosed(evidence(kind), log) for advice in one.advice)


def test_on_cpu_the_device_is_the_host():
    given, log = evidence("died", rank(reading(device=Device(type="cpu")))), story_of([DEAD])
    assert "not short" not in said(given, log)
    assert "; the host had at least 21.89 GiB free" in said(given, log)
    assert memory_at_end(of_incident(given, log), diagnosed(given, log)) == "unknown"


@pytest.mark.parametrize("process", ["Worker_TP0 pid=4242", "Worker_TP3 pid=7", "EngineCore pid=900"])
def test_after_a_message_of_memory_no_device_had_room(process):
    log = story_of(
        [f"({process}) ERROR 09-02 08:04:02 [core.py:1512] torch.OutOfMemoryError: CUDA out of memory.", DEAD]
    )
    findings = diagnosed(evidence("died"), log)
    assert "device_had_room" not in {one.name for one in findings}
    assert "MiB free" not in summarize(of_incident(evidence("died"), log), findings)


@pytest.mark.parametrize(
    ("line", "which"),
    [
        ("RuntimeError: Triton Error [CUDA]: out of memory", "device"),
        ("torch._inductor.exc.InductorError: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "device"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "unclear"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "unclear"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "unclear"),
        ("RuntimeError: CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED", "unclear"),
        ("RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "unclear"),
        ("RuntimeError: CUDA runtime error (2)", "unclear"),
        ("[autotuner] CUDA OOM, retrying with fewer tokens", "unclear"),
        ("OSError: [Errno 12] Cannot allocate memory", "host"),
        ("OSError: [Errno 28] No space left on device: '/psm_12'", "shm"),
        ("OSError: [Errno 28] No space left on device", "unclear"),
    ],
)
def test_a_message_says_which_memory_was_short(line, which):
    log = story_of([f"{CORE}{line}"])
    assert {known.of_memory for known in KNOWN if known.name == log.messages[0].name} == {which}
    assert "not short" not in said(evidence("died"), log)
    room = [one.text for one in diagnosed(evidence("died"), log) if one.name == "device_had_room"]
    assert len(room) == (which != "device")
    assert not any("is not what ended it" in text for text in room)


# --- the headline ---


def headlines() -> dict[str, str]:
    """Each by what it is about."""
    nothing = Evidence(kind="hung", at=AT, engine=EngineStatus(url="http://engine", state="gone"))
    full = evidence("died", rank(reading(used=FULL)), reason="connection refused")
    kills = OomKills(count=1, where="counted in the group of rank 1")
    fill = Fill(at=AT - 3, used_bytes=2500 * MIB, whole_bytes=5000 * MIB, is_limited=True)
    host = HostFacts(reading=HostReading(taken_at=AT), fullest=fill, caches=ProcessorCaches(kind="unknown"))
    refused = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
    workspace = "NPU out of memory. NPUWorkspaceAllocator tried to allocate 180.00 MiB"
    silent = story_of([GONE, DEAD, f"{CORE}RuntimeError: cancelled", API])
    long_ago = story_of([TRACE, ILLEGAL, API.replace("08:04", "09:04")])
    nameless = LogStory(lines=1, understood=1, exception=QuotedException(process="", text="CustomError: x"))
    planned = reading(free_bytes=219 * MIB, used_bytes=TOTAL - 219 * MIB)
    died, as_full = evidence("died"), evidence("died", rank(planned), baseline=(planned,))
    return {
        "nothing is known": said(nothing, NO_LOG),
        "killed, with plenty of memory": headline(evidence("died", reason="connection refused", **GREW), KILLED),
        "ended, with plenty of memory": headline(evidence("died", **GREW), KILLED.replace("-9", "None")),
        "a message of memory": headline(evidence("died", **GREW), "RuntimeError: CUDA driver error: out of memory"),
        "a kill by the kernel": headline(evidence("died", oom_kills=kills), KILLED),
        "a start that was refused": headline(
            replace(evidence("start_failed"), ranks=()), refused, "EngineCore failed to start."
        ),
        "a hang in one step": headline(evidence("hung", rank(step_seconds=61.0), **GREW)),
        "a cause and its consequence": said(full, story_of(["EngineDeadError", workspace])),
        "silence, and host memory that nobody read": said(died, silent),
        "silence, and host memory that had room": said(evidence("died", host=host), silent),
        "an exception, on a device that is as full as planned": said(as_full, story_of([TRACE, ILLEGAL, DEAD, API])),
        "an exception, so that silence is no question": said(died, story_of([TRACE, ILLEGAL, GONE, API])),
        "an exception that the log does not show": said(
            died, story_of([f"{WORKER}WorkerProc hit an exception.", TRACE])
        ),
        "an exception of long ago": said(died, long_ago),
        "an exception of a process without a name": said(died, nameless),
        "a core that failed": said(died, story_of([DEAD])),
        "an API server that found its engine dead": said(died, story_of([API])),
    }


def test_the_headlines_are_the_golden_ones():
    text = "".join(f"# {name}\n{textwrap.fill(told, 118)}\n\n" for name, told in headlines().items())
    assert text == golden(GOLDEN, text)


# --- the last exception ---


def test_a_known_cause_needs_no_quote_in_the_summary():
    log = story_of([TRACE, f"{WORKER}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.", DEAD])
    assert "last exception" not in said(evidence("died"), log)
    assert log.exception is not None


async def test_an_incident_has_the_exception_as_plain_text(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text(f"{TRACE}\n{WORKER}CustomError: <b>\x1b[31m{'y' * 5000}\n{DEAD}\n")
    incidents = Incidents(IncidentStore(tmp_path), engine_log=log)
    headline, _ = await incidents.open_incident(evidence("died"))
    kept = await incidents.read(headline.id)
    assert kept.exception.text.startswith("CustomError: <b>")
    assert len(kept.exception.text) <= 500
    assert "\x1b" not in kept.exception.text + kept.summary
    assert "- **the last exception of Worker_TP0 (pid 4242)**" in incident_markdown(kept)
    incidents.close()


def test_an_incident_of_an_earlier_sidecar_has_no_exception(tmp_path):
    store = IncidentStore(tmp_path)
    store.write(incident(exception=QuotedException(process="Worker_TP0 pid=1", text="CustomError: x", pid=1)))
    (file,) = tmp_path.glob("*.json")
    assert store.read(file.stem).exception.pid == 1
    head, _, rest = file.read_text().partition("\n")
    older = json.loads(f"{{{rest}")
    assert older.pop("exception")["text"] == "CustomError: x"
    file.write_text(f"{head}\n{json.dumps(older)[1:]}\n")
    assert store.read(file.stem).exception is None


# --- a device that is full by plan ---


@pytest.mark.parametrize(
    ("free_at_ready", "free", "kind", "weight"),
    [
        (219, 219, "died", "clue"),
        (600, 219, "died", "likely"),
        (400, 219, "died", "clue"),
        (None, 219, "died", "clue"),
        (219, 219, "out_of_memory", "likely"),
        (9_000, 219, "hung", "clue"),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "npu", "cpu"])
def test_a_device_as_full_as_at_ready_is_no_likely_cause(free_at_ready, free, kind, weight, device):
    def with_free(mib):
        return reading(free_bytes=mib * MIB, used_bytes=TOTAL - mib * MIB, device=Device(type=device))

    baseline = () if free_at_ready is None else (with_free(free_at_ready),)
    findings = diagnosed(evidence(kind, rank(with_free(free)), baseline=baseline), story_of([DEAD]))
    full = next(one for one in findings if one.name == "device_full")
    assert full.weight == weight
    was_full = free_at_ready is not None and weight == "clue" and kind == "died"
    assert ("It was as full when the engine was ready" in full.text) is was_full
    assert (full.advice == ()) is was_full


def test_a_log_that_says_so_makes_a_full_device_likely():
    """A kernel that could not be loaded, on a device that is full by plan."""
    full = reading(free_bytes=951 * MIB, used_bytes=TOTAL - 951 * MIB)
    log = story_of([f"{WORKER}RuntimeError: Triton Error [CUDA]: out of memory", DEAD])
    given = evidence("died", rank(full), baseline=(full,))
    assert next(one for one in diagnosed(given, log) if one.name == "device_full").weight == "likely"
    settings = [
        advice.setting
        for message in advised(of_incident(given, log), diagnosed(given, log))
        for advice in message.advice
    ]
    assert settings[0] == "--gpu-memory-utilization"
    assert not any("expandable" in setting for setting in settings)


# --- advice ---


def settings_of(given, log: LogStory) -> list[str]:
    findings = diagnosed(given, log)
    of_messages = (advice for message in advised(of_incident(given, log), findings) for advice in message.advice)
    return [advice.setting for advice in (*of_messages, *all_advice(findings))]


GIVEN = (
    "(APIServer pid=1) INFO 11-28 10:31:49 [api_utils.py:286] non-default args: {'kv_cache_memory_bytes': 268435456}"
)
OOM = f"{WORKER}torch.OutOfMemoryError: CUDA out of memory."


@pytest.mark.parametrize("by", ["log", "worker", None])
def test_a_share_is_advised_only_where_it_counts(by):
    log = story_of([GIVEN, OOM] if by == "log" else [OOM])
    now = reading(free_bytes=951 * MIB, used_bytes=TOTAL - 951 * MIB, launch=Launch(kv_cache_given=by == "worker"))
    given = evidence("died", rank(now))
    messages = advised(of_incident(given, log), diagnosed(given, log))
    advice = [each for message in messages for each in message.advice] + [*all_advice(diagnosed(given, log))]
    settings = {each.setting for each in advice}
    assert ("--gpu-memory-utilization" in settings) is (by is None)
    assert ("--kv-cache-memory-bytes" in settings) is (by is not None)


def test_figures_of_another_machine_are_called_an_example():
    for each in ADVICE.values():
        for text in (each.change, each.cost):
            assert not re.search(r"\d+\.\d+ GiB|\d\d GiB|\d\d,\d{3}", text) or "For example" in text, text


@pytest.mark.parametrize("kind", ["died", "start_failed"])
def test_an_end_without_a_word_says_where_to_look(kind):
    for kills in (None, OomKills(count=0, where="the container's own")):
        found = all_advice(diagnosed(evidence(kind, rank(unknown()), oom_kills=kills)))
        assert {"last_state", "last_lines"} <= {name for name, each in ADVICE.items() if each in found}


def test_figures_replace_what_the_message_advises():
    line = (
        f"{CORE}torch.OutOfMemoryError: HIP out of memory. Tried to allocate 256.00 GiB. GPU 0 has a total capacity of "
        "15.98 GiB of which 8.07 GiB is free. Of the allocated memory 7.14 GiB is allocated by PyTorch, and 320.85 MiB "
        "is reserved by PyTorch but unallocated."
    )
    given = replace(evidence("start_failed"), ranks=())
    settings = settings_of(given, story_of([f"{CORE}EngineCore failed to start.", line]))
    assert settings[0] == "--mm-processor-kwargs, --limit-mm-per-prompt"
    assert not any("utilization" in setting or "ALLOC_CONF" in setting for setting in settings)


def test_a_restart_is_no_advice_for_a_start_that_fails_by_its_settings():
    given = replace(evidence("start_failed"), ranks=())
    assert "Restart the engine" not in settings_of(given, story_of([f"{CORE}EngineCore failed to start."]))
    shm = f"{CORE}RuntimeError: Insufficient space in /dev/shm for a region: 16384 MiB required, 7800 MiB free."
    settings = settings_of(given, story_of([f"{CORE}EngineCore failed to start.", shm, API]))
    assert settings == [
        "--shm-size (docker), an emptyDir with medium: Memory at /dev/shm (Kubernetes)",
        "ls -l /dev/shm",
    ]


def test_what_an_engine_lived_through_is_no_cause():
    miss = "(EngineCore pid=9) WARNING 09-02 00:55:35 [core.py:2012] Multi-modal cache miss for request cmpl-1 (mm"
    assert ended_in_order(evidence("died"), story_of([miss, *STOPS]))
    assert "drifted" not in said(evidence("died"), story_of([miss, GONE]))
    assert SHORT in said(evidence("died"), story_of([miss, GONE]))


# --- an orderly end ---

STOPS = [
    "(APIServer pid=1) INFO:     Shutting down",
    "(APIServer pid=1) INFO:     Application shutdown complete.",
    "(EngineCore pid=418) INFO 09-02 00:55:35 [core.py:1455] [shutdown] EngineCore: Shutdown complete",
]


def test_an_orderly_end_is_one_without_another_cause():
    assert ended_in_order(evidence("died"), story_of(STOPS))
    assert not ended_in_order(evidence("hung"), story_of(STOPS))
    assert not ended_in_order(evidence("died"), story_of([TRACE, ILLEGAL, *STOPS]))
    assert not ended_in_order(evidence("died"), story_of([DEAD]))
    assert not ended_in_order(evidence("died"), NO_LOG)
