"""PyTorch's message about a failed allocation is newer than every reading, and the findings use it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.diagnose.evidence import RankEvidence
from highwater.diagnose.incidents.diagnosis import case_of, diagnose, summarize
from highwater.diagnose.log.failed_allocation import NEAR_LINES, FailedAllocation
from highwater.diagnose.log.story import LogStory, story_of
from highwater.units import GIB, MIB
from tests.fakes.incident import AT, TOTAL, evidence, rank, reading

# vLLM's issue 15105, but for the last figure.
CUDA = (
    "(VllmWorker rank=1 pid=2978) ERROR 03-19 07:27:53 [multiproc_executor.py:375] torch.OutOfMemoryError: CUDA out of "
    "memory. Tried to allocate 1.74 GiB. GPU 1 has a total capacity of 23.57 GiB of which 605.88 MiB is free. Process "
    "133288 has 22.97 GiB memory in use. Of the allocated memory 20.21 GiB is allocated by PyTorch, with 128.00 MiB "
    "allocated in private pools (e.g., CUDA Graphs), and 2.25 GiB is reserved by PyTorch but unallocated."
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
# vllm-ascend's issue 19.
NPU = (
    "RuntimeError: NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB already "
    "allocated; 10.24 GiB current active; 19.52 MiB free; 10.65 GiB reserved in total by PyTorch) If reserved memory "
    "is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)


def gib(number: float) -> int:
    return int(number * GIB)


def found(*lines: str) -> list[FailedAllocation]:
    return list(story_of(lines).failed)


def test_the_figures_of_either_message():
    """torch_npu writes what PyTorch wrote before 2.1."""
    of_cuda = FailedAllocation(gib(1.74), gib(23.57), int(605.88 * MIB), gib(20.21), gib(20.21) + gib(2.25), 2978)
    of_npu = FailedAllocation(22 * MIB, gib(60.97), int(19.52 * MIB), gib(10.24), gib(10.65), None)
    assert found(CUDA) == [of_cuda]
    assert found(NPU) == [of_npu]


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        CUDA.partition(", and 2.25 GiB")[0],
        CUDA.replace("Tried to allocate 1.74", f"Tried to allocate {'1' * 40}"),
        CUDA.replace("20.21 GiB is allocated", "a lot is allocated"),
        NPU.replace("10.65 GiB reserved", "9.65 GiB reserved"),
        NPU.replace("10.65 GiB reserved", f"{'9' * 400} GiB reserved"),
        "RuntimeError: NPU out of memory. NPUWorkspaceAllocator tried to allocate 180.00 MiB (NPU 0; 60.96 GiB",
    ],
)
def test_a_message_without_all_figures_says_nothing(line: str):
    """A part of them would be mixed with a reading of another moment."""
    assert found(line) == []


def test_the_last_failure_of_a_process_counts():
    """Whatever came before it; where it cannot be read, nothing is known."""
    later = CUDA.replace("605.88 MiB is free", "5.88 MiB is free")
    assert [failed.free_bytes for failed in found(CUDA, later)] == [int(5.88 * MIB)]
    assert found(CUDA, later.partition(" of which")[0]) == []
    other = later.replace("pid=2978", "pid=2979")
    assert [(failed.pid, failed.free_bytes) for failed in found(CUDA, other, "", "")] == [
        (2978, int(605.88 * MIB)),
        (2979, int(5.88 * MIB)),
    ]


END = "(EngineCore_DP0 pid=1) ERROR 03-19 {} [core.py:842] EngineCore encountered a fatal error."


@pytest.mark.parametrize(
    ("after", "count"),
    [
        ([END.format("07:28:52")], 1),
        ([END.format("07:28:54")], 0),
        ([END.format("14:32:00")], 0),
        ([END.format("07:27:53")] + ["  File x.py"] * 1000, 1),
        ([END.format("07:27:53"), "2026-03-19T14:32:00.5Z stderr F (EngineCore_DP0 pid=1) died"], 0),
    ],
)
def test_a_failure_that_the_engine_survived_does_not_count(after: list[str], count: int):
    """By the times of the log's own lines, whatever the clock's zone is; a traceback has none."""
    assert len(found(CUDA, *after)) == count


@pytest.mark.parametrize(("after", "count"), [(NEAR_LINES - 1, 1), (NEAR_LINES, 0)])
def test_in_a_log_without_times_its_lines_count(after: int, count: int):
    """The last ones are a traceback's."""
    assert len(found(NPU, *["a line"] * after)) == count


def test_the_turn_of_the_year_is_no_year_ago():
    """A log's lines name no year."""
    old = CUDA.replace("03-19 07:27:53", "12-31 23:59:50")
    assert len(found(old, END.replace("03-19", "01-01").format("00:00:20"))) == 1
    assert len(found(old.replace("12-31 23:59:50", "13-32 25:61:61"))) == 1


def ranked(number: int, pid: int | None, total: int | None) -> RankEvidence:
    return replace(rank(reading(rank=number, total_bytes=total)), rank=number, pid=pid)


def test_two_ranks_that_may_have_written_it_did_not():
    """Containers give the same small pids again; and a device of another size is another rank's."""
    twins = [ranked(number, 2978, gib(23.57)) for number in (0, 1)]
    assert [one.failed_allocation_bytes for one in case("died", CUDA, *twins).ranks] == [None, None]
    assert case("died", CUDA, ranked(0, 2978, gib(60.97))).ranks[0].failed_allocation_bytes is None
    mixed = [ranked(0, 2978, gib(60.97)), ranked(1, 2978, gib(23.57))]
    assert [one.failed_allocation_bytes for one in case("died", CUDA, *mixed).ranks] == [None, gib(1.74)]


def case(kind, line, *ranks):
    return case_of(replace(evidence(kind), ranks=ranks), LogStory(failed=tuple(found(line))))


def test_it_belongs_to_the_process_that_wrote_it():
    """The other ranks keep their readings."""
    ranks = [ranked(number, pid, gib(23.57)) for number, pid in ((0, 2977), (1, 2978))]
    first, second = case("died", CUDA, *ranks).ranks
    assert (first.failed_allocation_bytes, first.now) == (None, case("died", "nothing", *ranks).ranks[0].now)
    assert (second.failed_allocation_bytes, second.now.free_bytes) == (gib(1.74), int(605.88 * MIB))
    assert second.unused_bytes == gib(2.25)
    assert (second.now.taken_at, second.now.releasable_bytes) == (AT, 0)
    unknown = case("died", CUDA, ranked(1, 2978, None)).ranks[0].now
    assert (unknown.total_bytes, unknown.used_bytes) == (gib(23.57), gib(23.57) - int(605.88 * MIB))


def test_a_line_without_a_process_is_the_only_ranks():
    """Of several it could be any."""
    ranks = [ranked(number, number + 1, gib(60.97)) for number in (0, 1)]
    assert [one.failed_allocation_bytes for one in case("died", NPU, *ranks[:1]).ranks] == [22 * MIB]
    assert [one.failed_allocation_bytes for one in case("died", NPU, *ranks).ranks] == [None, None]


def test_an_engine_that_hangs_did_not_die_of_it():
    """A message of its life, hours ago perhaps, is not of this moment."""
    assert case("hung", NPU, ranked(0, 1, gib(60.97))).ranks[0].failed_allocation_bytes is None


FRAGMENTED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 60.96 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 32.00 GiB is allocated by PyTorch, and 30.00 GiB is reserved "
    "by PyTorch but unallocated."
)


def test_a_device_that_fragmented_within_one_step_is_explained():
    """The last reading was before it: by that alone the device had room, and the memory was not the reason."""
    calm = replace(evidence("died"), ranks=(rank(reading(free_bytes=TOTAL // 2, used_bytes=TOTAL - TOTAL // 2)),))
    assert {"device_had_room"} <= {each.name for each in diagnose(calm)}
    log = story_of([FRAGMENTED])
    findings = diagnose(calm, log)
    by_name = {each.name: each for each in findings}
    assert "device_had_room" not in by_name
    reserve = by_name["unused_reserve"]
    assert (reserve.weight, reserve.figures["inactive_split_bytes"]) == ("likely", 30 * GIB)
    assert "when it found no piece of 2,048.0 MiB" in reserve.text
    assert "held 30,720.0 MiB" in summarize(calm, findings, log)


def test_a_device_that_was_full_is_said_to_be_full():
    """With next to nothing unallocated it is no fragmentation."""
    full = FRAGMENTED.replace("1.00 GiB is free", "100.00 MiB is free").replace("32.00 GiB", "60.30 GiB")
    full = full.replace("30.00 GiB is reserved", "20.00 MiB is reserved")
    calm = replace(evidence("died"), ranks=(rank(reading(free_bytes=TOTAL // 2, used_bytes=TOTAL - TOTAL // 2)),))
    names = {each.name for each in diagnose(calm, story_of([full]))}
    assert "device_full" in names
    assert names.isdisjoint({"unused_reserve", "device_had_room"})
