"""`highwater plan --device`: the budget of a start, from a config.json, its checkpoint's files, or an earlier start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from highwater.commands.plan import plan
from highwater.plan.implied import implied_tensors
from highwater.units import GIB
from tests.support.recorded_starts import DEVICE_GIB, LLAMA_8B, QWEN3_VL_8B, STARTS

ON_AN_H100 = (
    "--device", f"{DEVICE_GIB}GiB", "--gpu-memory-utilization", "0.95", "--max-num-batched-tokens", "8192",
    "--max-num-seqs", "1024", "--vllm-version", "0.19.0", "--max-model-len", "8192", "--json",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def planned(*arguments: str) -> dict[str, Any]:
    """Return the plan of a command line that is not refused."""
    result = CliRunner().invoke(plan, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_device_is_divided_and_each_part_says_how_it_is_known(folder: Path) -> None:
    """From the config.json alone everything is an estimate, close to the start that was recorded: 58.11 GiB."""
    made = planned(str(folder), *ON_AN_H100)

    grades = {key: part["grade"] for key, part in made["budget"].items() if isinstance(part, dict) and "grade" in part}
    assert set(grades.values()) == {"estimated"}
    assert {"weights_bytes", "activation_bytes", "non_torch_bytes", "graphs_bytes"} <= set(grades)
    assert made["kv_cache"]["available_bytes"] / GIB == pytest.approx(58.11, abs=0.05)


@pytest.mark.parametrize(("given", "said"), [("80", "80GiB?"), ("0.5GiB", "any card has"), ("80B", "any card has")])
def test_a_device_without_its_unit_is_refused(folder: Path, given: str, said: str) -> None:
    result = CliRunner().invoke(plan, [str(folder), "--device", given])
    assert (result.exit_code, said in result.output) == (2, True)


def test_what_fits_says_what_is_left_outside_the_share(folder: Path) -> None:
    """For what no budget has; without a card that is not known."""
    fits = CliRunner().invoke(plan, [str(folder), "--device", "80GiB", "--max-model-len", "8192"])
    assert "Outside the share of 0.92 are 6.40 GiB, for what no budget has" in fits.output
    fits = CliRunner().invoke(plan, [str(folder), "--kv-cache-memory-bytes", "40GiB"])
    assert "no budget has, such as graphs beyond their estimate and the first large image or video, is not known" in (
        fits.output
    )


TWO_ENGINES = ("--device", "8188MiB", "--gpu-memory-utilization", "0.4", "--max-model-len", "2048")
SMALL = {**LLAMA_8B, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip


@pytest.mark.parametrize(
    ("used", "more", "status", "said"),
    [
        ("3578MiB", (), 0, "Others have 3.49 GiB of the card in use, which vLLM 0.15.0 does not take off"),
        ("3578MiB", (), 0, "beside them and a share of 3.20 GiB 1.30 GiB are left."),
        ("3578MiB", (), 0, "Outside the share of 0.4 and what others have in use are 1.30 GiB"),
        ("5200MiB", (), 1, "vLLM 0.15.0 refuses to start: 2.92 GiB of the card are free beside others"),
        ("5200MiB", ("--kv-cache-memory-bytes", "1GiB"), 1, "refuses to start"),
        ("4800MiB", (), 1, "between                                         0 B and"),
        ("1GiB", ("--platform", "ascend", "--vllm-version", "0.13.0"), 1, "takes the 1.00 GiB in use by others off"),
        ("9GiB", ("--platform", "ascend"), 2, "--in-use: 9.00 GiB are more than --device, 8.00 GiB, has"),
        ("7900MiB", ("--kv-cache-memory-bytes", "2GiB"), 1, "It does not fit: vLLM 0.15.0 refuses to start: 288 MiB"),
        ("7900MiB", (), 1, "KV cache of one rank                                     not known"),
        ("4800MiB", ("--kv-cache-memory-bytes", "64MiB"), 1, "It may not fit. Of the card's 8.00 GiB"),
        ("1GiB", ("--platform", "cpu"), 2, "--in-use: it is of a card"),
    ],
)
def test_what_others_have_in_use_is_refused_counted_off_or_without_effect(
    folder: Path, used: str, more: tuple[str, ...], status: int, said: str
) -> None:
    """By the version's own rule; little room is open, as the engine's own context comes before its look."""
    (folder / "config.json").write_text(json.dumps(SMALL))
    version = () if "--platform" in more else ("--vllm-version", "0.15.0")
    result = CliRunner().invoke(plan, [str(folder), *TWO_ENGINES, *version, "--in-use", used, *more])
    assert said in result.output
    assert result.exit_code == status, result.output


@pytest.mark.parametrize(
    ("more", "status", "verdict"),
    [
        (("--kv-cache-memory-bytes", "20GiB"), 1, "It does not fit: vLLM runs out of memory: the card's 8.00 GiB do"),
        (("--num-gpu-blocks-override", "200000"), 1, "It does not fit: vLLM runs out of memory: the card's 8.00 GiB"),
        (("--num-gpu-blocks-override", "9000"), 0, "It fits: vLLM starts with --max-model-len 2048. Of the card's"),
        (("--kv-cache-memory-bytes", "5GiB", "--in-use", "2GiB"), 1, "(5.00 GiB) and the 2.00 GiB in use by others"),
        (("--kv-cache-memory-bytes", "6GiB"), 1, "It may not fit. Of the card's 8.00 GiB, 1.10 GiB are left beside"),
        (("--kv-cache-memory-bytes", "1GiB"), 0, "for activations, graphs and memory outside torch of 571 MiB to 3.52"),
        (("--kv-cache-memory-bytes", "12MiB"), 1, "vLLM refuses to start with --max-model-len 2048; the longest"),
        (("--kv-cache-memory-bytes", "9GiB", "--platform", "cpu"), 1, "do not hold the KV cache (9.00 GiB)"),
        (("--kv-cache-memory-bytes", "2GiB", "--platform", "cpu"), 1, "It may not fit. What a start takes of the"),
        (("--kv-cache-memory-bytes", "20GiB", "-pp", "2"), 1, "weights (at least 576 MiB) and the KV cache ("),
    ],
)  # fmt: skip
def test_a_card_must_hold_the_weights_beside_given_bytes(
    folder: Path, more: tuple[str, ...], status: int, verdict: str
) -> None:
    """VLLM takes them as they are: its budget of the card no longer counts."""
    (folder / "config.json").write_text(json.dumps(SMALL))
    given = [str(folder), "--device", "8GiB", "--gpu-memory-utilization", "0.5", "--max-model-len", "2048", *more]
    result = CliRunner().invoke(plan, given)
    assert verdict in result.output.splitlines()[1]
    assert result.exit_code == status
    assert "no card is named" not in result.output


def test_a_card_that_is_too_full_has_no_length_that_fits(folder: Path) -> None:
    given = [str(folder), "--device", "24GiB", "--kv-cache-memory-bytes", "20GiB", "--max-model-len", "2048", "--json"]
    cache = json.loads(CliRunner().invoke(plan, given).stdout)["kv_cache"]
    assert (cache["fits"], cache["max_model_len_that_fits"], cache["grades"]["fits"]) == (False, 0, "estimated")
    assert "do not hold the weights" in cache["refusal"]
    assert cache["grades"]["available_bytes"] == "exact"


def test_a_card_that_the_weights_fill_is_the_reason(folder: Path) -> None:
    """Not the length: no length fits."""
    result = CliRunner().invoke(plan, [str(folder), "--device", "12GiB"])
    assert result.output.splitlines()[1].startswith("It does not fit: Nothing is left for the KV cache")


def test_a_drafters_weights_leave_open_whether_a_card_holds_given_bytes(folder: Path) -> None:
    drafter = json.dumps({"method": "medusa", "num_speculative_tokens": 2, "model": str(folder)})
    given = [str(folder), "--device", "80GiB", "--max-model-len", "2048", "--speculative-config", drafter]
    for size, said in (("8GiB", "It may not fit. What a start takes"), ("79GiB", "It does not fit: vLLM runs out")):
        assert said in CliRunner().invoke(plan, [*given, "--kv-cache-memory-bytes", size]).output


def test_what_others_use_of_no_card_is_refused(folder: Path) -> None:
    assert "give --device" in CliRunner().invoke(plan, [str(folder), "--in-use", "1GiB"]).output


def test_an_encoder_of_unknown_size_is_said_and_settled_by_limits(folder: Path) -> None:
    """A video's size is in no config.json; an image's is in preprocessor_config.json."""
    (folder / "config.json").write_text(json.dumps(QWEN3_VL_8B))
    card = ("--device", "80GiB", "--max-model-len", "8192", "--max-num-batched-tokens", "8192", "--max-num-seqs", "64")

    def output(*more: str) -> str:
        return CliRunner().invoke(plan, [str(folder), *card, *more]).output

    assert "It may not fit" in output()
    assert "No lower bound: a start profiles the encoder" in output("--limit-mm-per-prompt", '{"video": 0}')
    pixels = {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    assert "No lower bound" in output()
    assert "It fits" in output("--limit-mm-per-prompt", '{"video": 0}')
    assert "a JSON object is needed" in output("--limit-mm-per-prompt", "video=0")
    assert "a JSON object is needed" in output("--limit-mm-per-prompt", "[]")


def test_the_files_of_a_folder_make_the_weights_exact(folder: Path) -> None:
    """Their headers are read; the data may be a hole of 16 GB."""
    header, place = {}, 0
    for tensor in implied_tensors(LLAMA_8B):
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.bytes],
        }
        place += tensor.bytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)

    weights = planned(str(folder), *ON_AN_H100)["budget"]["weights_bytes"]

    assert weights["grade"] == "exact"
    assert weights["bytes"] / GIB == pytest.approx(14.99, abs=0.005)


def test_a_start_that_was_written_down_replaces_estimates(folder: Path) -> None:
    """Then the KV cache is the measured one."""
    parts = {"weights": 14.99, "activation": 1.89, "non_torch": 0.25}
    started = {
        "vllm_version": "0.19.0",
        "architecture": "LlamaForCausalLM",
        "limits": {"max_num_batched_tokens": 8192, "max_num_seqs": 1024},
        "ranks": [
            {
                "device": {"type": "cuda"},
                "parts": [{"key": key, "bytes": round(size * GIB)} for key, size in parts.items()],
            }
        ],
    }
    (folder / "before.json").write_text(json.dumps({"explanation": started}))

    budget = planned(str(folder), *ON_AN_H100, "--measured", str(folder / "before.json"))["budget"]

    assert {budget[key]["grade"] for key in ("weights_bytes", "activation_bytes", "non_torch_bytes")} == {"measured"}


def test_a_file_that_describes_no_start_is_refused(folder: Path) -> None:
    """By its name, with exit status 2."""
    result = CliRunner().invoke(plan, [str(folder), *ON_AN_H100, "--measured", str(folder / "config.json")])

    assert result.exit_code == 2
    assert "config.json describes no start" in result.stderr


def test_a_model_that_is_larger_than_the_device_does_not_fit(folder: Path) -> None:
    """Nothing is left for the KV cache, and the exit status says so."""
    result = CliRunner().invoke(plan, [str(folder), *ON_AN_H100, "--device", "12GiB"])

    cache = json.loads(result.stdout)["kv_cache"]
    assert result.exit_code == 1
    assert (cache["fits"], cache["available_bytes"], cache["blocks"]) == (False, 0, 0)
    assert any(note.startswith("Nothing is left for the KV cache") for note in json.loads(result.stdout)["notes"])


def test_a_length_within_the_estimates_bounds_is_not_called_fitting(folder: Path) -> None:
    """The fewest bytes that are expected are too few, the most are enough: the exit status is not that of a fit."""
    given = (str(folder), *ON_AN_H100, "--device", "24GiB", "--max-num-seqs", "256", "--max-model-len", "51200")

    made = CliRunner().invoke(plan, given)
    said = CliRunner().invoke(plan, [word for word in given if word != "--json"])

    cache = json.loads(made.stdout)["kv_cache"]
    assert cache["available_bytes_low"] < cache["needed_bytes"] < cache["available_bytes_high"]
    assert cache["blocks_low"] < cache["blocks"] < cache["blocks_high"]
    assert (made.exit_code, cache["fits"]) == (1, None)
    assert "It may not fit: one request of 51,200 tokens needs 6.25 GiB" in said.stdout
    shown = [line for line in said.stdout.splitlines() if line.startswith(("blocks", "tokens", "KV cache"))]
    assert [line.rsplit(", ")[-1] for line in shown] == ["estimated"] * 3


@pytest.mark.parametrize(("version", "noted"), [("0.19.1", "ignores --kv-cache-memory-bytes"), ("0.20.0", "replaces")])
def test_on_a_cpu_a_note_says_what_becomes_of_given_bytes(folder: Path, version: str, noted: str) -> None:
    """Up to 0.19 VLLM_CPU_KVCACHE_SPACE alone counts; from 0.20 on it replaces the flag."""
    made = planned(
        str(folder), "--platform", "cpu", "--kv-cache-memory-bytes", "8GiB", "--vllm-version", version,
        "--max-model-len", "8192", "--json",
    )  # fmt: skip

    (note,) = (note for note in made["notes"] if "VLLM_CPU_KVCACHE_SPACE" in note)
    assert noted in note


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads"])
def test_a_model_without_a_size_is_refused_by_the_keys_name(folder: Path, key: str) -> None:
    """A vocabulary of 0 makes no plan."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | {key: 0}))

    refused = CliRunner().invoke(plan, [str(folder), *ON_AN_H100])

    assert refused.exit_code == 2
    assert f"{key}: 0; a whole number of 1 or more is needed" in refused.stderr


def test_the_kv_cache_of_the_ascend_story_is_planned_from_its_config(tmp_path: Path) -> None:
    """44.30 GiB of Qwen3-VL-8B on two NPUs: 5,040 blocks of 128 tokens, and a note that this version takes no bytes."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_8B))
    size = str(round(44.30 * GIB))

    made = planned(
        str(tmp_path), "--platform", "ascend", "-tp", "2", "--vllm-version", "0.12.0", "--max-model-len", "65536",
        "--kv-cache-memory-bytes", size, "--json",
    )  # fmt: skip

    assert (made["kv_cache"]["blocks"], made["kv_cache"]["tokens"]) == (5040, 645_120)
    assert made["kv_cache"]["block_size"] == 128
    assert any("ignores --kv-cache-memory-bytes" in note for note in made["notes"])


def test_several_groups_are_refused_where_ascend_scales_them(tmp_path: Path) -> None:
    """From vllm-ascend 0.28 on, by a rule that is not modelled."""
    gemma = next(start.config for start in STARTS if start.name == "gemma-2-2b")
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    given = (str(tmp_path), "--platform", "ascend", "--kv-cache-memory-bytes", "8GiB", "--vllm-version")

    refused = CliRunner().invoke(plan, [*given, "0.28.0"])

    assert refused.exit_code == 2
    assert "several groups (here 2)" in refused.stderr
    assert CliRunner().invoke(plan, [*given, "0.23.0"]).exit_code == 0
