"""Each part of a budget says how well it is known, and a sum is known as well as its worst part."""

from __future__ import annotations

from dataclasses import replace

from highwater.plan.budget import rank_budget
from highwater.plan.figure import GRADES, add, estimated, exact, measured
from tests.fakes.started import GIB
from tests.unit.plan.readings import STORY, STORY_START, rank, story_rank


def test_persistent_tensors_are_measured_where_no_formula_counts_them() -> None:
    """Up to 0.25: they are what was allocated after loading, less the weights, and the engine has no such figure."""
    uncounted = {part.key: part.grade for part in rank_budget(STORY, story_rank(), STORY_START).uncounted}
    assert uncounted == {"persistent": "measured", "non_torch_uncounted": "measured"}


def test_persistent_tensors_are_measured_where_the_formula_counts_them() -> None:
    """From 0.27 on, within the engine's own sum: the rest of it follows."""
    consumed = replace(STORY.memory, non_torch_bytes=None, total_consumed_bytes=10 * GIB)
    budget = rank_budget(replace(STORY, vllm_version="0.27.0", memory=consumed), rank(), STORY_START)
    grades = {part.key: part.grade for part in budget.parts}
    assert budget.counting == "consumed"
    assert (grades["weights"], grades["persistent"], grades["non_torch"]) == ("engine", "measured", "exact")


def test_a_sum_is_known_as_well_as_its_worst_part() -> None:
    """The bounds add up too."""
    total = add([exact(10, "a rule"), measured(5, "a start"), estimated(1, 2, 4, "a guess")], "all of them")
    assert (total.grade, total.low, total.bytes, total.high) == ("estimated", 16, 17, 19)
    assert add([exact(1, "a rule"), measured(1, "a start")], "both").grade == "measured"
    assert add([], "nothing").grade == "exact"
    assert GRADES == ("engine", "exact", "measured", "estimated")
