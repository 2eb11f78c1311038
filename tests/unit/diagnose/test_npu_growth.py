"""The user's own story: non-torch memory that grows on an NPU under images, and the cause that is known for it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest

from highwater.diagnose.case import of_incident, of_report
from highwater.diagnose.finding import Finding, in_words
from highwater.diagnose.incidents.diagnosis import summarize
from highwater.diagnose.log.story import story_of
from highwater.diagnose.rules.book import known_causes
from highwater.http.text.incidents import incident_markdown
from highwater.model.engine import EngineLoad, EngineStatus, WorkCounts
from highwater.model.growth import Growth, SeriesGrowth
from highwater.model.rank import Components, Device, EncoderCache, EncoderUnprofiledBy, Launch, RankReading
from highwater.model.report import Report
from tests.fakes.incident import diagnosed, evidence, incident, rank, reading
from tests.unit.diagnose.test_setup import facts, result

GIB = 1024**3
TOTAL = int(60.96 * GIB)
# Of one rank in GiB, in forty minutes of images of mixed sizes: weights and KV cache, encoder cache, other tensors,
# allocator reserve, non-torch.
TABLE = {
    0: (52.5, 0.3, 0.1, 0.4, 1.1),
    10: (52.5, 1.1, 0.2, 0.6, 2.1),
    20: (52.5, 1.2, 0.2, 0.7, 3.2),
    30: (52.5, 1.2, 0.2, 0.8, 4.4),
    40: (52.5, 1.2, 0.2, 0.9, 5.2),
}
OFF, ON, UNKNOWN = (Launch(expandable_segments=is_on) for is_on in (False, True, None))
ASLEEP_ON_DEMAND = Launch(expandable_segments=False, sleep_mode=True)
NPU, GPU = Device(type="npu", index=0), Device(type="cuda", index=0)
LOG = ["(Worker_TP0 pid=7) ERROR 11-21 14:22:33 [x.py:1] RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB"]


def at(minute: int, launch: Launch = OFF, device: Device = NPU, **changes) -> RankReading:
    sizes = [int(size * GIB) for size in TABLE[minute]]
    held, encoder, tensors, reserve, non_torch = sizes
    parts = Components(
        weights_bytes=held // 2,
        kv_cache_bytes=held - held // 2,
        encoder_cache_bytes=encoder,
        other_tensors_bytes=tensors,
        torch_cached_bytes=reserve,
        non_torch_bytes=non_torch,
    )
    cache = EncoderCache(entries=9, device_bytes=encoder, capacity_embeds=16_384)
    given = {"components": parts, "encoder_cache": cache, "launch": launch, "device": device, "total_bytes": TOTAL}
    return reading(used=sum(sizes), **{**given, "free_bytes": TOTAL - sum(sizes), **changes})


def death(launch: Launch = OFF, minute: int = 40, log=LOG, **changes) -> tuple[Finding, ...]:
    seen = evidence("died", rank(at(minute, launch, **changes)), baseline=(at(0, launch, **changes),))
    return diagnosed(seen, story_of(log))


def settings(found) -> list[str]:
    return [advice.setting for advice in found.advice]


@pytest.mark.parametrize("log", [LOG, []])
def test_the_incident_names_the_cause_first_and_the_variable_that_ends_it(log):
    """Before release, a smaller share and HCCL_BUFFSIZE; nobody else is on the device, so none is looked for."""
    first = death(log=log)[0]
    assert (first.name, first.weight) == ("without_expandable_segments", "likely")
    assert settings(first)[:2] == [
        "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
        'POST /memory/reclaim {"remedies": ["release"]}',
    ]
    assert not any("npu-smi info, nvidia-smi" in settings(each) for each in death(log=log))
    assert "max_split_size_mb and garbage_collection_threshold" in first.advice[0].cost


def test_the_growth_finding_gives_the_same_advice_in_the_same_order():
    """It stands below, and must not say otherwise."""
    (found,) = [one for one in death() if one.name == "growth"]
    assert settings(found)[0] == "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"
    assert "npu-smi info, nvidia-smi" not in settings(found)


def test_who_else_uses_the_device_is_named_where_that_is_known():
    first = death(shared_with="another engine (a worker with pid 9)")[0]
    assert "npu-smi info, nvidia-smi" in settings(first)
    assert "another engine (a worker with pid 9) uses the device as well" in first.text


@pytest.mark.parametrize(
    "changes",
    [
        {"launch": ON},
        {"launch": Launch(), "device": GPU},
        {"encoder_cache": None},
    ],
    ids=["segments on", "CUDA", "text"],
)
def test_elsewhere_the_same_growth_is_something_else(changes):
    found = death(**changes)
    assert "without_expandable_segments" not in {one.name for one in found}
    (growth,) = [one for one in found if one.name == "growth"]
    assert not any("NPU_ALLOC_CONF" in setting for setting in settings(growth))
    assert "npu-smi info, nvidia-smi" in settings(growth)


def test_what_is_not_known_is_said_with_the_way_to_see_it():
    (found,) = [one for one in death(UNKNOWN) if one.name == "without_expandable_segments"]
    assert (found.weight, settings(found)[0]) == ("clue", "highwater explain")
    assert "is not known" in found.title


def test_sleep_mode_excludes_them_and_the_advice_says_so():
    """vllm-ascend takes them out again."""
    first = death(ASLEEP_ON_DEMAND)[0]
    assert "Sleep mode is on, which excludes them" in first.text
    assert settings(first)[0].startswith("--enable-sleep-mode")


def test_without_an_image_it_is_not_this():
    empty = EncoderCache(entries=0, device_bytes=0)
    changes = {"encoder_cache": empty, "launch": OFF}
    load = EngineLoad(work=WorkCounts(images=0.0))
    seen = evidence("died", rank(at(40, **changes)), baseline=(at(0, **changes),))
    case = replace(of_incident(seen), load=load)
    assert known_causes(case) == []
    assert [one.name for one in known_causes(replace(case, load=EngineLoad()))] == ["without_expandable_segments"]


@pytest.mark.parametrize("minute", [10, 20, 30])
def test_growth_says_it_while_the_engine_runs_and_was_never_idle(minute):
    engine = EngineStatus(url="http://e", state="ready", work=WorkCounts(images=500.0))
    report = Report(engine=engine, stale=False, ranks=(at(minute),))
    (found,) = known_causes(of_report("running", report, baseline=(at(0),)))
    assert (found.name, found.weight) == ("without_expandable_segments", "clue")
    assert "First: PYTORCH_NPU_ALLOC_CONF=expandable_segments:True." in in_words(found)
    assert known_causes(of_report("running", replace(report, ranks=(at(minute, ON),)), baseline=(at(0, ON),))) == []
    assert known_causes(of_report("running", replace(report, stale=True), baseline=(at(0),))) == []


@pytest.mark.parametrize(
    ("launch", "level", "words"),
    [
        (OFF, "warn", "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"),
        (ASLEEP_ON_DEMAND, "warn", "--enable-sleep-mode"),
        (UNKNOWN, "note", "highwater explain"),
        (ON, "ok", ""),
        (replace(ON, encoder_unprofiled_by="vllm_ascend"), "warn", "vllm-ascend 0.13.0 or newer"),
        (replace(ON, encoder_unprofiled_by="runner_v2"), "warn", "VLLM_USE_V2_MODEL_RUNNER=0"),
        (replace(ON, encoder_unprofiled_by="skip_mm_profiling"), "warn", "--skip-mm-profiling"),
    ],
)
def test_check_says_it_before_anything_has_grown(launch, level, words):
    found = result("start", facts(ranks=(at(0, launch),)))
    assert found.level == level
    assert words in (found.change or "")


@pytest.mark.parametrize("by", get_args(EncoderUnprofiledBy))
def test_where_the_kv_caches_size_was_given_no_profile_of_the_encoder_is_advised(by):
    change = result("start", facts(ranks=(at(0, replace(ON, encoder_unprofiled_by=by, kv_cache_given=True)),))).change
    assert change is not None
    assert not re.search("sizes the KV cache|smaller KV cache", change)


@pytest.mark.parametrize("changes", [{"device": GPU, "launch": Launch()}, {"encoder_cache": None}])
def test_check_says_nothing_of_it_elsewhere(changes):
    assert result("start", facts(ranks=(at(0, **changes),))).level == "ok"


def test_a_leak_of_non_torch_memory_has_the_same_advice_first():
    leak = SeriesGrowth(
        series="rank 0 non_torch_bytes",
        owner="rank 0",
        measure="non_torch_bytes",
        place="device",
        unit="bytes",
        verdict="leak",
        text="it leaks",
    )
    for launch, first in ((OFF, "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"), (ON, "Restart the engine")):
        seen = evidence("died", rank(at(40, launch)), growth=Growth(series=(leak,)))
        (found,) = [one for one in diagnosed(seen) if one.name == "leaks"]
        assert settings(found)[0] == first


def test_an_encoder_that_was_not_profiled_is_likely_where_its_outputs_filled_the_device():
    launch = Launch(expandable_segments=True, encoder_unprofiled_by="vllm_ascend")
    weights = {minute: {one.name: one.weight for one in death(launch, minute)} for minute in (0, 40)}
    assert weights[0]["encoder_not_profiled"] == "clue"
    assert weights[40]["encoder_not_profiled"] == "likely"


def page(launch: Launch) -> str:
    """The incident as it is read."""
    log = story_of(LOG)
    seen = evidence("died", rank(at(40, launch)), baseline=(at(0, launch),))
    kept = incident(ranks=seen.ranks, findings=diagnosed(seen, log), messages=log.messages)
    return incident_markdown(kept).partition("## What to change")[2]


def test_the_incidents_page_begins_what_to_change_with_it():
    assert page(OFF).strip().startswith("- `PYTORCH_NPU_ALLOC_CONF=expandable_segments:True`")


def test_where_segments_are_on_nothing_advises_them():
    assert "expandable_segments:True`" not in page(ON)
    assert "max_split_size_mb:256" not in page(ON)
    assert "- `--gpu-memory-utilization`" in page(ON)


def test_what_hccl_could_not_allocate_acquits_no_memory():
    """EI0007 is said of registers too; which of them it was is not known, and that is what is said."""
    line = (
        "(Worker_TP3 pid=7) ERROR 11-04 09:44:06 [multiproc_executor.py:824] RuntimeError: EI0007: [PID: 7] Failed to "
        "allocate resource[qp] with info [aicpu rank:7]. Reason: Memory resources are exhausted."
    )
    log = story_of([line])
    seen = evidence("died", rank(reading()))
    findings = diagnosed(seen, log)
    said = summarize(of_incident(seen, log), findings)
    assert "could not allocate (EI0007): memory, or queues or notify registers" in said
    assert "not short" not in said
    assert not any("is not what ended it" in one.text for one in findings)
