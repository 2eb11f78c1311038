"""The fake engine of the tests of memory, and the client of it."""

from __future__ import annotations

from tests.unit.watch.conftest import engine, fake

__all__ = ["engine", "fake"]
