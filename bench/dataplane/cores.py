"""The cores of the parts: the proxy alone on one, upstream and load on others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cores:
    """One core each; with two cores upstream and load share one, with one all do."""

    proxy: int
    upstream: int
    load: int

    def in_words(self) -> str:
        """For the page."""
        if self.proxy == self.load:
            return "proxy, upstream and load generator share the only core"
        if self.upstream == self.load:
            return "the proxy has one core for itself, upstream and load generator share the other"
        return "proxy, upstream and load generator have a core each"


def spread(usable: Sequence[int]) -> Cores:
    """Lay the three out over the cores that there are."""
    first, *others = sorted(usable)
    return Cores(first, others[0] if others else first, others[min(1, len(others) - 1)] if others else first)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Run what is started within on this core, with all its threads and children: the kernel hands it down."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
