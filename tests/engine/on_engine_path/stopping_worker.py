"""A worker extension that stops its process in the middle of an operation, so that a test can kill it just there.

The engine finds it by its folder. Without the file that `HIGHWATER_TEST_STOP` names it does what Highwater's does.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from highwater_worker import MemoryExtension
from highwater_worker.wrapping import wrap_method

_ORDER = Path(os.environ["HIGHWATER_TEST_STOP"])
_RESETS = ("reset_encoder_cache", "reset_mm_cache")
_calls: dict[str, int] = {}
"""How many Python and C calls an operation made when it ran last."""


def _fraction(op: str) -> float | None:
    """How far into its calls this operation is to stop; None where nothing is ordered. An order is taken once."""
    try:
        ordered, fraction = _ORDER.read_text().split()
    except (OSError, ValueError):
        return None
    if ordered != op:
        return None
    _ORDER.unlink(missing_ok=True)
    return float(fraction)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class StoppingWorker(MemoryExtension):
    """Highwater's extension; stops its own process where it is told to."""

    def highwater_rpc(self, op: str = "", payload: str = "{}") -> str:
        """Run the operation, counting its calls, and stop at the ordered one; at its end where it makes fewer."""
        self._highwater_watch_resets()
        fraction = _fraction(op)
        stop_at = None if fraction is None else int(fraction * _calls.get(op, 0))
        seen = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal seen
            del frame, argument
            if event in ("call", "c_call"):
                if seen == stop_at:
                    _stop()
                seen += 1

        sys.setprofile(profile)
        try:
            answer = super().highwater_rpc(op, payload)
        finally:
            sys.setprofile(None)
        if stop_at is not None and seen <= stop_at:
            _stop()
        _calls[op] = seen
        return answer

    def _highwater_watch_resets(self) -> None:
        """Stop in the worker's part of a reset, too, where the version has one."""
        for name in _RESETS:
            if name in vars(self):
                continue

            def make(method: Any, name: str = name) -> Any:
                def reset(*arguments: Any, **named: Any) -> Any:
                    if _fraction(name) is not None:
                        _stop()
                    return method(*arguments, **named)

                return reset

            wrap_method(self, name, make)
