"""The collector keeps one record a version, remedy and way, and tells them in order."""

from __future__ import annotations

from pathlib import Path

from .results import Result, keep, read


def test_a_test_that_runs_again_replaces_its_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert read(path) == []
    newer = Result("0.23.0", "reset_mm_cache", "naive", "engine hangs", {"calls": 5})
    older = Result("0.9.0", "reset_mm_cache", "naive", "engine hangs", {"calls": 7})
    again = Result("0.23.0", "reset_mm_cache", "naive", "engine lives", {"calls": 1000})
    for result in (newer, older, again):
        keep(path, result)
    assert read(path) == [older, again]
