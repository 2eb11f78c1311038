"""What a worker was started with, by its report: whether the encoder was profiled, by version and runner."""

from __future__ import annotations

import pytest

from highwater.explain.explanation import launch_of
from highwater.model.engine_budget import EncoderLimits, EngineBudget, EngineLimits, StartMemory
from highwater.model.rank import Device
from tests.fakes.incident import reading


def started(
    version: str | None, device: str = "cuda", *, v2: bool | None = None, skips: bool = False, peak: int | None = 9
):
    budget = EngineBudget(
        vllm_version=version,
        limits=EngineLimits(v2_runner=v2),
        encoder=EncoderLimits(skips_profiling=skips),
        memory=StartMemory(peak_activation_bytes=peak),
    )
    return launch_of(budget, reading(device=Device(type=device)), None).encoder_unprofiled_by


@pytest.mark.parametrize(
    ("given", "by"),
    [
        (started("0.12.0", "npu", peak=None), "vllm_ascend"),
        (started("0.11.0rc1", "npu", peak=None), "vllm_ascend"),
        (started("0.12.0", "npu"), None),
        (started("0.13.0", "npu", peak=None), None),
        (started("main", "npu", peak=None), None),
        (started("0.30.0", "npu", peak=None), None),
        (started(None, "npu", peak=None), None),
        (started("0.12.0", peak=None), None),
        (started("0.25.1", v2=True), "runner_v2"),
        (started("0.26.0", v2=True), "runner_v2"),
        (started("0.26.0", v2=False), None),
        (started("0.26.0"), None),
        (started("0.25.0", v2=True), "runner_v2"),
        (started("0.12.0", v2=True), "runner_v2"),
        (started("0.26.1rc1", v2=True), "runner_v2"),
        (started("main", v2=True), None),
        (started(None, v2=True), None),
        (started("0.27.0", v2=True), None),
        (started("0.32.0", skips=True), "skip_mm_profiling"),
        (started("0.32.0", "cpu", skips=True), None),
    ],
)
def test_a_start_that_did_not_count_the_encoder_is_known(given, by):
    assert given == by


def test_without_a_report_the_engines_version_decides_on_an_npu_alone():
    on_npu = launch_of(None, reading(), "0.12.0")
    assert (on_npu.encoder_unprofiled_by, on_npu.expandable_segments) == ("vllm_ascend", None)
    of_text, on_cuda = reading(encoder_cache=None), reading(device=Device(type="cuda"))
    for one, version in ((reading(), None), (of_text, "0.12.0"), (on_cuda, "0.12.0")):
        assert launch_of(None, one, version).encoder_unprofiled_by is None


def test_segments_are_of_npus_alone():
    on = EngineBudget(environment={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"})
    assert launch_of(on, reading(), None).expandable_segments is True
    assert launch_of(EngineBudget(), reading(), None).expandable_segments is False
    assert launch_of(on, reading(device=Device(type="cuda")), None).expandable_segments is None
