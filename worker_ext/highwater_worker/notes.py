"""The list of values that could not be read, and why: beside every null that is not a plain absence."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from highwater_worker.errors import describe, printable

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Notes:
    """Collects notes during one operation."""

    def __init__(self) -> None:
        self._notes: list[dict[str, str]] = []

    def add(self, name: str, reason: str) -> None:
        """Record why the value called `name` is null, or differs from the one read."""
        self._notes.append({"name": name, "reason": printable(reason, 300)})

    def attempt(self, name: str, read: Callable[[], T]) -> T | None:
        """Return the result of `read`; where it raises, note that under `name` and return None."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - one unreadable value must cost only itself; it is noted by name
            self.add(name, describe(error))
            return None

    def missing(self, name: str, value: T | None, reason: str) -> T | None:
        """Return `value`; where it is None, note the reason under `name`."""
        if value is None:
            self.add(name, reason)
        return value

    def as_list(self) -> list[dict[str, str]]:
        """Return the notes in the order in which they were made."""
        return list(self._notes)
