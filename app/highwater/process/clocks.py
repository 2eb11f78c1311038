"""The clocks that every part reads, handed on as one thing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Clocks:
    """``wall``, Unix seconds, is for everything that people read; ``monotonic`` for everything that waits or measures.

    Where the recorders' files are read ``monotonic`` must be ``CLOCK_MONOTONIC``, which the workers of this machine
    share.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


SYSTEM: Final = Clocks()
