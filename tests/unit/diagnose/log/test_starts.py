"""Starts that fail, as the engine's log tells them: each once, wherever the log goes on."""

from __future__ import annotations

import os

import pytest

from highwater.diagnose.log.messages import KNOWN, recognized
from highwater.diagnose.log.reader import LOOK_BYTES, FollowedLog, Reader
from highwater.diagnose.log.starts import EngineLog, header_of, says_ready
from tests.unit.diagnose.log.prefixes import PREFIXES, parse, run_of, vllm_json

# As real engines wrote them: vLLM 0.32.0 and, in colours, 0.12.0.
LOGO = "(APIServer pid={pid}) INFO 11-22 05:31:49 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0"
ARGS = "(APIServer pid={pid}) INFO 11-22 05:31:49 [api_utils.py:286] non-default args: {{'host': '127.0.0.1'}}"
CORE = (
    "(EngineCore pid=7) INFO 11-22 05:31:58 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model=m"
)
LISTENS = "(APIServer pid=7) INFO 11-22 05:32:52 [entry.py:140] Starting vLLM server on http://127.0.0.1:35489"
NO_ROOM = (
    "(EngineCore pid=7) ERROR 11-22 05:32:10 [core.py:1510] ValueError: No available memory for the cache blocks. Try "
    "increasing `gpu_memory_utilization` when initializing the engine"
)
NO_ROOM_TEXT = "ValueError: No available memory for the cache blocks."
FAILED = "(EngineCore pid=7) ERROR 11-22 05:32:10 [core.py:1510] EngineCore failed to start."
WORKER = (
    "(EngineCore pid=7) ERROR 11-22 05:32:13 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly "
    "(exit code: None), shutting down executor."
)
ENDED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
WARM_UP = (
    "(VllmWorker rank=7 pid=8) ERROR 03-16 06:12:38 [multiproc_executor.py:375] RuntimeError: CUDA out of memory "
    "occurred when warming up sampler with 256 dummy requests."
)
OOM = "(EngineCore pid=7) ERROR 11-22 06:00:00 [core.py:1512] torch.OutOfMemoryError: CUDA out of memory. Tried to"
REFUSED = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
WAITS = "(EngineCore pid=7) INFO [shm_broadcast.py:466] No available shared memory broadcast block found in 60 s"
OLD = "\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO 11-22 05:33:43 "
OLD_VERSION = OLD + "[api_server.py:1772] vLLM API server version 0.12.0"
OLD_ARGS = OLD + "[utils.py:253] non-default args: {'host': '127.0.0.1'}"
OLD_CORE = (
    "\x1b[0;36m(EngineCore_DP{n} pid=7)\x1b[0;0m INFO 11-22 05:34:02 [core.py:93] Initializing a V1 LLM engine "
    "(v0.12.0) with config: model='m'"
)
OLD_LISTENS = OLD + "[api_server.py:1847] Starting vLLM API server 0 on http://127.0.0.1:33733"


FAILS = "(EngineCore pid=7) ERROR 11-22 05:32:08 [core.py:1510] "


def begins(pid: int = 1) -> list[str]:
    """What a start writes first; of another process another."""
    return [LOGO.format(pid=pid), ARGS.format(pid=pid), CORE]


NO_ROOM_START = [FAILED, NO_ROOM, WORKER, ENDED]
NO_ROOM_NAMES = ["no_room_for_kv_cache", "worker_died", "engine_start_failed"]


class Watched:
    """A log that a test writes, and what is made of it."""

    def __init__(self, path) -> None:
        self.path, self.now = path, 0.0
        self.watch = EngineLog(path)

    def write(self, *lines: str) -> None:
        with self.path.open("a") as log:
            log.writelines(f"{line}\n" for line in lines)

    def look(self, seconds: float = 0.0) -> list[list[str]]:
        """The names of the messages of each start that failed."""
        self.now += seconds
        return [[message.name for message in start.story.messages] for start in self.watch.look(self.now)]


@pytest.fixture
def log(tmp_path):
    made = Watched(tmp_path / "engine.log")
    yield made
    made.watch.close()


# --- which starts ---


def test_a_start_that_fails_is_told_once_when_its_last_lines_are_there(log):
    log.write(*begins(), FAILED)
    assert (log.look(), log.look(4.9)) == ([], [])
    log.write(NO_ROOM, WORKER, ENDED)
    assert log.look(0.2) == [NO_ROOM_NAMES]
    log.write(ENDED)
    assert (log.look(10.0), log.look(3600.0)) == ([], [])


def test_a_start_that_gets_ready_has_not_failed(log):
    log.write(*begins(), OOM, LISTENS, "INFO:     Application startup complete.", OOM, WORKER)
    assert (log.look(), log.look(60.0)) == ([], [])


def test_each_restart_is_told_once(log):
    log.write(*begins(1), *NO_ROOM_START)
    assert log.look(5.0) == []
    assert log.look(5.0) == [NO_ROOM_NAMES]
    log.write(*begins(2), *NO_ROOM_START)
    assert log.look(1.0) == []
    log.write(*begins(3), *NO_ROOM_START)
    assert log.look(1.0) == [NO_ROOM_NAMES]
    log.write(*begins(4))
    assert log.look(1.0) == [NO_ROOM_NAMES]
    assert log.look(9.0) == []


def test_restarts_between_two_looks_are_all_told(log):
    log.look()
    log.write(*begins(1), *NO_ROOM_START, *begins(2), *NO_ROOM_START, *begins(3))
    assert log.look() == [NO_ROOM_NAMES] * 2


def test_two_starts_have_two_identities(log):
    log.write(*begins(1), *NO_ROOM_START)
    first = log.watch.look(0.0, at_once=True)
    again = EngineLog(log.path)
    assert [start.id for start in again.look(0.0, at_once=True)] == [first[0].id]
    again.close()
    log.write(*begins(2), *NO_ROOM_START)
    assert log.watch.look(0.0, at_once=True)[0].id != first[0].id


def test_of_what_was_there_before_only_the_last_start_counts(log):
    log.write(*begins(1), WARM_UP, ENDED, *begins(2), *NO_ROOM_START)
    log.look()
    assert log.look(5.0) == [NO_ROOM_NAMES]


def test_a_start_without_a_last_word_is_told_after_half_a_minute_of_silence(log):
    log.write(*begins(), WARM_UP)
    log.look()
    assert (log.look(29.0), log.look(2.0)) == ([], [["sampler_warm_up_out_of_memory"]])


def test_a_long_wait_is_no_failure(log):
    """Compilation takes minutes, and vLLM says so once a minute."""
    log.write(*begins(), WAITS)
    log.look()
    assert log.look(600.0) == []


def test_a_configuration_that_is_refused_fails_a_start(log):
    log.write(*begins()[:2], REFUSED)
    log.look()
    assert log.look(31.0) == [["configuration_refused"]]


def test_a_crash_loop_of_033_before_its_engine_core_is_told_each_time(log):
    """Its first lines come from another file than those of 0.32."""
    log.look()
    for pid in (1, 2, 3):
        log.write(*(line.replace("api_utils.py", "startup.py") for line in begins(pid)[:2]), REFUSED)
    assert (log.look(), log.look(31.0)) == ([["configuration_refused"]] * 2, [["configuration_refused"]])


TRACE = "Traceback (most recent call last):"
SCRIPT = '  File "/usr/local/bin/vllm", line 10, in <module>'
NO_FILE = "OSError: We couldn't connect to 'https://huggingface.co' to load the files"


def told_of(starts) -> list[str]:
    """The exception of each start that failed."""
    return [start.story.exception.text if start.story.exception else "" for start in starts]


@pytest.mark.parametrize("prefix", ["", "(APIServer pid=1) "])
@pytest.mark.parametrize(
    "frame",
    [
        SCRIPT,
        '  File "<frozen runpy>", line 198, in _run_module_as_main',
        '  File "/usr/lib/python3.12/multiprocessing/process.py", line 314, in _bootstrap',
        '  File "/opt/dist-packages/vllm/entrypoints/openai/api_server.py", line 9, in <module>',
    ],
)
def test_an_exception_that_nothing_catches_ends_a_start(log, prefix, frame):
    """Before an API server listens no client has spoken, so that its exceptions count."""
    log.look()
    log.write(*begins()[:2], *(f"{prefix}{line}" for line in (TRACE, frame, "    main()", NO_FILE)))
    log.look()
    assert told_of(log.watch.look(5.0)) == [NO_FILE]


@pytest.mark.parametrize(
    "lines",
    [
        [f"(APIServer pid=1) ERROR 11-22 05:31:51 [registry.py:5] {line}" for line in (TRACE, SCRIPT, NO_FILE)],
        [TRACE, '  File "/x/site-packages/flashinfer/jit.py", line 3, in <module>', "ImportError: no jit"],
        [
            "(EngineCore pid=7) " + TRACE,
            '(EngineCore pid=7)   File "/x/y.py", line 3, in f',
            "(EngineCore pid=7) OSError: x",
        ],
    ],
)
def test_an_exception_that_a_start_lives_through_ends_none(log, lines):
    log.look()
    log.write(*begins()[:2], *lines, CORE)
    assert (log.look(), log.look(1200.0)) == ([], [])
    log.write(LISTENS, *begins())
    assert log.look(60.0) == []


def test_an_exception_that_is_the_last_word_is_told_after_long_silence(log):
    log.look()
    log.write(*begins()[:2], TRACE, '  File "/x/tokenizer.py", line 237, in get_tokenizer', "Exception: no variant")
    log.look()
    assert log.look(599.0) == []
    assert told_of(log.watch.look(600.0)) == ["Exception: no variant"]


def test_vllm_that_cannot_be_imported_is_a_start_that_failed(log):
    crash = [TRACE, SCRIPT, "ImportError: libcudart.so.13: cannot open shared object file"]
    log.look()
    log.write(*crash)
    log.look()
    assert told_of(log.watch.look(5.0)) == crash[2:]
    log.write(*crash)
    log.look(60.0)
    assert log.look(5.0) == [[]]
    log.watch.begin_life()
    log.write(*crash)
    assert (log.look(), log.look(5.0)) == ([], [])


def test_two_imports_that_fail_alike_are_two_starts(log):
    crash = [TRACE, SCRIPT, "ImportError: libcudart.so.13: cannot open shared object file"]
    log.look()
    ids = set()
    for _ in range(3):
        log.write(*crash)
        log.look(60.0)
        ids |= {start.id for start in log.watch.look(log.now + 5.0)}
    assert len(ids) == 3


def test_an_import_that_fails_before_the_last_one_was_told_is_another_start(log):
    crash = [TRACE, SCRIPT, "ImportError: libcudart.so.13: cannot open shared object file"]
    log.look()
    for _ in range(3):
        log.write(*crash)
        log.look(60.0)
    assert log.watch._starts.number == 3


@pytest.mark.parametrize("level", ["WARNING", "INFO", "DEBUG"])
def test_what_a_start_warns_of_is_no_failure(log, level):
    log.look()
    log.write(*begins(), NO_ROOM.replace("ERROR", level))
    assert (log.look(), log.look(3600.0)) == ([], [])


def test_a_start_that_writes_on_has_not_failed(log):
    log.look()
    log.write(*begins(), NO_ROOM)
    for _ in range(10):
        log.write("Loading safetensors checkpoint shards:  50%")
        assert log.look(20.0) == []
    log.write(LISTENS)
    assert log.look(3600.0) == []


def test_what_an_earlier_engine_wrote_last_is_no_start(log):
    log.write(TRACE, SCRIPT, NO_FILE)
    assert (log.look(), log.look(60.0)) == ([], [])


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve: error: unrecognized arguments: --gpu-mem-util 0.9",
        "api_server.py: error: argument --tensor-parallel-size/-tp: invalid int value: 'two'",
        "python3 -m vllm.entrypoints.openai.api_server: error: the following arguments are required: --model",
    ],
)
@pytest.mark.parametrize("prefix", ["", "vllm-1  | "])
def test_an_option_that_is_no_option_fails_a_start(log, line, prefix):
    """Python's argparse writes it before anything else."""
    log.look()
    log.write(f"{prefix}usage: vllm serve [model_tag] [options]", prefix + line)
    log.look()
    assert log.look(30.0) == [["configuration_refused"]]


def test_a_client_refuses_no_configuration(log):
    log.watch.begin_life()
    log.write(f"(APIServer pid=1) {REFUSED}", "(APIServer pid=1) vllm serve: error: unrecognized arguments: x", WORKER)
    log.look()
    assert log.look(31.0) == []
    assert [message.name for message in log.watch.story(log.watch.since).messages] == ["worker_died"]


def test_a_log_that_begins_again_is_of_a_start_that_ended_without_a_word(log):
    log.look()
    log.write(*begins(1), *begins(2))
    assert log.look() == [[]]
    log.write(TRACE, SCRIPT, "KeyboardInterrupt: terminated", *begins(3))
    assert log.look() == []
    log.write(LISTENS, *begins(4))
    assert log.look() == []


def test_an_older_versions_colours_hide_nothing(log):
    """vLLM 0.12 colours its process's name in files, too; with data parallelism each engine core writes its line."""
    log.look()
    log.write(OLD_VERSION, OLD_ARGS, OLD_CORE.format(n=0), OLD_CORE.format(n=1), FAILED, ENDED, OLD_VERSION)
    assert log.look() == [["engine_start_failed"]]
    log.write(OLD_ARGS, OLD_CORE.format(n=0), OLD_LISTENS, OOM)
    assert (log.look(), log.look(60.0)) == ([], [])


def test_without_first_lines_the_messages_of_a_start_tell(log):
    """VLLM_LOGGING_LEVEL=WARNING. What an engine that ran may write, too, tells no start."""
    log.write(OOM, WORKER)
    log.look()
    assert log.look(60.0) == []
    log.write(FAILED, NO_ROOM)
    assert (log.look(), log.look(5.0)) == ([], [["no_room_for_kv_cache", "engine_start_failed"]])


def test_the_charts_own_log_is_followed(log):
    """It has Python's names of the processes, and bare lines of tracebacks."""
    log.look()
    log.write(
        "INFO 11-22 05:31:49 [MainProcess pid=1] [api_utils.py:286] non-default args: {}",
        "INFO 11-22 05:31:58 [EngineCore pid=7] [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: m",
        "ERROR 11-22 05:32:10 [EngineCore pid=7] [core.py:1510] EngineCore failed to start.",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "INFO 11-22 05:32:49 [MainProcess pid=1] [api_utils.py:286] non-default args: {}",
    )
    assert log.look() == [["no_room_for_kv_cache", "engine_start_failed"]]
    log.write("INFO 11-22 05:33:49 [MainProcess pid=1] [entry.py:140] Starting vLLM server on http://0.0.0.0:8000")
    log.write("ERROR 11-22 05:32:10 [EngineCore pid=7] [core.py:1510] EngineCore encountered a fatal error.")
    assert (log.look(), log.look(60.0)) == ([], [])


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_starts_are_followed_behind_any_prefix(log, prefix):
    """Where one begins, fails, and gets ready; 0.33 logs the first lines from a file of its own."""
    newer = [line.replace("api_utils.py", "startup.py") for line in begins(2)]
    log.look()
    log.write(*(prefix + line for line in [*begins(1), *NO_ROOM_START, *newer, *NO_ROOM_START, *newer]))
    assert log.look() == [NO_ROOM_NAMES] * 2
    log.write(*(prefix + line for line in [*NO_ROOM_START, *newer[:1], LISTENS, OOM]))
    assert (log.look(), log.look(60.0)) == ([NO_ROOM_NAMES], [])


def test_starts_are_followed_in_vllms_json(log):
    log.look()
    version = vllm_json("vLLM server version 0.33.0", "APIServer", 1, logger="vllm.entrypoints.common.startup")
    failed = vllm_json(
        "EngineCore failed to start.", "EngineCore", 7, logger="vllm.v1.engine.core", exc_info=NO_ROOM_TEXT
    )
    ready = vllm_json(
        "Starting vLLM server on http://a", "APIServer", 1, logger="vllm.entrypoints.launchers.api_server.entry"
    )
    log.write(version, failed, version.replace("58,104", "59,104"), failed, version.replace("58,104", "59,200"))
    first, second = log.watch.look(0.0, at_once=True)
    assert first.id != second.id
    assert [[message.name for message in start.story.messages] for start in (first, second)] == [
        ["no_room_for_kv_cache", "engine_start_failed"]
    ] * 2
    log.write(ready, OOM)
    assert (log.look(), log.look(60.0)) == ([], [])


def test_a_failed_start_has_a_whole_story(log):
    figures = (
        "(NPU 0; 60.97 GiB total capacity; 10.24 GiB already allocated; 10.24 GiB current active; 19.52 MiB free; "
        "10.65 GiB reserved in total by PyTorch)"
    )
    said = f"RuntimeError: NPU out of memory. Tried to allocate 22.00 MiB {figures}"
    log.write(*begins(), f"(Worker_TP0 pid=5) ERROR 11-22 05:32:09 [multiproc_executor.py:9] {said}", FAILED)
    (start,) = log.watch.look(0.0, at_once=True)
    assert (start.story.exception.text, [each.pid for each in start.story.failed]) == (said, [5])
    assert (start.story.lines, start.story.understood) == (5, 5)


def test_what_was_written_before_the_engine_was_ready_is_no_news(log):
    log.write(FAILED, NO_ROOM)
    log.watch.begin_life()
    log.write(OOM, WORKER)
    assert (log.look(), log.look(60.0)) == ([], [])
    log.write(FAILED)
    log.look()
    assert log.look(5.0) == [["engine_start_failed"]]


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=1) INFO 11-22 05:31:49 [logger.py:39] non-default args: what a client wrote",
        "(APIServer pid=1) ERROR 11-22 05:31:49 [serving_chat.py:2] Starting vLLM server on http://a",
        "Starting vLLM server on http://a",
        "non-default args: {}",
        "Initializing a V1 LLM engine (v0.32.0)",
    ],
)
def test_a_clients_words_begin_nothing(line):
    (read,) = parse(line)
    assert (header_of(read), says_ready(read)) == (None, False)


@pytest.mark.parametrize("line", [LOGO, ARGS, LISTENS])
def test_a_clients_new_line_in_a_record_begins_nothing(line):
    """vLLM writes a record's head before each of its lines; the logo's own lines before its version are the logo's."""
    head, _, message = line.format(pid=1).partition("] ")
    _, second = recognized([f"{head}] Using summary of item rs_1", f"{head}] {message}"], Reader())
    assert (header_of(second[1][0].line), says_ready(second[1][0].line)) == (None, False)


def test_the_logos_version_begins_a_start():
    head, _, message = LOGO.format(pid=1).partition("] ")
    _, second = recognized([f"{head}]        █     █     █▄   ▄█", f"{head}] {message}"], Reader())
    assert header_of(second[1][0].line) == 1


def test_a_warning_begins_no_start():
    assert header_of(parse(ARGS.format(pid=1).replace("INFO", "WARNING"))[0]) is None


def test_what_only_a_start_writes_is_marked():
    marked = {known.name for known in KNOWN if known.at_start}
    assert marked >= {known.name for known in KNOWN if "refused" in known.title or "start" in known.title}


# --- the file ---


def test_a_log_that_is_turned_over_is_followed(log):
    log.write(*begins())
    log.look()
    log.write(FAILED)
    os.rename(log.path, log.path.with_suffix(".1"))
    log.write(NO_ROOM)
    assert (log.look(), log.look(5.0)) == ([], [["no_room_for_kv_cache", "engine_start_failed"]])


@pytest.mark.parametrize("more", [0, 100])
def test_a_log_that_is_cut_off_is_read_from_its_beginning(log, more):
    log.write("x" * 300, *begins(1))
    log.look()
    log.path.write_text("")
    log.write(*begins(2), *["a line that fills the log"] * more, *NO_ROOM_START)
    log.look()
    assert log.look(5.0) == [NO_ROOM_NAMES]


def test_a_log_that_comes_later_is_read(log):
    assert log.look() == []
    log.write(*begins(), *NO_ROOM_START)
    log.look()
    assert log.look(5.0) == [NO_ROOM_NAMES]
    log.path.unlink()
    assert log.look() == []
    log.path.mkdir()
    assert log.look() == []


def test_a_line_is_read_when_it_is_whole(log):
    log.write(*begins())
    log.look()
    with log.path.open("a") as file:
        file.write(FAILED[:60])
        file.flush()
        assert log.look(60.0) == []
        file.write(FAILED[60:] + "\n")
    log.look()
    assert log.look(5.0) == [["engine_start_failed"]]


def test_of_very_much_the_end_is_read(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(b"first\n" + b"a line\n" * (LOOK_BYTES // 7 + 10))
    followed = FollowedLog(path)
    lines = followed.new_lines()
    assert set(lines) == {"a line"}
    assert sum(len(line) + 1 for line in lines) <= LOOK_BYTES
    assert followed.new_lines() == []
    followed.close()


def test_lines_before_the_last_words_of_an_earlier_writer_are_read(tmp_path):
    """`tee` began the log anew while the one before it still wrote, at its own offset."""
    path = tmp_path / "engine.log"
    path.write_text("loading\n")
    followed, log = FollowedLog(path), EngineLog(path)
    with path.open("r+") as earlier:
        earlier.seek(20_000)
        earlier.write("last words\n")
    assert followed.new_lines() == ["loading"]
    log.begin_life()
    with path.open("r+") as now:
        now.seek(len("loading\n"))
        now.write(f"{OOM}\n")
    assert followed.new_lines() == [OOM]
    assert [message.name for message in log.story(log.since).messages] == ["cuda_out_of_memory"]
    followed.close()
    log.close()


def test_what_stands_after_a_log_that_was_cut_off_below_its_writer_is_read(tmp_path):
    path = tmp_path / "engine.log"
    with path.open("w") as writer:
        writer.seek(20_000)
        writer.write("INFO one\nINFO two\n")
    followed = FollowedLog(path)
    assert followed.new_lines() == ["INFO one", "INFO two"]
    followed.close()


# --- what an incident is told of the log ---


def test_of_an_engine_that_ran_no_other_starts_lines_are_looked_at():
    lines = [NO_ROOM, *begins(1), LISTENS, OOM, *begins(2), *NO_ROOM_START]
    assert run_of(lines, begins_ready=False) == lines[1:6]
    assert run_of(lines[5:], begins_ready=True) == [OOM]
    assert run_of([OOM, WORKER], begins_ready=False) == [OOM, WORKER]
