"""An operation, as the dispatcher sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from highwater_worker.operations.payload import Field


class Operation(NamedTuple):
    """One operation: its name on the wire, the keys of its payload, and its function."""

    name: str
    fields: Mapping[str, Field]
    run: Callable[[object, Mapping[str, Any]], dict[str, Any]]
    """Gets the worker and the checked arguments; returns the answer's body, without the head."""
