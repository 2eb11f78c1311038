"""PyTorch's message about a failed allocation is newer than every reading, and the findings use it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.diagnose.case import of_incident
from highwater.diagnose.evidence import RankEvidence
from highwater.diagnose.finding import ADVICE
from highwater.diagnose.incidents.diagnosis import summarize
from highwater.diagnose.log.messages import FailedAllocation
from highwater.diagnose.log.record import NEAR_LINES
from highwater.diagnose.log.story import LogStory, story_of
from highwater.model.units import GIB, MIB
from tests.fakes.incident import AT, TOTAL, diagnosed, evidence, rank, reading

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
WORKSPACE = (
    "RuntimeError: NPU out of memory. NPUWorkspaceAllocator tried to allocate 180.00 MiB (NPU 1; 60.96 GiB total "
    "capacity; 86.81 MiB free)"
)


def gib(number: float) -> int:
    return int(number * GIB)


def found(*lines: str) -> list[FailedAllocation]:
    return list(story_of(lines).failed)


def test_the_figures_of_either_message():
    """torch_npu writes what PyTorch wrote before 2.1; its workspaces know nothing of PyTorch's allocator."""
    of_cuda = FailedAllocation(
        platform="cuda",
        tried_bytes=gib(1.74),
        total_bytes=gib(23.57),
        free_bytes=int(605.88 * MIB),
        allocated_bytes=gib(20.21),
        reserved_bytes=gib(20.21) + gib(2.25),
        pid=2978,
    )
    of_npu = FailedAllocation(
        platform="npu",
        tried_bytes=22 * MIB,
        total_bytes=gib(60.97),
        free_bytes=int(19.52 * MIB),
        allocated_bytes=gib(10.24),
        reserved_bytes=gib(10.65),
    )
    assert found(CUDA) == [of_cuda]
    assert found(NPU) == [of_npu]
    assert found(WORKSPACE) == [
        FailedAllocation(platform="npu", tried_bytes=180 * MIB, total_bytes=gib(60.96), free_bytes=int(86.81 * MIB))
    ]


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        CUDA.partition(", and 2.25 GiB")[0],
        CUDA.replace("Tried to allocate 1.74", f"Tried to allocate {'1' * 40}"),
        CUDA.replace("20.21 GiB is allocated", "a lot is allocated"),
        NPU.replace("10.65 GiB reserved", "9.65 GiB reserved"),
        NPU.replace("10.65 GiB reserved", f"{'9' * 400} GiB reserved"),
        WORKSPACE.partition(" total")[0],
    ],
)
def test_a_message_without_all_figures_says_nothing(line: str):
    """A part of them would be mixed with a reading of another moment."""
    assert found(line) == []


def test_the_last_failure_of_a_process_counts():
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
    assert len(found(CUDA, *after)) == count


@pytest.mark.parametrize(("after", "count"), [(NEAR_LINES - 1, 1), (NEAR_LINES, 0)])
def test_in_a_log_without_times_its_lines_count(after: int, count: int):
    assert len(found(NPU, *["a line"] * after)) == count


def test_the_turn_of_the_year_is_no_year_ago():
    old = CUDA.replace("03-19 07:27:53", "12-31 23:59:50")
    assert len(found(old, END.replace("03-19", "01-01").format("00:00:20"))) == 1
    assert len(found(old.replace("12-31 23:59:50", "13-32 25:61:61"))) == 1


def ranked(number: int, pid: int | None, total: int | None) -> RankEvidence:
    return replace(rank(reading(rank=number, total_bytes=total)), rank=number, pid=pid)


def test_two_ranks_that_may_have_written_it_did_not():
    twins = [ranked(number, 2978, gib(23.57)) for number in (0, 1)]
    assert [one.failed_allocation_bytes for one in case("died", CUDA, *twins).ranks] == [None, None]
    for other in (60.97, 24.0):
        assert case("died", CUDA, ranked(0, 2978, gib(other))).ranks[0].failed_allocation_bytes is None
    mixed = [ranked(0, 2978, gib(60.97)), ranked(1, 2978, gib(23.57))]
    assert [one.failed_allocation_bytes for one in case("died", CUDA, *mixed).ranks] == [None, gib(1.74)]


def case(kind, line, *ranks):
    return of_incident(replace(evidence(kind), ranks=ranks), LogStory(failed=tuple(found(line))))


def test_it_belongs_to_the_process_that_wrote_it():
    ranks = [ranked(number, pid, gib(23.57)) for number, pid in ((0, 2977), (1, 2978))]
    first, second = case("died", CUDA, *ranks).ranks
    assert (first.failed_allocation_bytes, first.now) == (None, case("died", "nothing", *ranks).ranks[0].now)
    assert (second.failed_allocation_bytes, second.now.free_bytes) == (gib(1.74), int(605.88 * MIB))
    assert second.unused_bytes == gib(2.25)
    assert (second.now.taken_at, second.now.releasable_bytes) == (AT, 0)
    unknown = case("died", CUDA, ranked(1, 2978, None)).ranks[0].now
    assert (unknown.total_bytes, unknown.used_bytes) == (gib(23.57), gib(23.57) - int(605.88 * MIB))


def test_a_line_without_a_process_is_the_only_ranks():
    ranks = [ranked(number, number + 1, gib(60.97)) for number in (0, 1)]
    assert [one.failed_allocation_bytes for one in case("died", NPU, *ranks[:1]).ranks] == [22 * MIB]
    assert [one.failed_allocation_bytes for one in case("died", NPU, *ranks).ranks] == [None, None]


@pytest.mark.parametrize("ranks", [[ranked(1, 2978, gib(23.57))], [ranked(n, 40 + n, gib(23.57)) for n in (0, 1)]])
@pytest.mark.parametrize("quote", ["", "RuntimeError: Worker failed with error '"])
def test_what_engine_core_says_is_quoted_from_a_rank(ranks, quote):
    line = CUDA.replace("VllmWorker rank=1 pid=2978", "EngineCore pid=900").replace(
        "torch.OutOf", f"{quote}torch.OutOf"
    )
    given = replace(evidence("died"), ranks=tuple(ranks))
    assert [one.failed_allocation_bytes for one in case("died", line, *ranks).ranks][:1] == [
        gib(1.74) if len(ranks) == 1 else None
    ]
    findings = diagnosed(given, story_of([line]))
    assert next(one for one in findings if one.name == "failed_allocation").figures["tried_bytes"] == gib(1.74)
    assert "device_had_room" not in {one.name for one in findings}


def test_a_failure_that_engine_core_repeats_is_one():
    again = CUDA.replace("VllmWorker rank=1 pid=2978", "EngineCore pid=900")
    again = again.replace("torch.OutOf", "RuntimeError: Worker failed with error 'torch.OutOf")
    assert [failed.pid for failed in found(CUDA, again)] == [2978]


def test_an_engine_that_hangs_did_not_die_of_it():
    assert case("hung", NPU, ranked(0, 1, gib(60.97))).ranks[0].failed_allocation_bytes is None


# --- the four reasons ---


WORKER = "(Worker_TP0 pid=4242) ERROR 11-21 14:32:33 [multiproc_executor.py:966] "


def cuda(tried: str, free: str, allocated: str, unused: str, *, total="60.96 GiB", in_use="", name="CUDA") -> str:
    counted = f" Including non-PyTorch memory, this process has {in_use} memory in use." if in_use else ""
    return (
        f"{WORKER}torch.OutOfMemoryError: {name} out of memory. Tried to allocate {tried}. GPU 0 has a total capacity "
        f"of {total} of which {free} is free.{counted} Of the allocated memory {allocated} is allocated by PyTorch, "
        f"and {unused} is reserved by PyTorch but unallocated."
    )


def npu(tried: str, free: str, allocated: str, reserved: str) -> str:
    return (
        f"{WORKER}RuntimeError: NPU out of memory. Tried to allocate {tried} (NPU 0; 60.96 GiB total capacity; "
        f"{allocated} already allocated; {allocated} current active; {free} free; {reserved} reserved in total by "
        "PyTorch) If reserved memory is >> allocated"
    )


LARGER, FRAGMENTS = "more than", "that no tensor used"
OTHERS, SHARE = "other processes held", "the engine itself"
IMAGE, UTILIZATION = "--mm-encoder-attn-backend", "--gpu-memory-utilization"
CUDA_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
NPU_SEGMENTS = "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"
SMI = "npu-smi info, nvidia-smi"
REASONS = [
    (cuda("256.00 GiB", "8.07 GiB", "7.14 GiB", "320.85 MiB", total="15.98 GiB", name="HIP"), LARGER, IMAGE),
    (cuda("61.00 GiB", "60.00 GiB", "0 bytes", "0 bytes", name="XPU"), LARGER, IMAGE),
    (npu("96.00 GiB", "50.00 GiB", "9.00 GiB", "9.50 GiB"), LARGER, IMAGE),
    (cuda("45.00 GiB", "1.00 GiB", "50.00 GiB", "1.00 GiB"), LARGER, IMAGE),  # beside all but 17,900 MiB of KV cache
    (cuda("2.00 GiB", "1.00 GiB", "32.00 GiB", "27.00 GiB"), FRAGMENTS, CUDA_SEGMENTS),
    (cuda("1.50 GiB", "1.00 GiB", "58.00 GiB", "700.00 MiB"), FRAGMENTS, CUDA_SEGMENTS),
    (npu("22.00 MiB", "19.52 MiB", "54.77 GiB", "59.38 GiB"), FRAGMENTS, NPU_SEGMENTS),
    (cuda("896.00 MiB", "100.00 MiB", "30.00 GiB", "150.00 MiB", in_use="31.00 GiB"), OTHERS, SMI),
    (npu("22.00 MiB", "19.52 MiB", "10.24 GiB", "10.65 GiB"), OTHERS, SMI),
    (cuda("18.27 GiB", "15.08 GiB", "45.00 GiB", "512.00 MiB", in_use="45.80 GiB"), SHARE, UTILIZATION),
    (cuda("896.00 MiB", "768.00 KiB", "60.00 GiB", "150.52 MiB", in_use="0 bytes"), SHARE, UTILIZATION),
    (cuda("896.00 MiB", "10.00 MiB", "57.50 GiB", "150.52 MiB"), SHARE, UTILIZATION),
    (npu("512.00 MiB", "86.81 MiB", "59.00 GiB", "59.20 GiB"), SHARE, UTILIZATION),
    (cuda("1.00 GiB", "9.01 GiB", "10.00 GiB", "0 bytes", name="XPU"), "though 9.01 GiB were free", SMI),
]


@pytest.mark.parametrize(("line", "said", "advised"), REASONS)
@pytest.mark.parametrize("kind", ["died", "out_of_memory", "start_failed"])
def test_the_figures_say_what_helps(line, said, advised, kind):
    known = evidence(kind, rank(reading(free_bytes=TOTAL // 2, used_bytes=TOTAL - TOTAL // 2)))
    finding = next(one for one in diagnosed(known, story_of([line])) if one.name == "failed_allocation")
    assert said in finding.title
    assert finding.weight == "likely"
    settings = [advice.setting for advice in finding.advice]
    assert settings[0] == advised or advised in settings
    if said in {LARGER, OTHERS, SHARE}:
        assert not any("expandable" in setting for setting in settings)
    assert ("--gpu-memory-utilization" in settings) is (said not in {LARGER, FRAGMENTS})


def test_a_full_device_is_not_told_twice():
    full = evidence("out_of_memory", rank(reading(free_bytes=MIB, used_bytes=TOTAL - MIB)))
    log = story_of([npu("512.00 MiB", "86.81 MiB", "59.00 GiB", "59.20 GiB")])
    findings = diagnosed(full, log)
    assert {"failed_allocation", "device_full"} <= {one.name for one in findings if one.weight == "likely"}
    assert "the engine itself" in summarize(of_incident(full, log), findings)
    assert "MiB free of" not in summarize(of_incident(full, log), findings)


def test_a_start_without_a_kv_cache_has_no_share_to_lower():
    def title(kind, allocated):
        log = story_of(
            [cuda("12.00 GiB", f"{16 - allocated}.00 GiB", f"{allocated}.00 GiB", "0 bytes", total="16.00 GiB")]
        )
        return next(one for one in diagnosed(evidence(kind), log) if one.name == "failed_allocation").title

    assert "leave beside 7.00 GiB in use without the KV cache" in title("start_failed", 7)
    assert SHARE in title("start_failed", 14)
    assert SHARE in title("died", 7)


def test_what_readings_advise_does_not_contradict_the_figures():
    """A count of failures alone would lower the share."""
    line = cuda("256.00 GiB", "8.00 GiB", "40.00 GiB", "0 bytes")
    counted = reading(free_bytes=MIB, used_bytes=TOTAL - MIB, torch=replace(reading().torch, ooms=1))
    findings = diagnosed(evidence("died", rank(counted), baseline=(reading(),)), story_of([line]))
    assert {one.name for one in findings} >= {"ooms", "failed_allocation"}
    assert [one.name for one in findings if ADVICE["gpu_memory_utilization"] in one.advice] == []


def test_a_workspace_is_judged_by_the_reading_before_it():
    """Its message knows nothing of PyTorch's allocator, which held the room that it lacked."""
    held = replace(reading().torch, allocated_bytes=54_770 * MIB, reserved_bytes=59_380 * MIB)
    known = evidence("died", rank(reading(torch=held, total_bytes=gib(60.96))))
    finding = next(one for one in diagnosed(known, story_of([WORKSPACE])) if one.name == "failed_allocation")
    assert FRAGMENTS in finding.title
    assert finding.figures["unused_bytes"] == (59_380 - 54_770) * MIB


FRAGMENTED = cuda("2.00 GiB", "1.00 GiB", "32.00 GiB", "27.00 GiB")


def test_a_device_that_fragmented_within_one_step_is_explained():
    calm = replace(evidence("died"), ranks=(rank(reading(free_bytes=TOTAL // 2, used_bytes=TOTAL - TOTAL // 2)),))
    assert {"device_had_room"} <= {each.name for each in diagnosed(calm)}
    log = story_of([FRAGMENTED])
    findings = diagnosed(calm, log)
    by_name = {each.name: each for each in findings}
    assert "device_had_room" not in by_name
    assert by_name["unused_reserve"].figures["inactive_split_bytes"] == 27 * GIB
    said = summarize(of_incident(calm, log), findings)
    assert "2.00 GiB were asked for while PyTorch held 27.00 GiB that no tensor used" in said


def test_a_device_that_was_full_is_said_to_be_full():
    full = cuda("2.00 GiB", "100.00 MiB", "60.30 GiB", "20.00 MiB")
    calm = replace(evidence("died"), ranks=(rank(reading(free_bytes=TOTAL // 2, used_bytes=TOTAL - TOTAL // 2)),))
    names = {each.name for each in diagnosed(calm, story_of([full]))}
    assert "device_full" in names
    assert names.isdisjoint({"unused_reserve", "device_had_room"})


# --- host memory ---

RAY = [
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "Memory on the node (IP: 10.45.33.204, ID: 3486) where the task (actor ID: 46c8, name=RayWorkerWrapper.__init__, "
    "pid=13378, memory used=3.37GB) was running was 2152.43GB / 2265.25GB (0.950196), which exceeds the memory usage "
    "threshold of 0.95. Ray killed this worker (ID: 5dd7) because it was the most recently scheduled task. Top 10:",
    "PID  MEM(GB) COMMAND",
    "13377        2077.83 ray::RayWorkerWrapper.__ray_call__",
    "13376        7.10 ray::IDLE",
]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
             "you tried to allocate 42949672960 bytes. Error code 12 (Cannot allocate memory)"],
            "40.00 GiB of host memory were asked for at once",
        ),
        (
            ["numpy._core._exceptions._ArrayMemoryError: Unable to allocate 2.00 GiB for an array with shape (1, 2)"],
            "2.00 GiB of host memory were asked for at once",
        ),
        (
            ["RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in /dev/shm: 16384 MiB "
             "required, 7800 MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host)."],
            "16.00 GiB were needed in /dev/shm and 7.62 GiB were free",
        ),
        (
            RAY,
            "95% of the node's 2,265 GB of host memory were in use, 2,078 GB of them by process 13377 "
            "(ray::RayWorkerWrapper.__ray_call__)",
        ),
        (RAY[:2], "95% of the node's 2,265 GB of host memory were in use"),
    ],
)  # fmt: skip
def test_figures_of_host_memory(lines, said):
    at_core = [f"(EngineCore pid=900) ERROR 03-21 17:27:44 [core.py:340] {line}" for line in lines]
    findings = diagnosed(evidence("died"), log := story_of(at_core))
    assert next(one for one in findings if one.name == "host_shortage").title == said
    assert said in (summary := summarize(of_incident(evidence("died"), log), findings))
    assert "device memory was not short" not in summary
