"""`/metrics`: a golden file of the story, every family that is promised, and nothing of a dead engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import ProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gated_proxy.door import Door
from gated_proxy.door_items import Cost, DoorLimits
from gated_proxy.traffic import Connections
from highwater import __version__
from highwater.host.reading import PressureStall
from highwater.host.report import Outlook, report_of
from highwater.host.watch import HostNow
from highwater.http import metrics
from highwater.http.families import HELP, MAX_SHOWN
from highwater.http.metrics import Counters, Exporter
from highwater.model.engine import EngineStatus
from highwater.model.growth import GrowthRate, SeriesGrowth, growth_since_ready
from highwater.model.pace import Track
from highwater.model.policy import PolicyStatus, RankPressure, RuleStatus
from highwater.model.rank import Components, EncoderCacheTotals, HostMemory, TorchMemory
from highwater.model.remedies import RemedyResult, credit, freed, total
from highwater.model.report import Report
from tests.fakes.engine import FakeClock, FakeEngine
from tests.golden import golden
from tests.unit.host.recorded import reading

GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"
# As the kernel would show a sidecar, whose figures differ everywhere else.
PROC = Path(__file__).parent / "proc"

# The table, and what the client library tells of this process, without the prefix.
OF_PROCESS = ("resident_memory_bytes", "virtual_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds")
PROMISED = (*HELP, *(f"process_{name}" for name in (*OF_PROCESS, "start_time_seconds")))
FILLING = Track([10.0 * number for number in range(7)], [2.0**20 * number for number in range(7)])
STILL = Track(FILLING.at, [0.0] * 7)
PER_RANK = {name for name in PROMISED if re.match(r"devices?_|memory_|torch_|encoder_|host_memory_|growth_bytes", name)}


def verdict(owner: str, measure: str, **changes: Any) -> SeriesGrowth:
    place, unit = ("device", "bytes") if owner.startswith("rank") else ("host", "bytes")
    of_series = {"owner": owner, "measure": measure, "series": f"{owner} {measure}", "place": place, "unit": unit}
    return SeriesGrowth(**{**of_series, "verdict": "flat", "text": "", **changes})


VERDICTS = (
    verdict(
        "API server",
        "anonymous_bytes",
        verdict="leak",
        rate=GrowthRate(driver="request", per_driver=3.0 * 2**20, low=2.9 * 2**20, high=3.1 * 2**20),
        exhausted_at=1.75e9,
    ),
    verdict(
        "API server",
        "descriptors",
        unit="count",
        verdict="leak",
        rate=GrowthRate(driver="hour", per_driver=6.0, low=5.0, high=7.0),
    ),
    verdict("rank 0", "encoder_cache_bytes", verdict="plateau"),
    verdict("rank 1", "other_tensors_bytes", verdict="leak", is_over=True),
)


def story() -> tuple[Report, RemedyResult]:
    """After the benchmark and one reset of the encoder cache with release, a second ago."""
    clock = FakeClock()
    fake = FakeEngine(clock=clock)
    ready = fake.readings()
    fake.serve_images()
    grown = fake.readings()
    clock.advance(60.0)
    fake.workers[1].forget_entries()
    fake.workers[1].release()
    now = fake.readings()
    result = RemedyResult(
        remedy="reset_encoder_cache", outcome="done", seconds=0.4, quiesced_by="gate", held_seconds=0.2
    )
    freed_bytes, components = total(freed(grown, now))
    status = EngineStatus(
        url="http://engine:8000",
        state="ready",
        version="0.32.0",
        model=fake.model,
        requests_running=3,
        requests_waiting=0,
        kv_cache_usage_ratio=0.41,
        started_at=1_760_000_000.0,
        is_loading=False,
        extension_versions=("0.0.9",),
    )
    report = Report(
        taken_at=now[0].taken_at,
        age_seconds=0.5,
        stale=False,
        engine=status,
        ranks_expected=2,
        ranks_reported=2,
        ranks=now,
        encoder_cache=EncoderCacheTotals.of(now),
        growth=growth_since_ready(ready, now, {(0, 0): FILLING, (0, 1): STILL}),
    )
    credited = credit("reset_encoder_cache", grown, now)
    return report, replace(
        result,
        freed_bytes=freed_bytes,
        freed_components=components,
        credited_bytes=credited.freed_bytes,
        credited_components=credited.components,
    )


POLICY = PolicyStatus(
    level="short",
    mode="act",
    summary="short by 1,024 MiB on rank 1",
    rules=(
        RuleStatus(
            name="device",
            signal="device_free_bytes",
            high_water=1_636_302_848,
            low_water=3_272_605_696,
            phase="resting",
            value=2_198_863_872,
            ranks=(
                RankPressure(rank=0, dp_rank=0, short_bytes=0),
                RankPressure(rank=1, dp_rank=0, short_bytes=1_073_741_824),
            ),
        ),
        RuleStatus(
            name="share", signal="device_used_ratio", high_water=0.98, low_water=0.95, phase="calm", value=0.936
        ),
    ),
    actions_last_hour=3,
)


CONNECTIONS = Connections(
    clients=5, engine_active=3, engine_idle=2, tunnels=1, requests_on_new=4, requests_on_reused=6, retries=1
)
_READING = reading()
HOST = HostNow(
    report_of(
        replace(
            _READING,
            processes=tuple(replace(one, peak_bytes=2**32, threads=60, descriptors=48) for one in _READING.processes),
            container=replace(
                _READING.container,
                events={"max": 3, "oom_kill": 1},
                pressure=PressureStall(some_seconds=2.5, full_seconds=1.5),
            ),
        ),
        outlook=Outlook(seconds_to_limit=5400.0),
    )
)
DOOR = Door(mode="on", limits=DoorLimits(decoded_bytes=2**30, encoder_tokens=32_768, items=1024))
DOOR.inside = Cost(decoded_bytes=268_435_456, encoder_tokens=4096, items=4)
DOOR.counts.requests, DOOR.counts.waited, DOOR.counts.waited_seconds = 900, 20, 31.5
DOOR.counts.refused.update({"door_timeout": 3, "door_too_large": 1})
DOOR.counts.items.update({"jpeg": 800, "png": 150, "url": 2})
# Path class, status code, result, duration, time to the first byte.
ENDED = (
    ("chat_completions", 200, "complete", 8.0, 0.2),
    ("chat_completions", 200, "truncated", 70.0, 0.3),
    ("chat_completions", 200, "client_left", 700.0, 0.4),
    ("chat_completions", 499, "client_left", 3.0, None),
    ("chat_completions", 503, "refused", 30.0, None),
    ("health", 200, "complete", 0.001, 0.001),
    ("health", 200, "complete", 0.001, 0.001),  # so that no two results are as frequent
)


def exporter_of(report: Report, result: RemedyResult | None = None) -> Exporter:
    exporter = Exporter(
        Counters(),
        lambda: report,
        lambda: POLICY,
        held=lambda: 3,
        door=DOOR,
        connections=lambda: CONNECTIONS,
        dropped_lines=lambda: 2,
        incidents=lambda: {"died": 2, "hung": 0},
        host=lambda: HOST,
        oom_kills=lambda: 3,
        growth=lambda: VERDICTS,
        process=ProcessCollector(namespace="highwater", proc=str(PROC), registry=None),
        process_memory_limit=lambda: 1024**3,
        clock=lambda: 0.0,
    )
    exporter.counters.internal_errors.counter("poller")()
    exporter.counters.polled(0.003)
    exporter.counters.poll_failed("workers", "garbled")
    if result is not None:
        exporter.counters.remedy_ended(result, "policy")
    exporter.counters.remedy_ended(RemedyResult(remedy="reset_mm_cache", outcome="refused"), "drop-in")
    for _ in range(len(ENDED) + 1):
        exporter.counters.traffic.request_started()
    for path_class, code, how, seconds, first_byte_seconds in ENDED:
        exporter.counters.traffic.request_ended(
            path_class,
            "POST",
            code,
            how,
            seconds=seconds,
            first_byte_seconds=first_byte_seconds,
            request_bytes=1000,
            response_bytes=2000,
        )
    exporter.counters.traffic.upstream_error("connect")
    exporter.counters.traffic.request_refused("gate_full")
    exporter.counters.traffic.request_refused("not_admitted")
    return exporter


def classic(exporter: Exporter) -> str:
    return exporter.page().decode()


def without_creation_times(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(r"(# \w+ )?\w+_created\b", line))


def families(text: str) -> set[str]:
    """The names that TYPE lines tell, without the prefix; counters in the classic format end in _total."""
    return {line.split()[2].removeprefix("highwater_") for line in text.splitlines() if line.startswith("# TYPE ")}


def samples(text: str, name: str, *by: str) -> dict[tuple[str, ...], float]:
    """Values by the named labels; two series with the same would be one too few."""
    found = [
        (tuple(sample.labels[label] for label in by), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"highwater_{name}"
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_the_page_is_the_golden_one():
    text = without_creation_times(classic(exporter_of(*story()))).replace(f'"{__version__}"', '"VERSION"')
    assert text == golden(GOLDEN, text)


def test_every_promised_family_is_there_and_no_other():
    assert families(without_creation_times(classic(exporter_of(*story())))) == set(PROMISED)
    assert len(PROMISED) == 126


def test_promtool_has_nothing_to_say():
    promtool = shutil.which("promtool")
    if promtool is None:
        if os.environ.get("CI"):
            pytest.fail("promtool is not there, and CI must have it: make tools")
        pytest.skip("promtool is not installed; make tools brings it")
    told = subprocess.run(
        [promtool, "check", "metrics"], input=exporter_of(*story()).page(), capture_output=True, check=False
    )
    assert (told.returncode, told.stdout, told.stderr) == (0, b"", b"")


@pytest.mark.parametrize("name", PROMISED)
def test_a_help_text_is_a_sentence(name):
    (told,) = re.findall(rf"^# HELP highwater_{name} (.*)$", GOLDEN.read_text(encoding="utf-8"), re.MULTILINE)
    assert told[0].isupper() or told[0] == "1"
    assert told.endswith(".")


def test_a_stale_report_shows_no_rank():
    """A dead engine's numbers must not look alive: per-rank families vanish, the rest says why."""
    report, _ = story()
    text = classic(exporter_of(replace(report, stale=True, age_seconds=60.0)))
    assert families(text) & PER_RANK == set()
    assert samples(text, "ranks_reported") == {(): 0.0}
    assert samples(text, "report_age_seconds") == {(): 60.0}


@pytest.mark.parametrize(
    ("state", "up"),
    [
        *[(state, 1) for state in ("ready", "busy", "slow", "paused", "sleeping")],
        *[(state, 0) for state in ("starting", "stuck", "not_answering", "gone")],
    ],
)
def test_one_state_is_one(state, up):
    """engine_state has a series for each state, so that alerts need no absent()."""
    report, _ = story()
    text = classic(exporter_of(replace(report, engine=replace(report.engine, state=state))))
    states = samples(text, "engine_state", "state")
    assert {name for (name,), value in states.items() if value} == {state}
    assert len(states) == 9
    assert samples(text, "engine_up") == {(): up}


def test_what_is_not_known_has_no_series():
    """Never a zero for absent knowledge: on CPU there is no allocator, in a text model no encoder cache."""
    report, _ = story()
    ranks = tuple(
        replace(
            rank,
            torch=TorchMemory(),
            encoder_cache=None,
            components=Components(weights_bytes=5, non_torch_bytes=6),
            host_memory=HostMemory(rss_bytes=7),
        )
        for rank in report.ranks
    )
    text = classic(exporter_of(replace(report, ranks=ranks)))
    for name in ("torch_allocated_bytes", "torch_ooms_total", "encoder_cache_bytes", "host_memory_used_ratio"):
        assert samples(text, name) == {}
    parts = samples(text, "memory_component_bytes", "rank", "component")
    assert {component for _, component in parts} == {"weights", "non_torch"}


def test_before_the_first_reading_the_page_is_there():
    text = classic(Exporter(Counters(), lambda: Report(engine=EngineStatus(url="x", state="starting")), lambda: POLICY))
    assert samples(text, "engine_up") == {(): 0.0}
    assert samples(text, "report_age_seconds") == {}
    assert samples(text, "ranks_expected") == {}
    assert samples(text, "engine_requests_running") == {}
    assert samples(text, "engine_info", "version", "model") == {("", ""): 1.0}
    for name in ("engine_loading", "engine_start_time_seconds", "extension_info"):
        assert samples(text, name) == {}


def test_what_the_policy_did_is_counted_by_rule_remedy_and_outcome():
    exporter = exporter_of(*story())
    exporter.counters.policy_acted("device", "release", "ineffective")
    actions = samples(classic(exporter), "policy_actions_total", "rule", "remedy", "outcome")
    assert actions == {("device", "release", "ineffective"): 1.0}


def test_data_parallel_ranks_are_told_apart():
    """Each engine numbers its ranks from 0: without the engine two series would be one."""
    report, _ = story()
    ranks = (*report.ranks, *(replace(rank, dp_rank=1) for rank in report.ranks))
    text = classic(exporter_of(replace(report, ranks=ranks)))
    assert set(samples(text, "device_memory_used_bytes", "rank")) == {("0",), ("1",), ("1.0",), ("1.1",)}


def test_what_a_remedy_freed_is_counted_as_it_is_credited():
    report, _ = story()
    exporter = exporter_of(report)
    credited = Components(torch_cached_bytes=1_000, non_torch_bytes=200)
    for _ in range(2):
        exporter.counters.remedy_ended(
            RemedyResult(remedy="release", outcome="done", credited_components=credited), "policy"
        )
    told = samples(classic(exporter), "reset_freed_bytes_total", "remedy", "component")
    assert {key: size for key, size in told.items() if key[0] == "release"} == {
        ("release", "torch_cached"): 2_000.0,
        ("release", "non_torch"): 400.0,
    }


def test_what_was_not_run_has_no_duration():
    text = classic(exporter_of(story()[0]))
    told = samples(text, "resets_total", "remedy", "trigger", "outcome")
    assert told == {("reset_mm_cache", "drop-in", "refused"): 1.0}
    assert samples(text, "reset_duration_seconds_count") == {}


def test_a_host_name_cannot_break_the_page():
    report, _ = story()
    name = 'a"b\\c\nd'
    text = classic(exporter_of(replace(report, ranks=(replace(report.ranks[0], host=name),))))
    assert set(samples(text, "device_memory_used_bytes", "host")) == {(name,)}


# --- rendered once ---


class Rendering:
    """Counts how often families are rendered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._render = metrics.generate_latest
        monkeypatch.setattr(metrics, "generate_latest", self)

    def __call__(self, families: Collector) -> bytes:
        self.count += 1
        return self._render(families)


def test_a_page_is_rendered_once_a_report(monkeypatch):
    report, result = story()
    exporter, rendering = exporter_of(report, result), Rendering(monkeypatch)
    first = exporter.page()
    rendered = rendering.count
    assert exporter.page() == first
    assert rendering.count == rendered


def test_the_sidecars_own_process_is_read_once_a_second():
    reads, now = list[float](), [10.0]

    class Process(Collector):
        def collect(self):
            reads.append(now[0])
            return ()

    exporter = Exporter(Counters(), lambda: story()[0], lambda: POLICY, process=Process(), clock=lambda: now[0])
    for now[0] in (10.0, 10.4, 10.9, 11.0):
        exporter.page()
    assert reads == [10.0, 11.0]


def test_the_process_of_this_sidecar_is_the_one_that_is_shown():
    """Not another one, and under a name that vLLM's own families do not have."""
    text = Exporter(Counters(), lambda: story()[0], lambda: POLICY).page().decode()
    assert samples(text, "process_resident_memory_bytes")[()] > 10_000_000
    assert samples(text, "process_cpu_seconds_total")[()] > 0
    assert not re.search(r"^process_", text, re.MULTILINE)


def test_the_age_of_the_report_goes_on_by_itself(monkeypatch):
    reports = [story()[0]]
    exporter = Exporter(Counters(), lambda: reports[-1], lambda: POLICY, clock=lambda: 0.0)
    assert samples(classic(exporter), "report_age_seconds") == {(): 0.5}
    rendering = Rendering(monkeypatch)
    reports.append(replace(reports[0], age_seconds=0.75))
    assert samples(classic(exporter), "report_age_seconds") == {(): 0.75}
    assert rendering.count == 1


CHANGES: dict[str, tuple[Callable[[Counters], object], str]] = {
    "a poll": (lambda counters: counters.polled(0.1), "poll_duration_seconds_count"),
    "a failed poll": (lambda counters: counters.poll_failed("workers", "late"), "poll_failures_total"),
    "a remedy": (lambda counters: counters.remedy_ended(story()[1], "policy"), "resets_total"),
    "a decision": (
        lambda counters: counters.policy_acted("device", "release", "done"),
        "policy_actions_total",
    ),
    "a denial": (lambda counters: counters.control_denied("closed"), "control_denied_total"),
    "an internal error": (
        lambda counters: counters.internal_errors.counter("http")(),
        "internal_errors_total",
    ),
    "a request": (lambda counters: counters.traffic.request_started(), "proxy_requests_in_flight"),
    "a refusal": (lambda counters: counters.traffic.request_refused("shutting_down"), "proxy_refused_total"),
    "an upstream error": (
        lambda counters: counters.traffic.upstream_error("reset"),
        "proxy_upstream_errors_total",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_counted_is_on_the_next_page(change):
    happens, name = CHANGES[change]
    exporter = exporter_of(*story())
    lines = {line for line in classic(exporter).splitlines() if line.startswith(f"highwater_{name}")}
    happens(exporter.counters)
    assert {line for line in classic(exporter).splitlines() if line.startswith(f"highwater_{name}")} != lines


def test_a_new_report_is_on_the_next_page():
    reports, policies = [story()[0]], [POLICY]
    exporter = Exporter(Counters(), lambda: reports[-1], lambda: policies[-1])
    classic(exporter)
    reports.append(replace(reports[0], ranks_expected=3))
    policies.append(replace(POLICY, actions_last_hour=4))
    text = classic(exporter)
    assert (samples(text, "ranks_expected"), samples(text, "policy_actions_last_hour")) == ({(): 3.0}, {(): 4.0})


def test_a_policy_that_an_operator_replaced_is_on_the_next_page():
    policies = [POLICY]
    exporter = Exporter(Counters(), lambda: story()[0], lambda: policies[-1])
    classic(exporter)
    policies.append(replace(POLICY, mode="observe"))
    exporter.counters.policy_changed()
    assert samples(classic(exporter), "policy_mode", "mode")["observe",] == 1.0


# --- one series for each ---


def test_a_device_with_two_ranks_counts_once_in_the_sums():
    report, _ = story()
    shared = tuple(replace(rank, device=replace(rank.device, uuid="npu-a")) for rank in report.ranks)
    text = classic(exporter_of(replace(report, ranks=shared)))
    whole = samples(text, "device_memory_used_bytes", "rank")
    assert samples(text, "devices_memory_used_bytes") == {(): whole["0",]}
    assert samples(text, "devices_memory_total_bytes") == {(): float(report.ranks[0].total_bytes)}
    assert samples(text, "device_info", "rank", "uuid") == {("0", "npu-a"): 1.0, ("1", "npu-a"): 1.0}


def test_growth_of_an_engine_that_has_ended_is_not_shown():
    many = tuple(verdict(f"worker rank {number}", "threads", unit="count") for number in range(400))
    text = classic(Exporter(Counters(), lambda: story()[0], lambda: POLICY, growth=lambda: (*VERDICTS, *many)))
    shown = samples(text, "growth_verdict", "process", "series", "verdict")
    assert len(shown) == 5 * MAX_SHOWN
    assert shown["API server", "anonymous", "leak"] == 1.0
    assert not any(process == "rank 1" for process, _, _ in shown)
