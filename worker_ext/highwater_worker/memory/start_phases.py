"""The phases of a worker's start: how long each took, and what memory was in use when it ended.

The engine calls one method of its workers for each phase (vllm 0.12.0 v1/worker/worker_base.py:35, vllm 0.32.0
v1/worker/worker_base.py:44, `WorkerBase`). A phase that fails is kept too: it is all that a failed start leaves behind.
"""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from highwater_worker.devices import device_of
from highwater_worker.devices.host import read_host
from highwater_worker.errors import describe
from highwater_worker.memory.memory_parts import read_allocator, read_space
from highwater_worker.notes import Notes
from highwater_worker.wrapping import wrap_method

if TYPE_CHECKING:
    from collections.abc import Callable

PHASES = {
    "init_device": "init",
    "load_model": "weights",
    "determine_available_memory": "profile",
    "initialize_from_config": "kv_cache",
    "compile_or_warm_up_model": "warm_up",
}
"""The engine's methods, and the phases' names."""
MAX_PHASES = 16
"""So that an engine which loads its weights many times over does not fill the file with them."""


class StartPhases:
    """The account of one worker's start.

    Args:
        worker: The worker; it is not kept alive.
        ended: Called after each phase, on the engine's thread.
    """

    def __init__(self, worker: object, ended: Callable[[], None]) -> None:
        self.phases: list[dict[str, Any]] = []
        """One object for each phase that ended: `name`, `at` (Unix seconds, when it began), `seconds`, and as of its
        end `total_bytes`, `free_bytes`, `used_bytes`, `allocated_bytes`, `reserved_bytes` and `rss_bytes`, null where
        not known; `error` is the exception in one line, null where the phase succeeded."""
        self._worker = weakref.ref(worker)
        self._ended = ended

    @property
    def is_over(self) -> bool:
        """True if the last phase has succeeded: graphs are captured, and traffic may come."""
        return any(phase["name"] == "warm_up" and phase["error"] is None for phase in self.phases)

    def watch(self) -> None:
        """Keep the account from now on."""
        for method, name in PHASES.items():
            wrap_method(self._worker(), method, self._timed(name))

    def _timed(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            def phase(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
                at, began, error = time.time(), time.monotonic(), None
                try:
                    return method(*arguments, **named)
                except BaseException as raised:
                    error = raised
                    raise
                finally:
                    with suppress(Exception):  # the engine's start must not fail of our account of it
                        self._keep(name, at, time.monotonic() - began, error)

            return phase

        return make

    def _keep(self, name: str, at: float, seconds: float, error: BaseException | None) -> None:
        if len(self.phases) >= MAX_PHASES:
            return
        # A driver that has just failed to begin may not answer at all.
        figures = {} if error is not None and name == "init" else self._figures()
        described = None if error is None else describe(error)
        self.phases.append(
            {"name": name, "at": round(at, 3), "seconds": round(seconds, 3), **figures, "error": described}
        )
        self._ended()

    def _figures(self) -> dict[str, int | None]:
        notes, worker = Notes(), self._worker()
        device, host = notes.attempt("device", lambda: device_of(worker)), read_host(notes)
        allocator = read_allocator(device, notes)
        return {
            **read_space(worker, device, host, notes)._asdict(),
            "allocated_bytes": allocator.allocated_bytes,
            "reserved_bytes": allocator.reserved_bytes,
            "rss_bytes": host.rss_bytes,
        }
