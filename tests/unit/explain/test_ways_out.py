"""Ways out, tables and wishes by asking: nothing is named that was not asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from highwater.explain.command_line import Line, read_line
from highwater.explain.ways_out import Asking, grant_asked, is_tight, table, ways_out
from highwater.explain.wish import parse_wish
from kvplan import PlanError

BLOCK, TOKENS, BLOCKS = 1 << 20, 16, 1000
LONGEST = 100_000


class Linear:
    """A KV cache of 1,000 blocks of 16 tokens, 900 to 1,100 by its bounds, for each rank; TP 8 is refused."""

    title = "a rule"

    def __init__(self, margin: int = 100) -> None:
        self.margin, self.asked, self.measured = margin, 0, None

    def ask(self, line: Line, **question: Any) -> dict[str, Any]:
        self.asked += 1
        self.measured = question.get("measured")
        text = line.value("max_model_len") or "8000"
        length = 16_000 if text == "auto" else int(text)
        if text == "auto" and question.get("kv_cache_bytes"):
            length = question["kv_cache_bytes"] // BLOCK * TOKENS
        if length > LONGEST:
            return {"status": "refused", "refusal": {"message": "more than the model's"}}
        ranks = int(line.value("tensor_parallel_size") or 1)
        if ranks == 8:
            raise PlanError("--tensor-parallel-size: 8")
        share = float(line.value("gpu_memory_utilization") or 0.9)
        block = BLOCK // ranks // (2 if line.value("kv_cache_dtype") == "fp8" else 1)
        each = -(-length // TOKENS)
        given = question.get("kv_cache_bytes")
        likely = given or BLOCKS * BLOCK + round((share - 0.9) * 2000) * BLOCK
        ends = [likely - self.margin * BLOCK, likely + self.margin * BLOCK] if given is None else [likely, likely]
        fits = [end // block >= each for end in ends]
        status = "fits" if all(fits) else "may_not_fit" if any(fits) else "does_not_fit"
        kv: dict[str, Any] = {
            "available_bytes": likely, "available_bytes_low": ends[0], "available_bytes_high": ends[1],
            "needed_bytes": each * block, "max_model_len_that_fits": min(likely // block * TOKENS, length),
            "grades": {"available_bytes": "estimated" if given is None else "exact"},
        }  # fmt: skip
        if fits[1]:
            blocks = likely // block
            kv |= {
                "blocks": blocks, "blocks_low": ends[0] // block, "bytes_per_block": block, "max_model_len": length,
                "max_concurrency": blocks / each,
            }  # fmt: skip
        found = {"status": status, "kv_cache": kv, "config": _config(share, line, ranks), "budget": {}}
        found |= {"budget": {"total_bytes": 1}} if given is None else {}
        if "images" in question:
            found["images"] = [{"prompt_tokens": 802, "embeddings": 800}]
        return found


def _config(share: float, line: Line, ranks: int) -> dict[str, Any]:
    cache = {"gpu_memory_utilization": share, "cache_dtype": line.value("kv_cache_dtype") or "auto"}
    return {"cache": cache, "parallel": {"tensor_parallel_size": ranks}}


def asking(text: str, margin: int = 100) -> Asking:
    return Asking(Linear(margin), read_line([text]))


def test_a_length_that_the_model_has_not_is_answered_with_one_that_vllm_chooses() -> None:
    one = asking("m --max-model-len 200000")
    assert [way["flags"] for way in ways_out(one, one.ask({}))] == [{"max_model_len": 14_400}]


def test_a_refusal_ends_with_what_fits_the_longest_length_by_the_fewest_bytes_first() -> None:
    one = asking("m --max-model-len 18000")
    ways = list(ways_out(one, one.ask({})))
    assert [way["flags"] for way in ways] == [
        {"max_model_len": 14_400},
        {"kv_cache_dtype": "fp8"},
        {"gpu_memory_utilization": 0.95, "kv_cache_dtype": "fp8"},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
    ]
    assert ways[3]["max_concurrency"] == pytest.approx(2000 / 1125)


def test_without_bounds_the_longest_is_the_printed_one() -> None:
    one = asking("m --max-model-len 18000", margin=0)
    assert next(iter(ways_out(one, one.ask({}))))["flags"] == {"max_model_len": 16_000}


@pytest.mark.parametrize(
    ("length", "tight"), [(4000, False), (8000, False), (8016, True), (15_000, True), (18_000, True)]
)
def test_fewer_than_two_whole_requests_are_tight(length: int, tight: bool) -> None:
    assert is_tight(asking(f"m --max-model-len {length}").ask({})) == tight


def test_a_table_leaves_open_what_bounds_leave_open() -> None:
    found = table(asking("m"), 16_000)
    assert [row["max_model_len"] for row in found["rows"]] == [4000, 8000, 16_000, 32_000, 64_000]
    assert found["rows"][2]["max_concurrency"] == ["?", 2.0, 4.0, None]
    assert found["rows"][3]["max_concurrency"] == [None, "?", 2.0, None]


def test_a_wish_is_granted_by_the_fewest_bytes() -> None:
    """Two of 7,200 tokens are 900 blocks and the null block: one more than the least."""
    one = asking("m")
    fits, open_ = (grant_asked(one, parse_wish(f"2 x {length}"), one.ask({})) for length in (7184, 7200))
    assert (fits.fits, open_.fits) == (True, False)
    assert "There are at least 900 blocks" in fits.proof
    assert open_.chosen.flags["gpu_memory_utilization"] == 0.95
    assert [option.why for option in open_.nearest][:2] == [
        "fewer conversations: 1 of this length fit",
        "shorter conversations: 2 of 7184 tokens fit",
    ]


def test_without_bytes_a_wish_names_those_that_it_needs() -> None:
    one = asking("m")
    granted = grant_asked(one, parse_wish("2 x 16000"), {"status": "not_known"})
    assert granted.chosen.flags["kv_cache_memory_bytes"] == 2001 * BLOCK
    assert "There are" not in granted.proof


def test_images_in_pixels_are_counted_by_the_road() -> None:
    one = asking("m")
    granted = grant_asked(one, parse_wish("1 x 400 + 2 images of 1080p"), one.ask({}))
    assert granted.length == 400 + 2 * 802
    assert granted.chosen.flags["limit_mm_per_prompt"] == {"image": 2}


def test_images_that_nobody_counts_are_refused() -> None:
    class Blind(Linear):
        def ask(self, line: Line, **question: Any) -> dict[str, Any]:
            question.pop("images", None)
            return super().ask(line, **question)

    one = Asking(Blind(), read_line(["m"]))
    with pytest.raises(PlanError, match="of 1920x1080 are not known: only a vLLM that is asked counts them; give them"):
        grant_asked(one, parse_wish("1 x 400 + 2 images of 1080p"), one.ask({}))
    with pytest.raises(PlanError, match="2 images: of what size"):
        grant_asked(one, parse_wish("1 x 400 + 2 images"), one.ask({}))


def test_a_wish_that_vllm_refuses_is_not_answered() -> None:
    class Refusing(Linear):
        def ask(self, line: Line, **question: Any) -> dict[str, Any]:
            del line, question
            return {"status": "refused", "refusal": {"message": "no such length"}}

    one = Asking(Refusing(), read_line(["m"]))
    with pytest.raises(PlanError, match="wish: vLLM does not plan it: no such length"):
        grant_asked(one, parse_wish("1 x 400"), one.ask({}))


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ({"max_model_len": 99}, ["weights", "activation"]),
        ({"tensor_parallel_size": 1}, ["weights", "activation"]),
        ({"tensor_parallel_size": 2}, []),
        ({"max_num_seqs": 4}, ["weights"]),
        ({"limit_mm_per_prompt": {"image": 2}}, ["weights", "activation"]),
    ],
)
def test_what_was_measured_holds_for_the_flags_that_it_does_not_depend_on(
    flags: dict[str, Any], kept: list[str]
) -> None:
    road = Linear()
    Asking(road, read_line(["m"]), {"measured": {"weights": 1, "activation": 2}}).ask(flags)
    assert list(road.measured or ()) == kept


def test_ranks_of_a_config_file_are_those_that_were_measured(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("tensor-parallel-size: 2\n")
    road = Linear()
    one = Asking(road, read_line([f"m --config {file}"]), {"measured": {"weights": 1}})
    one.ask({"tensor_parallel_size": 2})
    assert road.measured == {"weights": 1}
    one.ask({"tensor_parallel_size": 1})
    assert road.measured == {}
