"""The two clocks that every part reads, so that tests replace both in one place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of one sidecar.

    Attributes:
        monotonic: Seconds for everything that waits or measures. Where the recorders' files are read it must be
            ``CLOCK_MONOTONIC``, which the workers of this machine share.
        wall: Unix seconds, for everything that people read.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
