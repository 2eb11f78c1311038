"""Internal errors: unexpected exceptions, caught so that they cost no more than one round, and counted.

Every broad ``except`` that does not raise again moves one of these counters; a test finds those that do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias, get_args

Part: TypeAlias = Literal[
    "poller", "policy", "shared_devices", "host", "incidents", "diagnosis", "growth", "proxy", "http"
]


class InternalErrors:
    def __init__(self) -> None:
        self.counts: Counter[Part] = Counter(dict.fromkeys(get_args(Part), 0))

    def counter(self, part: Part) -> Callable[[], None]:
        return partial(self.counts.update, (part,))
