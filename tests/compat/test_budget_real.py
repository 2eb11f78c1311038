"""The budgets of older versions' engines explained: their own log lines and metrics, and exact sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from highwater.model.units import GIB
from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment, EngineOptions
from tests.engine.conftest import sidecar_beside, wait_for
from tests.engine.explained import assert_pool_is_the_engines, assert_sums_are_exact, logged
from tests.engines import AnyEngine, watching


def test_an_older_engines_budget_is_explained(
    version: str, engine_factory: Callable[..., DemoEngine], tmp_path: Path
) -> None:
    rings = tmp_path / "rings"
    with (
        engine_factory(**watching(rings)) as engine,
        sidecar_beside(engine, tmp_path, HIGHWATER_RECORDER_DIR=str(rings)) as sidecar,
    ):
        wait_for(sidecar, lambda report: report["engine"]["state"] == "ready" and report["ranks_reported"] == 1)
        answer = sidecar.call("GET", "/memory/budget")
        assert_pool_is_the_engines(engine, answer, version)
        assert_sums_are_exact(answer)
        assert answer["explanation"]["encoder"]["cache_size"] > 0


class SelfSizing(AnyEngine):
    """A CPU engine that takes a share of the machine, as vLLM does by default, in place of a given KV cache."""

    def _command(self) -> list[str]:
        command = super()._command()
        given = command.index("--kv-cache-memory-bytes")
        return [*command[:given], *command[given + 2 :], "--gpu-memory-utilization", "0.12"]


def test_a_share_of_the_machine_is_explained(
    version: str, engine_environment: EngineEnvironment, tmp_path: Path
) -> None:
    if version == "0.12.0":
        pytest.skip("its CPU worker knows no share of the machine: VLLM_CPU_KVCACHE_SPACE alone sizes the KV cache")
    rings = tmp_path / "rings"
    options = EngineOptions(**(watching(rings) | {"multimodal": False}))
    with (
        SelfSizing(engine_environment, options, folder=tmp_path / "engine") as engine,
        sidecar_beside(engine, tmp_path, HIGHWATER_RECORDER_DIR=str(rings)) as sidecar,
    ):
        wait_for(sidecar, lambda report: report["engine"]["state"] == "ready" and report["ranks_reported"] == 1)
        answer = sidecar.call("GET", "/memory/budget")
        assert_pool_is_the_engines(engine, answer, version)
        assert_sums_are_exact(answer)
        (rank,) = answer["explanation"]["ranks"]
        parts = {part["key"]: part["bytes"] for part in rank["parts"]}
        taken = rank["requested_bytes"] - rank["available_bytes"]
        assert rank["counting"] == "cpu"
        assert parts["weights"] + parts["process"] == taken
        assert f"{rank['requested_bytes'] / GIB:.2f}" == logged(engine, r"with ([\d.]+) GiB requested memory")
        assert f"{taken / GIB:.2f}" == logged(engine, r"([\d.]+) GiB memory was consumed by non-kv usages")
        assert answer["explanation"]["encoder"] is None
