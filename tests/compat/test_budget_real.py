"""The budgets of older versions' engines explained: their own log lines and metrics, and exact sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.engine.conftest import sidecar_beside, wait_for
from tests.engine.explained import assert_pool_is_the_engines, assert_sums_are_exact
from tests.engines import watching

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from highwater.demo.engine import Engine


def test_an_older_engines_budget_is_explained(
    version: str, engine_factory: Callable[..., Engine], tmp_path: Path
) -> None:
    """From its recorder's file alone."""
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
