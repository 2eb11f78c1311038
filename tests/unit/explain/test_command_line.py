"""A pasted command line: its words and environment, other flags in their place, and what the tables know of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.explain.command_line import Line, parse, read_line
from kvplan import PlanError

PASTED = r"""VLLM_USE_V2_MODEL_RUNNER=0 \
  vllm serve Qwen/Qwen3-14B \
  --max_model_len 32k -sc '{"method": "ngram"}' -tp=2 -O3  # ours"""


def line(text: str) -> Line:
    return read_line([text])


def test_a_pasted_text_is_split_with_its_environment() -> None:
    assert line(PASTED).environ == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert line(PASTED).words[:3] == ("Qwen/Qwen3-14B", "--max_model_len", "32k")


@pytest.mark.parametrize(
    "given",
    [
        "vllm serve m -tp 2",
        "/opt/bin/vllm serve m -tp 2",
        "env A=1 vllm serve m -tp 2",
        "python3 -m vllm.entrypoints.openai.api_server --model m -tp 2",
        "python -m vllm.entrypoints.cli.main serve m -tp 2",
        "docker run --gpus all --name vllm -v vllm-cache:/root vllm/vllm-openai:v0.32.0 --model m -tp 2",
        "podman run -e VLLM_X=1 quay.io/ascend/vllm-ascend:v0.12.0rc1 vllm serve m -tp 2",
        "m -tp 2",
    ],
)
def test_every_way_to_start_the_server_is_taken(given: str) -> None:
    for found in (line(given), read_line(given.split())):
        assert (found.model, found.value("tensor_parallel_size")) == ("m", "2")


@pytest.mark.parametrize("given", ["", "vllm bench serve m", "vllm serve 'm", "docker run ubuntu", "python x.py"])
def test_another_command_is_refused_with_what_would_be_right(given: str) -> None:
    with pytest.raises(PlanError, match=r"vllm serve MODEL|cannot be split|as vllm/vllm-openai"):
        line(given)


def test_other_flags_stand_in_place_of_those_that_were_given_in_any_spelling() -> None:
    changed = line(PASTED).changed({"tensor_parallel_size": 4, "max_model_len": 99})
    assert changed.words == (
        *("Qwen/Qwen3-14B", "-sc", '{"method": "ngram"}', "-O3", "-tp", "4", "--max-model-len", "99"),
    )
    assert str(changed).startswith("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve Qwen/Qwen3-14B -sc '{")


def test_a_model_behind_a_flag_stays_where_a_flag_goes() -> None:
    for given in ("--max-model-len 9 m", "--max-model-len=9 m"):
        assert line(f"vllm serve {given}").changed({"max_model_len": 8}).words == ("m", "--max-model-len", "8")


def test_a_line_is_shown_as_a_shell_takes_it() -> None:
    assert str(line("A='1 2' vllm serve m")) == "A='1 2' vllm serve m"


def test_a_model_is_put_elsewhere_wherever_it_stands() -> None:
    assert line("vllm serve m -tp 2").on(Path("/x")).words == ("/x", "-tp", "2")
    assert line("vllm serve -tp 2 --model m").on(Path("/x")).model == "/x"


def test_the_tables_know_aliases_human_sizes_switches_and_what_changes_no_memory() -> None:
    found = parse(line("m -tp 2 --max_model_len 25.6k --kv-cache-memory 3g --no-enable-prefix-caching --port 1"))
    assert found.given == {
        "tensor_parallel_size": 2,
        "max_model_len": 25_600,
        "kv_cache_memory_bytes": 3_000_000_000,
        "enable_prefix_caching": False,
    }
    assert found.ignored == ("--port",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("m --cpu-offload-gb 4", "--cpu-offload-gb: it is not known here"),
        ("m --no-enable-chunked-prefill", "--no-enable-chunked-prefill: it is not known here"),
        ("m --max-modl-len 8k", "--max-modl-len: did you mean --max-model-len? It is not known here"),
        ("m --gpu_memory_utilisation=0.9", "did you mean --gpu-memory-utilization? It is not known here"),
        ("m -tp two", "'two' is no count of 1 or more; write it as 32768, 32K"),
        ("m --max-model-len auto", "--max-model-len: 'auto' is no count"),
        ("m --limit-mm-per-prompt 3", "'3' is no JSON object"),
        ("m --config /nowhere.yaml", "--config: /nowhere.yaml cannot be read"),
    ],
)
def test_what_the_tables_do_not_know_is_refused_by_name(given: str, said: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse(line(given))
    assert said in str(raised.value)


def test_a_file_of_flags_stands_before_the_others(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "model: m\nmax-model-len: 4096\ntensor_parallel_size: 2\nenforce-eager: true\nasync-scheduling: false\n"
    )
    found = parse(line(f"vllm serve --config {file} -tp 4"))
    assert found.model == "m"
    assert found.given == {"max_model_len": 4096, "tensor_parallel_size": 4, "enforce_eager": True}


def test_a_file_of_flags_that_holds_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("- a\n")
    with pytest.raises(PlanError, match="must hold flags and their values"):
        parse(line(f"m --config={file}"))


def test_flags_of_the_front_are_not_handed_to_the_built_in() -> None:
    flags = parse(line("m --enforce-eager -tp 2")).flags(device_bytes=1)
    assert (flags.tensor_parallel_size, flags.device_bytes) == (2, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("vllm serve m -tp 2 &", "vllm serve m -tp 2"),
        ("vllm serve m -tp 2&", "vllm serve m -tp 2"),
        ("vllm serve m -tp 2 2>&1 | tee log", "vllm serve m -tp 2"),
        ("nohup vllm serve m > vllm.log 2>&1 < /dev/null &\nsleep 9; curl x", "vllm serve m"),
        ("vllm serve m &>>log --port 3; echo done", "vllm serve m --port 3"),
        ("set -e\ncd /opt && A=1 exec vllm serve m -tp 2\necho started", "A=1 vllm serve m -tp 2"),
        ("export A=1,2\nvllm serve m", "A=1,2 vllm serve m"),
        ("sudo -E env A=1 vllm serve m", "A=1 vllm serve m"),
        ("A=1 numactl -N 0 uv run vllm serve m", "A=1 vllm serve m"),
        ("M=m\nvllm serve $M -tp ${TP:-4}", "vllm serve m -tp 4"),
        ("M=m\nARGS='-tp 2 --port 9'\nvllm serve \"${M}\" $ARGS", "vllm serve m -tp 2 --port 9"),
        ("vllm serve '$M'", "vllm serve '$M'"),
        ("vllm serve m \\ \n  --a 1 \\\n  # --b 2 \\\n  --c 3", "vllm serve m --a 1 --c 3"),
        ("vllm serve m \\\r\n  --a 1 \\", "vllm serve m --a 1"),
        ("vllm serve\nm\n--max-model-len\n9\n--a", "vllm serve m --max-model-len 9 --a"),
        ("vllm serve m -k a#b -sc '{\"a\":\n1}' --b ''", "vllm serve m -k 'a#b' -sc '{\"a\":\n1}' --b ''"),
        ("docker run --entrypoint vllm -e VLLM_A=1 vllm/vllm-openai serve m", "VLLM_A=1 vllm serve m"),
        ("docker run --entrypoint=python3 v/vllm -m vllm.entrypoints.openai.api_server -tp 2", "vllm serve -tp 2"),
        ("docker run -it me/server:1 vllm serve m", "vllm serve m"),
        ("sudo docker run v/vllm bash -c 'vllm serve m -tp 2 | tee log'", "vllm serve m -tp 2"),
    ],
)  # fmt: skip
def test_a_text_of_a_shell_is_its_one_command_line(given: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TP", raising=False)
    assert str(read_line([given])) == expected


def test_a_variable_is_that_of_the_shell_or_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_SHELL", "m")
    assert read_line(["vllm serve $OF_THE_SHELL -tp $NOT_OF_IT"]).words == ("m", "-tp", "$NOT_OF_IT")


@pytest.mark.parametrize(("given", "said"), [("vllm serve <your model>", "holds <your model>"), ("m 'a", "is open")])
def test_what_is_no_command_line_is_refused(given: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        read_line([given])
