"""A worker extension for an engine that tests may ruin: it hangs, and stops in an operation, where it is told to."""

from __future__ import annotations

from hanging_worker import HangingWorker
from stopping_worker import StoppingWorker


class TroubledWorker(HangingWorker, StoppingWorker):
    """Both of them; what it is not told to do it does as Highwater's extension does."""
