"""docs/install/ray.md: its pods, and what the page says of a sidecar beside workers without an API server of vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from highwater.commands.status import judged
from highwater.readings.engine import STATES
from tests.fakes.engine import Core, core_on
from tests.helm.chart import Object, container, env
from tests.install.guides import (
    assert_harmless,
    assert_recorded,
    assert_valid,
    commands,
    followed,
    page,
    pod_of,
    save,
    saved_files,
)
from tests.support.kubernetes_tools import OLD, tools

PAGE = page("ray")
SERVICE = yaml.safe_load(saved_files(PAGE)["service.yaml"])


def worker_pod(service: Object) -> Object:
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return pod_of(group["template"])


def test_a_worker_pods_vllm_is_recorded_and_nothing_of_ray_moves() -> None:
    pod = worker_pod(SERVICE)
    ray = container(pod, "ray-worker")
    assert_recorded(pod, "ray-worker")
    assert_harmless(pod)
    assert_valid(pod)
    assert set(ray) == {"name", "image", "resources", "env", "volumeMounts"}
    assert "runtime_env" not in SERVICE["spec"]["serveConfigV2"]
    assert pod["spec"]["containers"] == [ray], "KubeRay takes the first container for Ray's"
    settings = env(container(pod, "highwater"))
    assert settings["HIGHWATER_PROXY__ENABLED"] == "false"


def test_a_sidecar_that_ends_leaves_the_pod_ready() -> None:
    sidecar = container(worker_pod(SERVICE), "highwater")
    assert not {"readinessProbe", "livenessProbe", "startupProbe"} & set(sidecar)
    leader = yaml.safe_load(saved_files(page("leaderworkerset"))["leader.yaml"])[-1]["value"][1]
    assert [sidecar[key] for key in ("command", "args")] == [leader[key] for key in ("command", "args")]


def test_one_replica_fills_a_pod() -> None:
    (group,) = SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (app,) = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])["applications"]
    (model,) = app["args"]["llm_configs"]
    (ray,) = group["template"]["spec"]["containers"]
    assert int(ray["resources"]["limits"]["nvidia.com/gpu"]) == model["engine_kwargs"]["tensor_parallel_size"]


def test_the_removal_leaves_their_service(tmp_path: Path) -> None:
    save(PAGE, tmp_path)
    (lines,) = commands(PAGE, "Remove")
    followed(lines.splitlines()[0], tmp_path, tools(OLD))
    text = (tmp_path / "service.yaml").read_text()
    assert "highwater" not in text
    assert list(worker_pod(yaml.safe_load(text))["spec"]) == ["containers"]


# --- what is left without a server of vLLM's ---


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    """Workers that record themselves, and nobody at the engine's address."""
    made = core_on(recorder_dir=tmp_path, dev_mode=False)
    made.fake.start_recorders(tmp_path / "recorder")
    made.fake.down = True
    yield made
    made.recorders.close()
    for worker in made.fake.workers:
        worker.recorder.close()


async def test_every_rank_is_read_and_fresh_without_an_api_server(core: Core) -> None:
    for _ in range(5):
        core.fake.end_step()
        report = await core.tick(1.0, spare_idle=True)
        assert (report.ranks_reported, report.stale, report.age_seconds) == (2, False, 0.0)
        assert {rank.source for rank in report.ranks} == {"recorder"}
        assert all(rank.used_bytes and rank.components and rank.encoder_cache for rank in report.ranks)
    assert core.fake.ops() == []


async def test_the_state_is_starting_for_ever_and_what_needs_an_engine_is_unknown(core: Core) -> None:
    """Not ready, no restart of anything, no verdict on progress, no growth; `highwater status` ends with 1."""
    for _ in range(40):
        core.fake.end_step()
        report = await core.tick(60.0, spare_idle=True)
    assert report.engine.state == "starting"
    assert STATES[report.engine.state].is_absent
    assert report.progress is None
    assert report.growth.since_ready_bytes is None
    assert judged(report).code == 1
