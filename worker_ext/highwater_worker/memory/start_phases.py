"""The phases of a worker's start: how long each took, and what memory was in use when it ended.

The engine calls one method of its workers for each phase (vllm 0.12.0 v1/worker/worker_base.py:35, vllm 0.32.0
v1/worker/worker_base.py:44, `WorkerBase`). A phase that fails is kept too: it is all that a failed start leaves behind.

Two more are not methods of the worker. `before` is the memory in use before the engine took any: as it looks at its
device first, once that can be used. `graphs` is the runner's method, called within `warm_up` (vllm 0.12.0
v1/worker/gpu_worker.py:427, vllm 0.32.0 v1/worker/gpu_worker.py:962,
vllm 0.33.0 v1/worker/gpu_worker.py:994, vllm_ascend 0.12.0rc1 worker/worker_v1.py:358,
vllm_ascend 0.23.0 worker/worker.py:732).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from highwater_worker.devices import HostMemory, device_of, is_host_memory, read_allocator, read_host, read_space
from highwater_worker.engine_view import (
    ENCODER_RUNNER,
    INIT_FREE,
    INIT_TOTAL,
    as_int,
    configured_device,
    describe_encoder_budget,
    first_of,
    look_up,
)
from highwater_worker.errors import Notes, describe
from highwater_worker.memory.storages import describe_layers
from highwater_worker.wrapping import notice_calls, unwrap_method, wrap_method

PHASES = {
    "init_device": "init",
    "load_model": "weights",
    "determine_available_memory": "profile",
    "initialize_from_config": "kv_cache",
    "compile_or_warm_up_model": "warm_up",
}
BEFORE, GRAPHS = "before", "graphs"
CAPTURE = "capture_model"
SPECS = "get_kv_cache_spec"
"""The worker's method that describes the layers of its KV cache (vllm 0.12.0 v1/worker/gpu_worker.py:383, vllm 0.32.0
v1/worker/gpu_worker.py:837); the engine calls it before it groups them."""
PROFILE_ENCODER = "profile_encoder_cache"
"""The method of model runner V2 that profiles the encoder, with the budget (vllm 0.27.0
v1/worker/gpu/mm/encoder_runner.py:60, vllm 0.33.0 v1/worker/gpu/mm/encoder_runner.py:111)."""
RETURNS_BYTES = frozenset({"profile", GRAPHS})
"""The phases whose methods return bytes (vllm 0.12.0 v1/worker/gpu_worker.py:366, vllm 0.12.0
v1/worker/gpu_model_runner.py:4472, vllm 0.32.0 v1/worker/gpu_model_runner.py:6586)."""
MAX_PHASES = 16  # so that an engine which loads its weights many times over does not fill the file with them


class StartPhases:
    """The account of one worker's start; calls `ended` after each phase, on the engine's thread."""

    def __init__(self, worker: object, ended: Callable[[], None]) -> None:
        self.phases: list[dict[str, Any]] = []
        """One object for each phase, in the order in which they ended: `name`, `at` (Unix seconds, when it began),
        `seconds`, and as of its end `total_bytes`, `free_bytes`, `used_bytes`, `allocated_bytes`, `reserved_bytes` and
        `rss_bytes`, null where not known; `error` is the exception in one line, null where the phase succeeded."""
        self.returned: dict[str, int] = {}
        """The bytes that phases returned, by their names: `profile` what is left for the KV cache, `graphs` what the
        captured graphs took; absent where a phase returned no number."""
        self.kv_layers: dict[str, Any] | None = None
        """The layers of the KV cache before they were grouped; None before the engine asked for them."""
        self.encoder_budget: dict[str, Any] | None = None
        """The encoder's budget as model runner V2 profiled it; None where that was not seen."""
        self._worker = weakref.ref(worker)  # the worker is not kept alive
        self._ended = ended
        self._host_before: HostMemory | None = None
        self._capture: object = None  # the wrapper of the runner's method, while it is in place

    @property
    def is_over(self) -> bool:
        """True if the last phase has succeeded: graphs are captured, and traffic may come."""
        return any(phase["name"] == "warm_up" and phase["error"] is None for phase in self.phases)

    def watch(self) -> None:
        def note_layers(specs: Mapping[str, object], *_: object, **__: object) -> None:
            self.kv_layers = describe_layers(specs)

        for method, name in PHASES.items():
            wrap_method(self._worker(), method, self._timed(name))
        notice_calls(self._worker(), SPECS, after=note_layers)

    def _timed(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            def phase(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
                with suppress(Exception):  # the engine's start must not fail because of this account
                    self._begin(name)
                at, began, error = time.time(), time.monotonic(), None
                try:
                    returned = method(*arguments, **named)
                    with suppress(Exception):  # as above
                        size = as_int(returned) if isinstance(returned, (int, float)) else None
                        if size is not None and name in RETURNS_BYTES:
                            self.returned[name] = size
                    return returned
                except BaseException as raised:
                    error = raised
                    raise
                finally:
                    with suppress(Exception):  # as above
                        self._end(name, at, time.monotonic() - began, error)

            return phase

        return make

    def _begin(self, name: str) -> None:
        def note_budget(dummy_mm_inputs: object, budget: object) -> None:  # noqa: ARG001 - by vLLM's names
            self.encoder_budget = describe_encoder_budget(budget)

        runner = look_up(self._worker(), "model_runner")
        if name == "init":
            self._host_before = read_host(Notes())
        elif name == "profile" and (encoder := first_of(runner, ENCODER_RUNNER)) is not None:
            notice_calls(encoder, PROFILE_ENCODER, before=note_budget)
        elif name == "warm_up" and runner is not None and wrap_method(runner, CAPTURE, self._timed(GRAPHS)):
            self._capture = vars(runner)[CAPTURE]

    def _end(self, name: str, at: float, seconds: float, error: BaseException | None) -> None:
        runner = look_up(self._worker(), "model_runner")
        # A driver that has just failed to begin may not answer at all.
        figures = {} if error is not None and name == "init" else self._figures()
        if name == "init":
            self._add(BEFORE, at, 0.0, self._figures_before(figures.get("total_bytes")), None)
        elif name == "warm_up" and self._capture is not None:
            unwrap_method(runner, CAPTURE, self._capture)
            self._capture = None
        self._add(name, at, seconds, figures, error)
        self._ended()

    def _add(
        self, name: str, at: float, seconds: float, figures: dict[str, int | None], error: BaseException | None
    ) -> None:
        if len(self.phases) < MAX_PHASES:
            described = None if error is None else describe(error)
            self.phases.append(
                {"name": name, "at": round(at, 3), "seconds": round(seconds, 3), **figures, "error": described}
            )

    def _figures_before(self, total: int | None) -> dict[str, int | None]:
        """Return the figures by which the engine plans; no driver is called, for `init` may have failed.

        `total` is the driver's: some engines keep the free bytes alone.
        """
        worker, host = self._worker(), self._host_before
        total, free = (
            first_of(worker, *INIT_TOTAL, convert=as_int) or total,
            first_of(worker, *INIT_FREE, convert=as_int),
        )
        used = None if total is None or free is None else total - free
        if host is not None and is_host_memory(configured_device(worker)):
            total, free, used = host.total_bytes, host.free_bytes, host.rss_bytes
        rss = look_up(host, "rss_bytes")
        return {"total_bytes": total, "free_bytes": free, "used_bytes": used, "rss_bytes": rss}

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
