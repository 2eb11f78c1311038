"""What the numbers say: each finding where it should be, none where it should not, and no word about the unknown."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from highwater.diagnose.case import latest, of_incident
from highwater.diagnose.evidence import Evidence, HangBefore, RankEvidence
from highwater.diagnose.finding import ADVICE, COMPONENT_MEANING, Advice, Finding
from highwater.diagnose.incidents.diagnosis import memory_at_end
from highwater.diagnose.log.messages import ended_by_signal
from highwater.diagnose.log.story import NO_LOG, story_of
from highwater.diagnose.rules.book import RULES
from highwater.host.needs import CacheCopy, ProcessorCaches
from highwater.host.past import Fill, HostFacts
from highwater.host.reading import HostReading, ProcessMemory
from highwater.host.report import GrownPart, OomKills
from highwater.model.components import MemoryPoint
from highwater.model.engine import EngineLoad, EngineStatus, WorkCounts
from highwater.model.growth import Growth, GrowthRate, SeriesGrowth
from highwater.model.policy import PolicyStatus, RankPressure, RuleStatus
from highwater.model.rank import Components, Device, EncoderCache, HostMemory, Launch, TorchMemory
from tests.fakes.incident import AT, MIB, TOTAL, diagnosed, entry, evidence, rank, reading, summarized, unknown
from tests.unit.diagnose.log.prefixes import match

FULL = 61_548 * MIB  # the story's, after its benchmark


def torch(**changes) -> TorchMemory:
    return replace(reading().torch, **changes)


def parts(**changes) -> Components:
    return replace(reading().components, **changes)


def host(used: int | None, limit: int | None, **changes) -> HostMemory:
    return HostMemory(cgroup_used_bytes=used, cgroup_limit_bytes=limit, **changes)


def cache(size: int, capacity: int | None = 16_384) -> EncoderCache:
    return EncoderCache(entries=31, device_bytes=size, capacity_embeds=capacity)


def with_cache(size: int, embeds: int | None = None, capacity: int | None = 16_384) -> RankEvidence:
    """A rank whose entries have 8 MiB each; of 64 embeddings, 16,384 embeddings are 256 of them, or 2 GiB."""
    return rank(reading(encoder_cache=cache(size, capacity)), entries=(entry(embeds=embeds),))


def started(**launch) -> RankEvidence:
    """A rank, and what it was started with."""
    return rank(reading(launch=Launch(**launch)))


def fragmented(kind: str, grown: int, *, segments: bool | None) -> Evidence:
    """A rank on which memory outside PyTorch grew since the engine was ready."""
    first = reading()
    grew = parts(non_torch_bytes=first.components.non_torch_bytes + grown)
    now = reading(components=grew, launch=Launch(expandable_segments=segments))
    return evidence(kind, rank(now), baseline=(first,))


def engine(version: str | None) -> EngineStatus:
    return EngineStatus(url="http://engine", state="gone", version=version)


def policy(
    phase: str, mode: str = "act", level: str | None = None, ranks: tuple[RankPressure, ...] = ()
) -> PolicyStatus:
    reason = "short by 100 MiB on rank 0"
    rule = RuleStatus(name="device", signal="device_free_bytes", phase=phase, reason=reason, ranks=ranks)
    level = level or ("calm" if phase == "calm" else "short")
    return PolicyStatus(level=level, mode=mode, summary=reason, rules=(rule,))


def risen(kind: str, counter: str, first: int | None, last: int | None) -> Evidence:
    """A rank on which a counter of the allocator went from the first value to the last since the engine was ready."""
    baseline, known = (reading(torch=torch(**{counter: value})) for value in (first, last))
    return evidence(kind, rank(known), baseline=(baseline,))


def leaking(owner: str = "API server") -> SeriesGrowth:
    return SeriesGrowth(
        series=f"{owner} anonymous_bytes",
        owner=owner,
        measure="anonymous_bytes",
        place="host",
        unit="bytes",
        verdict="leak",
        text="it leaked 3.0 MiB per request (2.9 MiB to 3.1 MiB)",
        rate=GrowthRate(driver="request", per_driver=3 * MIB, low=2.9 * MIB, high=3.1 * MIB),
        floors=20,
        window_seconds=600.0,
        is_over=True,
    )


# An idle rank writes no samples: by its last one the container was full a minute and more ago.
STALE_RANK = rank(reading(host_memory=host(63_000 * MIB, 64_000 * MIB), taken_at=AT - 61))
LEAKER = GrownPart(
    kind="process",
    name="EngineCore",
    role="engine_core",
    pid=7,
    bytes=2406 * MIB,
    at=AT - 3,
    grown_bytes=1956 * MIB,
    seconds=240.0,
)
HELD = replace(LEAKER, name="worker rank 0", role="worker", grown_bytes=0, seconds=0.0)
CACHES = ProcessorCaches(
    kind="lru", copies=(CacheCopy(where="engine_core", copies=1, limit_bytes=1, holds="data"),), queries=0
)


def facts(
    *, fill: float | None = None, together: int = 0, part: GrownPart | None = None, caches: ProcessorCaches = CACHES
) -> HostFacts:
    """Host memory as read after the end, three seconds after the container had been so full."""
    fullest = None
    if fill is not None:
        fullest = Fill(at=AT - 3, used_bytes=int(fill * 5000) * MIB, whole_bytes=5000 * MIB, is_limited=True)
    parts = () if part is None else (part,)
    reading = HostReading(taken_at=AT)
    return HostFacts(reading=reading, fullest=fullest, parts=parts, ended_together=together, caches=caches)


# Its weight and words stand in golden/findings.txt.
FOUND: list[tuple[str, Evidence]] = [
    ("killed_by_kernel", evidence("died", oom_kills=OomKills(count=1, where="counted where rank 0 runs"))),
    ("killed_by_kernel", evidence("out_of_memory", oom_kills=OomKills(count=2, where="counted by rank 0"))),
    ("cause_not_known", evidence("died")),
    ("cause_not_known", evidence("start_failed", oom_kills=OomKills(count=0, where="counted"))),
    ("kill_not_known", evidence("died")),
    ("kill_not_known", evidence("died", ended_by_signal=9, host=facts(fill=0.5, together=3))),
    ("kill_not_known", evidence("died", host=facts(fill=0.5))),
    ("hang_ended", evidence("died", hang=HangBefore(seconds=124.0, open_seconds=114.0))),
    ("hang_ended", evidence("died", hang=HangBefore(seconds=39.0, open_seconds=9.0))),
    ("ended_by_signal", evidence("died", ended_by_signal=9)),
    ("ended_by_signal", evidence("died", ended_by_signal=40)),
    ("ended_by_signal", evidence("died", ended_by_signal=9, oom_kills=OomKills(count=0, where="the group of rank 1"))),
    ("device_full", evidence("died", rank(reading(used=FULL)), baseline=(reading(),))),
    ("device_full", evidence("died", rank(reading(used=FULL)))),
    ("device_full", evidence("died", rank(reading(used=FULL)), baseline=(reading(used=FULL),))),
    ("device_full", evidence("out_of_memory", rank(reading(0)), rank(reading(1, used=FULL)))),
    ("device_full", evidence("hung", rank(reading(used=FULL)))),
    ("device_full", evidence("died", rank(replace(reading(used=FULL), taken_at=AT - 90)))),
    ("device_had_room", evidence("died")),
    ("device_had_room", evidence("out_of_memory")),
    ("over_budget", evidence("died", rank(reading(used=60_000 * MIB)))),
    ("encoder_not_profiled", evidence("died", started(encoder_unprofiled_by="vllm_ascend"))),
    ("encoder_not_profiled", evidence("died", started(encoder_unprofiled_by="runner_v2"))),
    ("without_expandable_segments", fragmented("died", 900 * MIB, segments=False)),
    ("without_expandable_segments", fragmented("out_of_memory", 900 * MIB, segments=False)),
    ("without_expandable_segments", fragmented("out_of_memory", 900 * MIB, segments=None)),
    ("leaks", evidence("died", growth=Growth(series=(leaking(), leaking("EngineCore"))))),
    ("leaks", evidence("hung", growth=Growth(series=(leaking(),)))),
    ("growth", evidence("died", growth=Growth(since_ready_bytes=3_782 * MIB, bytes_per_second=70.0 * MIB))),
    ("growth", evidence("died", growth=Growth(since_ready_bytes=3_782 * MIB))),
    (
        "growth",
        evidence(
            "died", growth=Growth(since_ready_bytes=9_000 * MIB, bytes_per_second=10.0 * MIB, seconds_to_full=4_482.0)
        ),
    ),
    (
        "growth",
        evidence(
            "died",
            rank(reading(components=parts(encoder_cache_bytes=3_000 * MIB))),
            baseline=(reading(components=parts(encoder_cache_bytes=0)),),
        ),
    ),
    (
        "growth",
        evidence(
            "died",
            rank(
                reading(components=parts(non_torch_bytes=4_000 * MIB)),
                series=(MemoryPoint(at=AT - 60, used_bytes=None, components=parts()),),
            ),
        ),
    ),
    (
        "unused_reserve",
        evidence("died", rank(reading(torch=torch(allocated_bytes=30_000 * MIB, reserved_bytes=34_000 * MIB)))),
    ),
    (
        "unused_reserve",
        evidence(
            "out_of_memory",
            rank(reading(used=FULL, torch=torch(allocated_bytes=54_000 * MIB, reserved_bytes=59_000 * MIB))),
        ),
    ),
    (
        "unused_reserve",
        evidence(
            "hung", rank(reading(used=FULL, torch=torch(allocated_bytes=54_000 * MIB, reserved_bytes=59_000 * MIB)))
        ),
    ),
    ("alloc_retries", risen("died", "alloc_retries", 0, 3)),
    (
        "alloc_retries",
        evidence(
            "died", rank(reading(torch=torch(alloc_retries=2))), baseline=(reading(torch=torch(alloc_retries=0)),)
        ),
    ),
    ("ooms", risen("out_of_memory", "ooms", 1, 2)),
    ("skew", evidence("died", rank(reading(0, used=45_000 * MIB)), rank(reading(1)))),
    ("lost_ranks", evidence("hung", rank(reading(0)), rank(reading(1), status="dead"))),
    ("lost_ranks", evidence("out_of_memory", rank(reading(0)), rank(reading(1), status="silent"))),
    ("stopped_ranks", evidence("hung", rank(reading(0), status="stopped"))),
    ("long_step", evidence("hung", rank(step_seconds=61.0, stack=("model.py:12 forward",)))),
    ("long_step", evidence("died", rank(step_seconds=12.0))),
    ("encoder_cache", evidence("died", with_cache(3_000 * MIB))),
    ("encoder_cache", evidence("died", with_cache(1_900 * MIB, embeds=64))),
    ("encoder_cache", evidence("died", with_cache(6_000 * MIB, embeds=64))),
    ("encoder_cache", evidence("died", with_cache(1_000 * MIB, embeds=64))),
    ("host_memory", evidence("died", rank(reading(host_memory=host(63_000 * MIB, 64_000 * MIB))))),
    ("host_memory", evidence("hung", rank(reading(host_memory=host(63_000 * MIB, 64_000 * MIB))))),
    ("host_memory", evidence("died", rank(reading(host_memory=host(58_000 * MIB, 64_000 * MIB))))),
    (
        "host_memory",
        evidence(
            "died", rank(reading(host_memory=host(None, None, node_total_bytes=100 * MIB, node_available_bytes=MIB)))
        ),
    ),
    ("host_memory", evidence("died", host=facts(fill=0.97))),
    ("host_memory", evidence("start_failed", host=facts(fill=0.97))),
    ("host_memory", evidence("died", host=facts(fill=0.91, together=3))),
    ("host_memory", evidence("died", host=facts(fill=0.91))),
    ("kv_cache_full", evidence("hung", load=EngineLoad(kv_cache_usage_ratio=0.99, requests_waiting=40))),
    (
        "kv_cache_full",
        evidence(
            "hung", load=EngineLoad(), engine=EngineStatus(url="http://e", state="gone", kv_cache_usage_ratio=1.0)
        ),
    ),
    ("policy", evidence("died", policy=policy("resting"))),
    ("policy", evidence("died", policy=policy("held", level="held"), policy_before=policy("short"))),
    ("policy", evidence("died", policy=policy("held", level="unknown"), policy_before=policy("short"))),
    ("policy", evidence("died", policy=policy("short", "observe"))),
    ("no_readings", evidence("died", rank(unknown()))),
    ("no_readings", Evidence(kind="died", at=AT, engine=engine(None))),
]

NOT_FOUND: list[tuple[str, Evidence]] = [
    ("killed_by_kernel", evidence("died")),
    ("killed_by_kernel", evidence("died", oom_kills=OomKills(count=0, where="counted where rank 0 runs"))),
    ("cause_not_known", evidence("hung")),
    ("cause_not_known", evidence("died", ended_by_signal=11)),
    ("cause_not_known", evidence("died", oom_kills=OomKills(count=1, where="counted"))),
    ("kill_not_known", evidence("hung")),
    ("kill_not_known", evidence("died", ended_by_signal=11)),
    ("kill_not_known", evidence("died", oom_kills=OomKills(count=0, where="counted"))),
    ("hang_ended", evidence("died")),
    ("ended_by_signal", evidence("died")),
    ("leaks", evidence("died")),
    ("leaks", evidence("died", growth=Growth(series=(replace(leaking(), verdict="plateau", rate=None),)))),
    ("device_full", evidence("died")),
    ("device_full", evidence("died", rank(reading(used=FULL, free_bytes=None)))),
    ("device_full", evidence("died", rank(reading(used=FULL, total_bytes=None)))),
    ("device_had_room", evidence("died", rank(reading(0)), rank(reading(1, used=61_500 * MIB)))),
    ("device_had_room", evidence("died", rank(reading(0)), rank(unknown(1)))),
    ("over_budget", evidence("died", rank(reading(used=56_400 * MIB)))),
    ("over_budget", evidence("died", rank(replace(reading(used=FULL), budget=unknown().budget)))),
    ("encoder_not_profiled", evidence("died", engine=engine("0.12.0"))),
    ("without_expandable_segments", fragmented("out_of_memory", 900 * MIB, segments=True)),
    ("without_expandable_segments", fragmented("out_of_memory", 90 * MIB, segments=False)),
    ("growth", evidence("died", growth=Growth(since_ready_bytes=100 * MIB, bytes_per_second=1.0))),
    ("growth", evidence("died", growth=Growth(since_ready_bytes=-4_000 * MIB))),
    ("growth", evidence("died", growth=Growth(bytes_per_second=9.0 * MIB))),
    ("growth", evidence("died", rank(reading()), baseline=(reading(),))),
    ("growth", evidence("died", rank(reading()), baseline=(unknown(),))),
    (  # another process: the engine was started again since
        "growth",
        evidence("died", rank(reading()), baseline=(reading(pid=1, components=parts(weights_bytes=0)),)),
    ),
    (
        "unused_reserve",
        evidence("died", rank(reading(torch=torch(allocated_bytes=30_000 * MIB, reserved_bytes=31_000 * MIB)))),
    ),
    ("unused_reserve", evidence("died", rank(reading(torch=torch(allocated_bytes=None))))),
    ("alloc_retries", risen("died", "alloc_retries", 3, 3)),
    ("alloc_retries", evidence("died", rank(reading(torch=torch(alloc_retries=7))))),
    ("alloc_retries", risen("died", "alloc_retries", None, 7)),
    ("alloc_retries", risen("died", "alloc_retries", 0, None)),
    ("ooms", risen("out_of_memory", "ooms", 2, 2)),
    ("skew", evidence("died", rank(reading(0, used=45_000 * MIB)))),
    ("skew", evidence("died", rank(reading(0, used=40_900 * MIB)), rank(reading(1)))),
    ("skew", evidence("died", rank(reading(0, used=60_000 * MIB)), rank(unknown(1)))),
    ("skew", evidence("died", rank(reading(0, used=60_000 * MIB, total_bytes=2 * TOTAL)), rank(reading(1)))),
    ("lost_ranks", evidence("hung")),
    ("lost_ranks", evidence("died", rank(reading(0), status="dead"), rank(reading(1), status="dead"))),
    ("lost_ranks", evidence("hung", rank(reading(0)), rank(reading(1), status="unknown"))),
    ("lost_ranks", evidence("hung", rank(reading(0)), rank(reading(1), status="stopped"))),
    ("stopped_ranks", evidence("hung", rank(reading(0), status="dead"))),
    ("long_step", evidence("hung", rank(step_seconds=3.0))),
    ("long_step", evidence("hung", rank(step_seconds=None))),
    ("encoder_cache", evidence("died", with_cache(100 * MIB))),
    ("encoder_cache", evidence("died", rank(reading(encoder_cache=None)))),
    ("host_memory", evidence("died")),
    ("host_memory", evidence("died", STALE_RANK)),
    ("host_memory", evidence("died", rank(STALE_RANK.reading), host=facts(fill=0.5))),
    ("host_memory", evidence("died", rank(reading(host_memory=host(63_000 * MIB, None))))),
    ("host_memory", evidence("died", rank(reading(host_memory=host(None, 64_000 * MIB))))),
    ("kv_cache_full", evidence("hung")),
    ("kv_cache_full", evidence("hung", load=EngineLoad())),
    ("kv_cache_full", evidence("hung", load=EngineLoad(kv_cache_usage_ratio=0.94))),
    ("policy", evidence("died")),
    ("policy", evidence("died", policy=policy("calm"))),
    ("policy", evidence("died", policy=policy("resting", level="calm"))),
    ("policy", evidence("died", policy=policy("held", level="held"))),
    ("policy", evidence("died", policy=policy("held", level="held"), policy_before=policy("calm"))),
    ("no_readings", evidence("died")),
    ("no_readings", evidence("died", rank(unknown(0)), rank(reading(1)))),
]


# By figures of the log's messages alone (test_failed_allocation.py); the other is an event, and no incident's.
OF_THE_LOG = {"failed_allocation", "host_shortage"}


def found(name: str, given: Evidence) -> Finding | None:
    return next((finding for finding in diagnosed(given) if finding.name == name), None)


@pytest.mark.parametrize(("name", "given"), FOUND)
def test_it_is_found(name, given):
    assert found(name, given) is not None


@pytest.mark.parametrize(("name", "given"), NOT_FOUND)
def test_it_is_not_found(name, given):
    assert found(name, given) is None


def test_every_question_is_tried_both_ways():
    names = {name for name, _ in FOUND}
    assert names == {name for name, _ in NOT_FOUND}
    assert names | OF_THE_LOG == {rule.name for rule in RULES if "incident" in rule.where}


def test_the_documentation_names_every_finding():
    text = (Path(__file__).parents[4] / "docs" / "incidents.md").read_text()
    named = set(re.findall(r"^\| `([a-z0-9_]+)`\s*\|", text, re.MULTILINE)) - {"summary", "engine", "ranks", "notes"}
    assert named - {"findings", "messages"} == {name for name, _ in FOUND} | OF_THE_LOG


def test_nothing_is_known_and_nothing_is_made_up():
    nothing = Evidence(kind="hung", at=AT, engine=engine(None))
    assert [finding.name for finding in diagnosed(nothing)] == ["no_readings"]


@pytest.mark.parametrize("name", [field.name for field in fields(reading())])
@pytest.mark.parametrize("kind", ["died", "hung", "out_of_memory"])
def test_one_unknown_thing_breaks_nothing(kind, name):
    whole = reading(
        used=FULL,
        torch=torch(allocated_bytes=54_000 * MIB, reserved_bytes=59_000 * MIB, alloc_retries=3, ooms=1),
        encoder_cache=cache(3_000 * MIB),
        host_memory=host(63_000 * MIB, 64_000 * MIB),
    )
    if name in {"taken_at", "notes"}:
        return
    without = replace(whole, **{name: getattr(unknown(None), name)})
    assert diagnosed(evidence(kind, rank(whole), rank(without), baseline=(reading(),)))


# --- the headline: test_words.py ---

KILLED = "ERROR [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down."
GREW = {"growth": Growth(since_ready_bytes=9_000 * MIB)}


UNDERSTOOD = ["(EngineCore pid=9) INFO 11-21 14:22:33 [core.py:120] Initializing a V1 LLM engine (v0.32.0)"]


def headline(given: Evidence, *lines: str) -> str:
    """As it is made of the evidence and the lines of a log."""
    log = story_of([*UNDERSTOOD, *lines])
    given = replace(given, ended_by_signal=ended_by_signal(log.messages))
    return summarized(given, log)


def test_advice_about_memory_that_was_not_short_is_no_advice():
    grown = next(finding for finding in diagnosed(evidence("died", **GREW)) if finding.name == "growth")
    assert grown.weight == "note"


def test_growth_is_a_clue_where_the_log_says_that_memory_was_short():
    log = story_of(["RuntimeError: CUDA driver error: out of memory"])
    found = diagnosed(evidence("died", **GREW), log)
    assert {finding.name: finding.weight for finding in found}["growth"] == "clue"


def test_the_process_that_grew_is_named_and_its_advice_is_for_it():
    given = evidence("died", oom_kills=OomKills(count=1, where="counted"), host=facts(fill=0.97, part=LEAKER))
    killed, memory = (found(name, given) for name in ("killed_by_kernel", "host_memory"))
    grew = "EngineCore grew from 450 MiB to 2.35 GiB in 4 min"
    assert killed.title == f"the kernel killed a process of the engine's container for memory; {grew}"
    assert (memory.title, grew in memory.text) == ("host memory stood at 97% of the container's limit", True)
    assert killed.advice == memory.advice == (ADVICE["memory_limit"], ADVICE["memray"])
    filled = replace(given, host=facts(part=LEAKER, caches=replace(CACHES, queries=9)))
    assert found("killed_by_kernel", filled).advice == (
        *(ADVICE[name] for name in ("memory_limit", "mm_processor_cache", "reset_mm_cache")),
    )


def test_the_processor_cache_is_advised_about_where_the_engine_counts_images_and_the_host_was_not_read():
    given = evidence("died", oom_kills=OomKills(count=1, where="counted"))
    served = replace(given, engine=replace(given.engine, work=WorkCounts(images=9.0, new_images=9.0)))
    processor_cache = ADVICE["mm_processor_cache"], ADVICE["reset_mm_cache"]
    assert found("killed_by_kernel", served).advice == (ADVICE["memory_limit"], *processor_cache)
    assert found("killed_by_kernel", given).advice == (ADVICE["memory_limit"],)


def test_a_shell_beside_the_engine_is_none_of_its_processes():
    shell, python = (replace(HELD, name=f"other {name}", role="other") for name in ("bash", "python"))
    host = replace(facts(), parts=(HELD, python, replace(shell, bytes=MIB)))
    looks = found("kill_not_known", evidence("died", host=host)).text
    assert "other python 2.35 GiB" in looks
    assert "bash" not in looks


def test_of_a_kill_within_seconds_the_largest_is_named():
    cpu = rank(reading(device=Device(type="cpu"), host_memory=HostMemory()))
    given = evidence("died", cpu, oom_kills=OomKills(count=1, where="counted"), host=facts(part=HELD))
    killed = found("killed_by_kernel", given)
    assert killed.title.endswith("; worker rank 0 held the most, 2.35 GiB")
    assert "Last reading of each process: worker rank 0 2.35 GiB (3.0 s before)." in killed.text
    assert killed.advice == (ADVICE["memory_limit"], ADVICE["cpu_kvcache_space"])


@pytest.mark.parametrize("container", ["k", "other"])
def test_of_one_container_there_is_one_look_and_what_is_said_of_it_agrees(container):
    full = reading(host_memory=HostMemory(cgroup_used_bytes=96, cgroup_limit_bytes=100))
    known = facts(fill=0.64)
    of_rank = ProcessMemory(role="worker", name="w", pid=full.pid, host=full.host, container=container)
    host = replace(
        known, reading=replace(known.reading, processes=(of_rank,)), fullest=replace(known.fullest, container="k")
    )
    given = evidence("died", rank(full), host=host)
    names = {one.name for one in diagnosed(given)}
    assert ("host_memory" in names) is (container == "other")
    assert ("host memory had room (64%" in found("kill_not_known", given).title) is (container == "k")
    assert ("96 %" in found("kill_not_known", given).text) is False


def test_a_whole_container_that_was_killed_leaves_no_counter_and_two_facts():
    """All of it fell silent at one moment, and it was full: with the command that says whether it was the kernel."""
    given = evidence("died", host=facts(fill=0.97, together=3, part=LEAKER))
    said = headline(given)
    assert "host memory stood at 97% of the container's limit; EngineCore grew" in said
    assert "All 3 known processes stopped writing" in found("host_memory", given).text
    assert "lastState" in found("kill_not_known", given).advice[0].setting


@pytest.mark.parametrize(
    ("line", "signal"),
    [
        (KILLED, 9),
        (KILLED.replace("-9", "None"), None),
        ("RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_DP0': -9}", 9),
        ("RuntimeError: Engine core initialization failed. Failed core proc(s): {}", None),
        ("RuntimeError: Process ApiServer_0 (PID: 7) died with exit code -11", 11),
        ("RuntimeError: Process ApiServer_0 (PID: 7) died with exit code 1", None),
        ("RuntimeError: Process ApiServer_0 (PID: 7) died with exit code 137", 9),
        ("bash: line 1:   412 Killed                  vllm serve", 9),
        ("Memory cgroup out of memory: Killed process 412 (VLLM::EngineCor)", 9),
        ("Encoder cache miss for signal", None),
    ],
)
def test_the_signal_is_read_where_the_log_tells_it(line, signal):
    """As Python writes it, as containers do, and in words; an ordinary exit is by none."""
    assert ended_by_signal(match([line])) == signal


def test_a_summary_says_nothing_twice():
    """The log of an engine that was killed while it loaded: it says that the start failed, and the signal."""
    log = story_of(["RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_DP0': -9}"])
    summary = summarized(evidence("start_failed", rank(unknown(0)), ended_by_signal=9), log)
    assert summary.count("did not start") == summary.count("signal 9") == 1


def test_sigkill_is_explained():
    """137 is what people see, and who sends it is where to look."""
    assert "137" in found("ended_by_signal", evidence("died", ended_by_signal=9)).advice[0].setting
    for line in (KILLED, "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."):
        assert "137" in match([line])[0].advice[0].setting


def test_the_weightiest_comes_first():
    weights = [
        finding.weight
        for finding in diagnosed(
            evidence(
                "died",
                rank(reading(used=FULL, encoder_cache=cache(3_000 * MIB))),
                growth=Growth(since_ready_bytes=9_000 * MIB),
                load=EngineLoad(kv_cache_usage_ratio=1.0),
            )
        )
    ]
    assert weights == sorted(weights, key=["likely", "clue", "note"].index)
    assert set(weights) == {"likely", "clue", "note"}


def test_the_series_reaches_further_than_the_reading():
    """What was used since the last full reading is free no more, also on CPU, where the two do not add up."""
    known = replace(reading(), taken_at=AT - 60, free_bytes=20_000 * MIB)
    later = MemoryPoint(at=AT - 0.1, used_bytes=FULL)
    stood = latest(rank(known, series=(later,)))
    assert stood.free_bytes == 0
    assert found("device_full", evidence("died", rank(known, series=(later,)))) is not None


def test_what_a_series_does_not_keep_is_taken_from_the_reading():
    known = replace(reading(torch=torch(inactive_split_bytes=7)), taken_at=AT - 60)
    later = MemoryPoint(at=AT, used_bytes=FULL, torch_allocated_bytes=1, torch_reserved_bytes=2)
    stood = latest(rank(known, series=(later,)))
    assert stood.components == known.components
    assert (stood.torch.allocated_bytes, stood.torch.reserved_bytes, stood.torch.inactive_split_bytes) == (1, 2, 7)


def test_a_rank_without_a_reading_is_told_by_its_series():
    lonely = replace(rank(), reading=None, series=(MemoryPoint(at=AT, used_bytes=FULL),))
    assert latest(lonely).used_bytes == FULL
    assert found("device_full", evidence("died", lonely)) is None
    assert found("no_readings", evidence("died", lonely)) is None


def test_where_nothing_could_be_given_back_acting_earlier_is_no_advice():
    short = RankPressure(rank=0, dp_rank=0, short_bytes=100 * MIB, can_release_bytes=0, can_trim_bytes=0)
    helpless = found("policy", evidence("died", policy=policy("short", ranks=(short,))))
    assert helpless.advice == (ADVICE["gpu_memory_utilization"],)
    assert helpless.figures["missing_bytes"] == 100 * MIB
    untold = replace(short, can_trim_bytes=None)
    finding = found("policy", evidence("died", policy=policy("short", ranks=(untold,))))
    assert finding.advice == (ADVICE["policy_earlier"],)


def test_advice_fits_the_device():
    fragmented = torch(allocated_bytes=30_000 * MIB, reserved_bytes=34_000 * MIB)

    def told(kind: str | None) -> set[Advice]:
        known = reading(used=FULL, torch=fragmented, device=replace(reading().device, type=kind))
        return {each for finding in diagnosed(evidence("died", rank(known))) for each in finding.advice}

    assert ADVICE["npu_expandable_segments"] in told("npu")
    assert ADVICE["cuda_expandable_segments"] in told("cuda")
    assert not told("cuda") & {ADVICE["npu_expandable_segments"], ADVICE["hccl_buffsize"]}
    assert ADVICE["cpu_kvcache_space"] in told("cpu")
    assert not told(None) & {ADVICE["npu_expandable_segments"], ADVICE["cuda_expandable_segments"]}


@pytest.mark.parametrize(
    ("can", "is_told"), [({"reset_encoder_cache": False}, False), ({"reset_encoder_cache": True}, True), ({}, True)]
)
def test_what_the_engine_cannot_do_is_no_advice(can, is_told):
    """An engine before 0.16 has no reset of its encoder cache."""
    asked = replace(engine("0.12.0"), capabilities=can)
    finding = found("encoder_cache", evidence("died", with_cache(3_000 * MIB), engine=asked))
    assert (ADVICE["reset_encoder_cache"] in finding.advice) is is_told
    assert ADVICE["trim_encoder_cache"] in finding.advice


def test_each_component_that_can_grow_has_its_meaning():
    for field in fields(Components):
        grown = reading(components=parts(**{field.name: 30_000 * MIB}))
        finding = found("growth", evidence("died", rank(grown), baseline=(reading(),)))
        assert COMPONENT_MEANING[field.name] in finding.text
        assert finding.figures[field.name] > 0


def reserve(releasable, split=0):
    """A full device, of which the allocator keeps 5,000 MiB that no tensor uses."""
    held = torch(allocated_bytes=54_000 * MIB, reserved_bytes=59_000 * MIB, inactive_split_bytes=split * MIB)
    return evidence("died", rank(reading(used=FULL, torch=held, releasable_bytes=releasable)), baseline=(reading(),))


def unused(known):
    return next((one for one in diagnosed(known) if one.name == "unused_reserve"), None)


def test_what_captured_graphs_hold_is_not_held_in_vain():
    assert unused(reserve(200 * MIB)) is None


def test_a_release_is_advised_where_it_would_have_given_much():
    found = unused(reserve(3_000 * MIB, split=100))
    assert found.weight == "likely"
    assert "A release would have given 2.93 GiB back to the device." in found.text
    assert found.figures["releasable_bytes"] == 3_000 * MIB
    assert ADVICE["release"] in found.advice


def test_no_release_is_advised_against_fragments():
    found = unused(reserve(100 * MIB, split=2_500))
    assert (found.weight, ADVICE["release"] in found.advice) == ("clue", False)
    assert found.advice


NO_KILL = OomKills(count=0, where="its container's counter")


@pytest.mark.parametrize(
    ("memory", "known", "log"),
    [
        ("killed_by_kernel", evidence(oom_kills=OomKills(count=1, where="its container's counter")), NO_LOG),
        ("device_full", evidence("died", rank(reading(used=TOTAL - MIB))), NO_LOG),
        ("device_full", evidence("out_of_memory"), NO_LOG),
        ("not_short", evidence(oom_kills=NO_KILL), story_of([*UNDERSTOOD, KILLED])),
        ("had_room", evidence(), story_of([*UNDERSTOOD, KILLED])),
        ("had_room", evidence(oom_kills=NO_KILL), NO_LOG),
        ("unknown", evidence("died", rank(unknown())), NO_LOG),
    ],
)
def test_whether_memory_was_short_at_the_end_is_one_word(memory, known, log):
    """`not_short` takes a log that is understood, and a counter of kills."""
    assert memory_at_end(of_incident(known, log), diagnosed(known, log)) == memory
