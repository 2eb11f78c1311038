"""The engine's log: its end, the known messages in it, and nothing else of it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from highwater.diagnose.log.messages import KNOWN, merged
from highwater.diagnose.log.reader import TAIL_BYTES, read_tail
from highwater.diagnose.log.record import MAX_LINE_LENGTH
from highwater.process.untrusted import plain
from tests.unit.diagnose.log.prefixes import match

FORMS = tomllib.loads(Path(__file__).with_name("known_lines.toml").read_text(encoding="utf-8"))
LINES = {name: forms[0] for name, forms in FORMS.items()}
HARMLESS = [
    "",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "(raylet) node_manager.cc:3069: 0 Workers (tasks / actors) killed due to memory pressure (OOM), 2 Workers crashed",
    "KeyError: 'std::bad_alloc'",
    "INFO 11-21 14:22:33 Engine 000: Avg prompt throughput: 207001.0 tokens/s",
    "INFO: 127.0.0.1:52000 - POST /v1/chat/completions HTTP/1.1 200 OK",
    "Graph capturing finished in 12 secs, took 0.30 GiB",
    "model_0004 loaded",
    # What a client wrote into a prompt is nobody's evidence.
    "INFO [logger.py:39] Received request cmpl-1: prompt: 'NPU out of memory', params: None",
    "INFO [logger.py:38] Request cmpl-1 details: prompt: 'Encoder cache miss CUDA out of memory', prompt_token_ids: []",
    "INFO [async_llm.py:1] Added request chatcmpl-1: CUDA out of memory",
    "INFO 10-22 09:43:49 [async_llm.py:1] CUDA out of memory",
    '(APIServer pid=1) INFO:     10.0.0.1:1 - "POST /v1/completions?x=cuda%20out%20of%20memory HTTP/1.1" 200 OK',
    "ERROR [serving_chat.py:1] Error in preprocessing prompt inputs: ValueError: my prompt says CUDA out of memory",
    "(APIServer pid=1) ERROR 10-22 09:43:49 [serving_chat.py:200] RuntimeError: CUDA out of memory",
    "(APIServer pid=1) NPU out of memory",
    "INFO:     NPU out of memory",
    "\x1b[0;36m(APIServer pid=1)\x1b[0;0m ERROR 11-22 05:34:05 [serving_chat.py:2] RuntimeError: CUDA out of memory",
    "ValueError: CUDA out of memory is what the client wrote",
    "the words NPU out of memory within a line",
    "ERROR 11-22 05:32:10 [MainProcess pid=1] [serving_chat.py:2] RuntimeError: CUDA out of memory",
    "ERROR 11-22 05:32:10 [ApiServer_0 pid=1] [serving_chat.py:2] RuntimeError: CUDA out of memory",
    "(EngineCore pid=9) INFO 10-22 09:43:49 [gpu_worker.py:360] Available KV cache memory: 44.30 GiB",
]


@pytest.mark.parametrize("name", [known.name for known in KNOWN])
def test_every_known_message_is_found(name):
    (message,) = match([*HARMLESS, LINES[name], *HARMLESS])
    assert (message.name, message.count, message.lines) == (name, 1, (LINES[name],))
    assert message.meaning.endswith(".")
    assert message.advice or message.name == "engine_start_failed"


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, forms in FORMS.items() for line in forms[1:]])
def test_a_message_is_found_in_its_other_forms(name, line):
    assert [message.name for message in match([line])] == [name]


def test_advice_begins_with_the_setting_that_the_message_names():
    (message,) = match([LINES["sampler_warm_up_out_of_memory"]])
    assert message.advice[0].setting == "--max-num-seqs"


@pytest.mark.parametrize("line", HARMLESS)
def test_other_lines_are_nobodys(line):
    assert match([line]) == ()


def test_case_does_not_matter():
    assert [message.name for message in match([LINES["encoder_cache_miss"].upper()])] == ["encoder_cache_miss"]


def test_causes_come_before_consequences():
    assert [message.name for message in match(reversed(LINES.values()))] == [known.name for known in KNOWN]


def test_of_many_lines_the_first_ones_and_the_last_are_kept():
    (message,) = match([f"Encoder cache miss for {number}" for number in range(50)])
    assert message.count == 50
    assert [line.split()[-1] for line in message.lines] == ["0", "1", "49"]


def test_a_line_is_cut_and_made_plain():
    (message,) = match(["Encoder cache miss \x1b[31m\x1b[0m \x07\x00\u202e<script>" + "y" * 5000])
    (line,) = message.lines
    assert line.startswith("Encoder cache miss")
    assert len(line) <= MAX_LINE_LENGTH + 1
    assert line.isprintable()


def test_messages_that_came_later_are_added():
    before, after = match([LINES["engine_dead"]]), match([LINES["engine_dead"]] * 3 + [LINES["npu_out_of_memory"]])
    both = merged(before, after)
    assert [(message.name, message.count) for message in both] == [("npu_out_of_memory", 1), ("engine_dead", 1)]


# --- the file ---


def test_the_end_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "engine.log"
    log.write_bytes(b"NPU out of memory\n" + b"a line\n" * 400_000 + LINES["engine_dead"].encode() + b"\n")
    lines, problem, is_cut = read_tail(log)
    assert (problem, is_cut) == (None, True)
    assert set(lines) == {"a line", LINES["engine_dead"]}
    assert sum(len(line) + 1 for line in lines) <= TAIL_BYTES + 1
    assert [message.name for message in match(lines)] == ["engine_dead"]


def test_a_short_log_is_read_whole(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("Encoder cache miss")
    assert read_tail(log) == (["Encoder cache miss"], None, False)


def test_one_endless_line_is_a_line(tmp_path):
    log = tmp_path / "engine.log"
    log.write_bytes(b"\r50%" * 1_000_000)
    assert read_tail(log) == ([], None, True)


def test_bytes_that_are_no_text_are_read_all_the_same(tmp_path):
    log = tmp_path / "engine.log"
    log.write_bytes(bytes(range(256)) + b"\nEncoder cache miss \xff\xfe\n")
    (message,) = match(read_tail(log)[0])
    assert message.lines[0].isprintable()


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real.log").write_text("Encoder cache miss")
    (tmp_path / "engine.log").symlink_to("real.log")
    assert read_tail(tmp_path / "engine.log") == (["Encoder cache miss"], None, False)


def test_what_cannot_be_read_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, why in [("none", "no such file"), ("pipe", "is not a file"), (".", "is not a file")]:
        lines, problem, _ = read_tail(tmp_path / name)
        assert lines == []
        assert why in problem
        assert problem.startswith("engine_log: ")


# --- plain text ---


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"),
        ("a\nb\rc\td\x00e", "a b c d e"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "]0;title after"),
        ("\u202eright to left\u2066", "right to left"),
        ("half \ud800 of a letter", "half   of a letter"),
        ("日本語 é", "日本語 é"),
        ("x" * 600, "x" * 499 + "…"),
        ("x" * 100_000, "x" * 499 + "…"),
        ("\x1b[31m" * 1000 + "deep", "…"),
    ],
)
def test_foreign_text_becomes_one_plain_line(given, shown):
    assert plain(given) == shown


CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    "lines",
    [
        [
            "2026-11-21T14:32:33.1Z stdout P INFO 11-21 14:32:33 [logger.py:39] Received request: prompt: 'aaa",
            f"2026-11-21T14:32:33.1Z stdout P {CUDA}",
            f"2026-11-21T14:32:33.1Z stdout F {CUDA}",
        ],
        [
            f'{{"log":"Received request: prompt: {"a" * 16384}","stream":"stderr","time":"2026-11-21T14:32:33.1Z"}}',
            f'{{"log":"{CUDA}\\n","stream":"stderr","time":"2026-11-21T14:32:33.1Z"}}',
        ],
    ],
    ids=["containerd", "docker"],
)
def test_a_piece_of_a_line_that_was_cut_is_no_message(tmp_path, lines):
    """Container runtimes cut at 16 KiB: what stands at a piece's beginning may be a client's prompt."""
    log = tmp_path / "engine.log"
    log.write_text("\n".join(lines) + "\n")
    assert match(read_tail(log)[0]) == ()
    whole = lines[-1]  # the same line, with none before it
    log.write_text(whole + "\n")
    assert [message.name for message in match(read_tail(log)[0])] == ["cuda_out_of_memory"]


def test_a_collectors_json_need_not_have_the_lines_end(tmp_path):
    """Only Docker's long ones are pieces."""
    log = tmp_path / "engine.log"
    log.write_text(f'{{"log":"a","stream":"stderr"}}\n{{"log":"{CUDA}","stream":"stderr"}}\n')
    assert [message.name for message in match(read_tail(log)[0])] == ["cuda_out_of_memory"]
