"""Engines killed in the middle of each operation, as `tests/engine` does it with the current version."""

from __future__ import annotations

from tests.engine.test_kills import pytestmark, sidecar, test_an_engine_killed_in_an_operation, victim

__all__ = ["pytestmark", "sidecar", "test_an_engine_killed_in_an_operation", "victim"]
