"""The kit for devices: what a step's result says, what its page says, and which modules are missing."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.device import __main__ as kit
from bench.device import needs
from bench.device.page import SHOWN, devices_page, merge
from bench.device.results import Findings, StepResult, read_result
from bench.device.steps import STEPS, allocator, oom, policy, reading

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


def test_the_page_keeps_a_simulated_device_apart():
    """It is no device: its heading and the vendor's line say so, and what it cannot show."""
    npu = result("reading", "npu")
    device, versions = {**npu.device, "is_simulated": True}, {"torch_npu": "2.13.0"}
    page = devices_page([replace(npu, device=device, versions=versions)])
    anchor = "#simulated-device-real-torch_npu-2130-2026-01-02"
    assert (
        f"**Ascend: not run on a device.** On a [simulated device]({anchor}), under the real torch_npu 2.13.0" in page
    )
    assert "## Simulated device, real torch_npu 2.13.0, 2026-01-02\n" in page
    assert "It cannot show: workspaces of operators" in page


@pytest.mark.parametrize(
    ("more_bytes", "expected"), [(-512, "failed"), (0, "passed"), (512, "passed"), (513, "failed")]
)
def test_padding_of_an_allocation_is_no_fault(more_bytes: int, expected: str):
    """torch_npu adds 32 bytes, and the allocator rounds up to blocks of 512."""
    grown = reading.PROBE_BYTES + more_bytes
    torch = {"allocated_bytes": 0, "reserved_bytes": 0}
    answers = [
        {"torch": torch, "used_bytes": 0},
        {"torch": {"allocated_bytes": grown, "reserved_bytes": grown}, "used_bytes": grown},
    ]
    found = Findings(reading.CHECKS)
    on = SimpleNamespace(is_cpu=False, empty=lambda _: None)
    reading._follows(on, SimpleNamespace(call=lambda _: answers.pop(0)), found)
    assert statuses(found) == {"allocated_follows": expected, "used_follows": "passed"}


def test_the_page_shows_every_check_that_failed():
    """With what was seen, and the bound; those that passed are counted."""
    page = devices_page([result()])
    assert "| the second is at most 2 | failed | 3 ms; at most 2 ms |" in page
    assert f"| `reading`: {reading.SAYS} | 1 passed, 1 failed |" in page


def test_the_page_shows_the_figures_that_matter():
    """By device; a dash is for what was not measured there, and docs/devices.json has all others."""
    found = Findings(SAYS)
    found.figure("release_median", 150.4, "ms")
    page = devices_page([result(), replace(result(kind="cuda"), figures=found.figures)])
    assert f"| {SHOWN['release_median']} | - | 150 ms |" in page
    assert "1.25 ms" not in page


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


# --- what the steps make of what a device says: without one ---

CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.20 GiB is free. Of the allocated memory 38.10 GiB is allocated by PyTorch, and 38.90 GiB is reserved "
    "by PyTorch but unallocated."
)
ON_CUDA = SimpleNamespace(is_cpu=False, type="cuda", index=0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (CUDA_OOM, "passed"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "passed"),
        (
            "RuntimeError: NPU out of memory. NPUWorkspaceAllocator tried to allocate 180.00 MiB (NPU 1; 60.96 GiB",
            "passed",
        ),
        ("RuntimeError: something else", "failed"),
    ],
)
def test_a_message_counts_where_the_product_knows_it(tmp_path, line: str, expected: str):
    """The engine's log is read by the product's own code."""
    log = tmp_path / "engine.log"
    log.write_text(f"Traceback (most recent call last):\n{line}\n")
    found = Findings(oom.CHECKS)
    oom._judge_message(ON_CUDA, SimpleNamespace(log_path=log, log_end=lambda: line), "full", found)
    assert statuses(found) == {"recognised": expected, "full": expected}


@pytest.mark.parametrize(
    ("incident", "expected"),
    [
        ({"kind": "died", "messages": [{}], "findings": [{"name": "unused_reserve"}]}, ("passed", "passed")),
        ({"kind": "died", "messages": [], "findings": []}, ("failed", "failed")),
        ({"kind": "hung", "messages": [{}], "findings": [{"name": "unused_reserve"}]}, ("failed", "passed")),
    ],
)
def test_an_incident_must_say_why(incident: dict[str, object], expected: tuple[str, str]):
    """That the engine died, by its log; and where it died of fragments, that there were some."""
    found = Findings(oom.CHECKS)
    oom._judge_incident(ON_CUDA, "fragment", {"summary": "the engine died", **incident}, found)
    assert (statuses(found)["verdict"], statuses(found)["fragment"]) == expected


@pytest.mark.parametrize(("gave", "expected"), [(1000, "passed"), (1009, "passed"), (1020, "failed")])
def test_a_figure_of_releasable_bytes_may_be_off_by_a_hundredth(gave: int, expected: str):
    """Of what the release gave."""
    mib = 2**20
    one = {"releasable_bytes": 1000 * mib, "gave_bytes": gave * mib, "driver_bytes": gave * mib}
    one |= {"reserve_bytes": 2000 * mib, "floor_bytes": 900 * mib, "walk_ms": 1.0, "blocks": 300}
    measured = {"rounds": [one, one], "mechanism": "empty_cache", "tensors_stay": True, "graphs": 4}
    found = Findings(allocator.CHECKS)
    allocator._judge("default", {**measured, "graphs_replay": True, "pool_bytes": 800 * mib}, found)
    assert (statuses(found)["foretold_first"], statuses(found)["foretold_later"]) == (expected, expected)
    assert statuses(found)["private_pools_kept"] == "passed"


def test_an_unknown_figure_of_releasable_bytes_fails():
    """The worker was asked after its look at the allocator."""
    one = {"releasable_bytes": None, "gave_bytes": 0, "driver_bytes": 0, "reserve_bytes": 0, "floor_bytes": 0}
    one |= {"walk_ms": 0.0, "blocks": 0}
    found = Findings(allocator.CHECKS)
    measured = {"rounds": [one], "mechanism": "empty_cache", "tensors_stay": True, "graphs": 0}
    allocator._judge("default", measured, found)
    assert statuses(found)["foretold_first"] == "failed"


@pytest.mark.parametrize(("row", "expected"), [("GPU-1, 1000", "passed"), ("GPU-2, 2000", "failed")])
def test_the_drivers_tool_is_the_judge_of_the_reading(monkeypatch: pytest.MonkeyPatch, row: str, expected: str):
    """Identity and used bytes."""
    monkeypatch.setattr(reading, "tool", lambda *command: row if "uuid,memory.used" in command[1] else "500")
    answer = {"device": {"uuid": "GPU-1", "index": 0, "physical_index": 0}, "used_bytes": 1010 * 2**20}
    found = Findings(reading.CHECKS)
    reading._identity(ON_CUDA, answer, found)
    assert statuses(found) == {"driver_agrees": expected, "uuid": expected}


@pytest.mark.parametrize(("outcome", "expected"), [("done", "passed"), (None, "failed")])
def test_the_policy_must_have_released(outcome: str | None, expected: str):
    """An engine that lives by luck proves nothing."""
    status = {
        "rules": [{"remedies": [{"name": "release", "last_outcome": outcome}]}],
        "summary": "",
        "actions_last_hour": 1,
    }
    answers = {"/memory": {"stale": False, "ranks": [{}]}, "/policy": {"status": status}}
    found = Findings(policy.CHECKS)
    policy._judge(SimpleNamespace(call=lambda _, path: answers[path]), found)
    assert statuses(found) == {"relief_done": expected, "is_read": "passed"}
