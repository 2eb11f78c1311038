"""What a start's log measured, whoever kept the log, and what of it holds for another command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from highwater.explain.command_line import read_line
from highwater.terminal.plan.measured import read_measured
from kvplan import PlanError

GIB = 1 << 30
LINE = read_line(["vllm serve m -tp 2 --max-model-len 8192"])
BEGIN = (
    "(EngineCore pid=9) INFO 10-22 09:43:01 [core.py:134] Initializing a V1 LLM engine (v{version}) with config: "
    "model='m'"
)
ARGUMENTS = (
    "(APIServer pid=1) INFO 10-22 09:43:00 [utils.py:286] non-default args: {'model_tag': 'm',"
    " 'tensor_parallel_size': 2, 'gpu_memory_utilization': 0.9}"
)
FREE = (
    "Free memory on device (78.7/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27 GiB). Actual "
    "usage is "
)
END = " Replace gpu_memory_utilization config with `--kv-cache-memory=1` (53.0 GiB) to fit into requested memory"
SUMMARIES = {
    # vllm 0.11 to 0.26, v1/worker/gpu_worker.py: 17.37 GiB beside the KV cache.
    "0.19.0": "14.99 GiB for weight, 1.89 GiB for peak activation, 0.25 GiB for non-torch memory, and 0.57 GiB for"
    " CUDAGraph memory.",
    # From 0.27 on; the peak holds the graphs' estimate.
    "0.32.0": "15.24 GiB for consumed memory (weights + non-torch), 2.13 GiB for peak activation, and 0.57 GiB for"
    " CUDAGraph memory.",
}


def start(version: str, rank: int = 0, kv: str = "53.9") -> list[str]:
    worker = f"(Worker_TP{rank} pid={20 + rank}) INFO 10-22 09:43:49 "
    return [
        f"{worker}[gpu_model_runner.py:5150] Model loading took 14.99 GiB memory and 3.2 seconds",
        f"{worker}[gpu_worker.py:760] Available KV cache memory: {kv} GiB",
        f"{worker}[gpu_worker.py:1013] {FREE}{SUMMARIES[version]}{END}",
    ]


BEGINS = [BEGIN.format(version="0.19.0")]


def log(tmp_path: Path, lines: list[str]) -> Path:
    file = tmp_path / "vllm.log"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def parts(tmp_path: Path, lines: list[str], device_bytes: int | None = None) -> dict[str, int]:
    return read_measured(log(tmp_path, lines), LINE, device_bytes).parts


def gib(parts: dict[str, int]) -> dict[str, float]:
    return {name: round(size / GIB, 2) for name, size in parts.items()}


@pytest.mark.parametrize("version", SUMMARIES)
def test_the_parts_leave_what_was_printed_for_the_kv_cache(tmp_path: Path, version: str) -> None:
    found = read_measured(log(tmp_path, [ARGUMENTS, BEGIN.format(version=version), *start(version)]), LINE, None)
    assert found.parts["weights"] == round(14.99 * GIB)
    assert round((71.27 - 53.9) * GIB) == pytest.approx(sum(found.parts.values()), abs=2)
    assert found.notes == []


@pytest.mark.parametrize(
    "collector",
    [
        lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-10-22T09:43:49.1Z"}),
        lambda line: f"2026-10-22T09:43:49.123456789Z stderr F {line}",
        lambda line: f"vllm-0-abc  | {line}",
        lambda line: f"\x1b[36m{line.partition(') ')[0]})\x1b[0m {line.partition(') ')[2]}",
    ],
    ids=["docker", "containerd", "compose", "colours"],
)
def test_any_collectors_form_is_read(tmp_path: Path, collector) -> None:
    lines = [collector(line) for line in [ARGUMENTS, BEGIN.format(version="0.19.0"), *start("0.19.0")]]
    assert gib(parts(tmp_path, lines))["activation"] == 1.89


@pytest.mark.parametrize(
    ("lines", "taken"),
    [
        pytest.param([*start("0.19.0", 0), *start("0.19.0", 1, kv="50.9")], 20.37, id="the rank with the fewest left"),
        pytest.param([*BEGINS, *start("0.19.0", kv="10.0"), *BEGINS, *start("0.19.0")], 17.37, id="the last start"),
        pytest.param(start("0.19.0", kv="-3.2")[:2], 75.2, id="less than nothing was left"),
    ],
)
def test_one_rank_of_one_start_counts(tmp_path: Path, lines: list[str], taken: float) -> None:
    assert sum(parts(tmp_path, [ARGUMENTS, *lines], 80 * GIB).values()) == pytest.approx(taken * GIB, abs=2)


def test_without_the_summary_the_share_of_the_card_gives_the_rest(tmp_path: Path) -> None:
    lines = [ARGUMENTS, *start("0.19.0")[:2]]
    rest = {"activation": round(72 - 53.9 - 14.99, 2), "non_torch": 0, "buffers": 0, "graphs": 0}
    assert gib(parts(tmp_path, lines, 80 * GIB)) == {"weights": 14.99, **rest}
    assert list(parts(tmp_path, lines)) == ["weights"]


def test_the_graphs_that_were_taken_off_are_one_part(tmp_path: Path) -> None:
    """0.20 to 0.26 take off an estimate, and print the captured ones beside the rest."""
    lines = [ARGUMENTS, *start("0.19.0", kv="53.43")]
    found = gib(parts(tmp_path, lines))
    assert (found["graphs"], found["non_torch"]) == (0.71, 0.25)


@pytest.mark.parametrize(
    ("line", "left", "said"),
    [
        ("m -tp 4", [], "--tensor-parallel-size 2, this line 4: its weights"),
        ("m -tp 2 -q fp8", [], "--quantization not given, this line fp8"),
        ("m -tp 2 --max-num-batched-tokens 4k", ["weights"], "not given, this line 4000: its activation"),
        ("m -tp 2 --enforce-eager", ["weights"], "--enforce-eager not given, this line True"),
    ],
)
def test_what_another_line_measured_does_not_carry_over(tmp_path: Path, line: str, left: list[str], said: str) -> None:
    found = read_measured(log(tmp_path, [ARGUMENTS, *start("0.19.0")]), read_line([line]), None)
    assert list(found.parts) == left
    assert said in found.notes[0]


def test_what_explain_wrote_is_told_by_its_content(tmp_path: Path) -> None:
    def rank(available: int, weights: int) -> dict[str, object]:
        parts = [("weights", weights), ("activation", 2), ("persistent", 3), ("non_torch", 4), ("kv_cache", available)]
        return {"available_bytes": available, "parts": [{"key": key, "bytes": size} for key, size in parts]}

    file = tmp_path / "before.json"
    explanation = {
        "ranks": [rank(90, 10), rank(80, 20)],
        "parallel": {"tensor_parallel_size": 2},
        "limits": {"max_num_seqs": 256, "max_model_len": 4096},
    }
    file.write_text(json.dumps({"explanation": explanation}))
    assert read_measured(file, LINE, None).parts == {"buffers": 0, "weights": 20, "activation": 2, "non_torch": 7}
    other = read_measured(file, read_line(["m -tp 4"]), None)
    assert (other.parts, "--tensor-parallel-size 2, this line 4" in other.notes[0]) == ({}, True)
    assert list(read_measured(file, read_line(["m -tp 2 --max-num-seqs 8"]), None).parts) == ["weights"]
    longer = read_measured(file, LINE, None)  # no part depends on the length
    assert (len(longer.parts), longer.notes) == (4, [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("nothing of vLLM\n", "has no line of a start, such as 'Model loading took"),
        ('{"explanation": {"ranks": [1]}}', "describes no start"),
        ('{"explanation": {"ranks": [{"parts": [{"key": "weights", "bytes": 1e400}]}]}}', "describes no start"),
        ('{"explanation": {"ranks": []}}', "describes no start: explanation.ranks has no parts"),
    ],
)
def test_a_file_without_a_start_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(PlanError) as raised:
        read_measured(file, LINE, None)
    assert said in str(raised.value)
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        read_measured(tmp_path / "none", LINE, None)


def test_clients_words_measure_nothing(tmp_path: Path) -> None:
    said = "(APIServer pid=1) INFO 10-22 09:43:50 [logger.py:1] Received request: prompt: 'Model loading took 1.00 GiB'"
    lines = [ARGUMENTS, *start("0.19.0"), said]
    assert gib(parts(tmp_path, lines))["weights"] == 14.99


def test_the_flags_of_a_config_file_are_this_lines_too_and_another_models_log_is_refused(tmp_path: Path) -> None:
    file, flags = log(tmp_path, [ARGUMENTS, *start("0.32.0")]), tmp_path / "flags.yaml"
    flags.write_text("model: m\ntensor-parallel-size: 4\n")
    found = read_measured(file, read_line([f"vllm serve --config {flags}"]), None)
    assert found.parts == {}
    assert "--tensor-parallel-size 2, this line 4: its weights" in found.notes[0]
    flags.write_text("model: other\n")
    for other in (f"vllm serve --config {flags}", "/models/other -tp 2"):
        with pytest.raises(PlanError, match=r"is a start of 'm', and the .* serves 'other'; .* folder the log's name"):
            read_measured(file, read_line([other]), None)


def test_a_config_json_has_its_folders_name_and_another_file_none(tmp_path: Path) -> None:
    kept, model = log(tmp_path, [ARGUMENTS, *start("0.32.0")]), tmp_path / "m"
    model.mkdir()
    for file in (model / "config.json", model / "any.json"):
        file.write_text("{}")
        assert read_measured(kept, read_line([f"vllm serve {file} -tp 2"]), None).parts
    assert read_measured(kept, read_line(["vllm serve - -tp 2"]), None).parts


@pytest.mark.parametrize(
    "arguments",
    [
        "'gpu_memory_utilization': 'most'",
        "'gpu_memory_utilization': 1e999",
        "'gpu_memory_utilization': -5",
        "'gpu_memory_utilization': [1], 'limit_mm_per_prompt': {1: 2, 'image': 3}",
    ],
)
def test_odd_arguments_of_a_log_end_nothing(tmp_path: Path, arguments: str) -> None:
    odd = f"(APIServer pid=1) INFO 10-22 09:43:00 [utils.py:286] non-default args: {{'model_tag': 'm', {arguments}}}"
    line = read_line(["vllm serve m"])
    assert (
        gib(read_measured(log(tmp_path, [odd, *start("0.19.0")[:2]]), line, 80 * GIB).parts).get("weights", 14.99)
        == 14.99
    )
