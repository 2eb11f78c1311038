"""The fake engine of the unit tests, and the client of it, of the tests of memory: for versions that differ."""

from __future__ import annotations

from tests.unit.watch.conftest import engine, fake

__all__ = ["engine", "fake"]
