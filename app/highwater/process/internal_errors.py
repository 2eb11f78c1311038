"""Internal errors: unexpected exceptions, caught so that they cost no more than one round, and counted.

Every broad ``except`` that does not raise again moves one of these counters; a test finds those that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypeAlias, get_args

Part: TypeAlias = Literal[
    "poller", "policy", "shared_devices", "host", "incidents", "diagnosis", "growth", "proxy", "http"
]


class InternalErrors:
    def __init__(self) -> None:
        parts: tuple[Part, ...] = get_args(Part)
        self._counts: dict[Part, int] = dict.fromkeys(parts, 0)

    @property
    def counts(self) -> Mapping[Part, int]:
        return self._counts

    def counter(self, part: Part) -> Callable[[], None]:
        return partial(self._count, part)

    def _count(self, part: Part) -> None:
        self._counts[part] += 1
