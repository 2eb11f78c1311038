"""The kit for devices: what a step's result says, what its page says, and which modules are missing."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bench.device import __main__ as kit
from bench.device import needs
from bench.device.page import devices_page, merge
from bench.device.results import Findings, StepResult, read_result
from bench.device.steps import STEPS

SAYS = {"first": "the first is so", "second": "the second is at most 2"}


class OnNothing:
    """A device that only describes itself."""

    device = SimpleNamespace(type="cpu")

    def description(self) -> dict[str, object]:
        return {"type": "cpu", "name": "A | CPU", "total_bytes": 2**30, "driver": None}

    def versions(self) -> dict[str, str]:
        return {"torch": "2.13.0"}


def result(name: str = "reading", kind: str = "cpu", *, error: str | None = None) -> StepResult:
    found = Findings(SAYS)
    found.holds("first", True, value=3.5)
    found.at_most("second", 3, 2, "ms")
    found.figure("time", 1.25, "ms")
    return StepResult(
        step=name,
        says="",
        device={"type": kind, "name": f"A {kind}", "total_bytes": 2**30, "driver": "570.1" if kind == "cuda" else None},
        versions={"torch": "2.13.0"},
        command="python -m bench.device reading",
        started="2026-01-02 03:04:05",
        seconds=1.0,
        checks=found.checks,
        figures=found.figures,
        error=error,
    )


def statuses(found: Findings) -> dict[str, str]:
    return {check.name: check.status for check in found.checks}


def test_a_number_beyond_its_bound_fails():
    """With the value and the bound in words."""
    second = result().checks[1]
    assert (second.status, second.value, second.bound, second.why) == ("failed", 3, "at most 2 ms", "3 ms")


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        (lambda found: found.at_most("second", 2, 2, "ms"), "passed"),
        (lambda found: found.at_least("second", 2, 2, "ms"), "passed"),
        (lambda found: found.at_least("second", 1, 2, "ms"), "failed"),
        (lambda found: found.equals("second", "GPU-1", "GPU-1"), "passed"),
        (lambda found: found.equals("second", None, "GPU-1"), "failed"),
        (lambda found: found.holds("second", False), "failed"),
        (lambda found: found.skip("there is no device", "second"), "skipped"),
    ],
)
def test_every_kind_of_check_can_pass_and_fail(judge, expected: str):
    """At the bound it passes."""
    found = Findings(SAYS)
    judge(found)
    assert statuses(found) == {"second": expected}


def test_a_check_that_is_judged_several_times_keeps_the_worst():
    """A variant that fails is not hidden by the next one that passes."""
    found = Findings(SAYS)
    for is_so in (True, False, True):
        found.holds("first", is_so)
    assert statuses(found) == {"first": "failed"}


def test_a_check_that_is_not_in_the_list_is_an_error():
    """The list is what the page shows."""
    with pytest.raises(KeyError):
        Findings(SAYS).holds("third", True)


def test_a_step_that_ends_early_fails_what_it_had_not_reached(monkeypatch: pytest.MonkeyPatch):
    """And keeps what it had."""

    def run(_: object, found: Findings) -> None:
        found.holds("first", True)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(kit, "STEPS", {"broken": SimpleNamespace(SAYS="it breaks", CHECKS=SAYS, run=run)})
    done = kit.run_step("broken", OnNothing())
    assert [check.status for check in done.checks] == ["passed", "failed"]
    assert "CUDA out of memory" in (done.checks[1].why or "")
    assert (done.has_failed, done.error) == (True, "RuntimeError: CUDA out of memory")


def test_a_forgotten_check_fails(monkeypatch: pytest.MonkeyPatch):
    """A step that passes over a check by mistake does not pass."""
    forgetful = SimpleNamespace(SAYS="", CHECKS=SAYS, run=lambda _, found: found.holds("first", True))
    monkeypatch.setattr(kit, "STEPS", {"forgetful": forgetful})
    done = kit.run_step("forgetful", OnNothing())
    assert {check.name: check.status for check in done.checks} == {"first": "passed", "second": "failed"}


def test_a_result_is_read_as_it_was_written(tmp_path):
    """So that the page can be made of files that somebody sent."""
    written = result()
    path = written.write(tmp_path)
    assert path.name == "reading-cpu.json"
    assert read_result(json.loads(path.read_text("utf-8"))) == written


def test_a_result_of_another_schema_is_refused():
    """Its figures might mean something else."""
    with pytest.raises(ValueError, match="schema is 2; this program reads 1"):
        read_result({"schema": 2})


def test_a_newer_result_takes_the_place_of_the_older_one(tmp_path):
    """Of the same step on the same device; others stay."""
    newer = result(error="it ended")
    newer.write(tmp_path)
    merged = merge([result(), result("spill"), result("reading", "cuda")], tmp_path)
    assert [(one.step, one.device["type"], one.error) for one in merged] == [
        ("reading", "cpu", "it ended"),
        ("spill", "cpu", None),
        ("reading", "cuda", None),
    ]


def test_the_page_says_what_has_not_run_where():
    """Nobody must take an inference for a measurement."""
    page = devices_page([result(), result("reading", "cuda")])
    assert "**Ascend: no step has run.**" in page
    assert "**NVIDIA** (A cuda): 1 checks passed, 1 failed, 0 were skipped. Not run: allocator, spill" in page
    assert "Driver: 570.1" in page
    assert "no step has run" not in page.partition("**NVIDIA**")[2].partition("\n")[0]


def test_the_page_shows_every_check_with_its_result():
    """With what was seen, and the bound."""
    page = devices_page([result()])
    assert "| the second is at most 2 | failed | 3 ms; at most 2 ms |" in page
    assert "| time | 1.25 ms |" in page


def test_the_page_shows_what_was_read_in_ascends_packages():
    """A bar in a signature does not end the cell."""
    row = {"name": "wake_up", "package": "vllm_ascend", "version": "0.18.0", "found": "(tags: list[str] | None)"}
    page = devices_page([], {"note": "Nothing here was run.", "found": [row]})
    assert "| `wake_up` | vllm_ascend 0.18.0 | `(tags: list[str] \\| None)` |" in page


def test_each_step_says_what_it_needs():
    """So that one look tells what to carry."""
    assert list(needs.NEEDS) == list(STEPS)
    assert needs.missing(["json", "surely_not_installed"]) == ["surely_not_installed"]
    assert all(line.split()[0] in STEPS for line in needs.report().splitlines())


def test_the_steps_are_listed_without_pytorch(capsys: pytest.CaptureFixture[str]):
    """A machine that lacks it is told so by `needs`, not by a traceback."""
    assert kit.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(STEPS)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_check_stands_for_a_sentence(step):
    """Which the page shows in its place."""
    assert step.SAYS
    assert all(len(says.split()) > 3 and not says.endswith(".") for says in step.CHECKS.values())
