"""Plugin that vLLM loads in each process where this package is installed: entry point `vllm.general_plugins`.

It wraps `WorkerBase.__init__`, and there, on the worker's instance, binds `highwater_rpc` where it is missing, follows
the start and, where `HIGHWATER_RECORDER_DIR` names a folder, starts the recorder. It leaves the setting
`worker_extension_cls` alone, opens no development mode, and lets no exception out: one would end vLLM's process.

Plugins are loaded in each worker's process before the worker is made (vllm 0.12.0 v1/worker/worker_base.py:252, vllm
0.32.0 v1/worker/worker_base.py:276), and each worker's own `__init__` calls the one that is wrapped (vllm 0.12.0
v1/worker/gpu_worker.py:73, vllm 0.32.0 v1/worker/gpu_worker.py:201, vllm_ascend 0.11.0 worker/worker_v1.py:109,
vllm_ascend 0.12.0rc1 worker/worker_v1.py:98, vllm_ascend 0.13.0 worker/worker.py:118, vllm_ascend 0.18.0
worker/worker.py:111, vllm_ascend 0.23.0 worker/worker.py:126, vllm_ascend 0.27.1rc1 worker/worker.py:151, vllm_ascend
0.30.0rc2 worker/worker.py:159). A subclass that overrides a phase without calling its base's, as vllm-ascend's do, is
timed all the same: the methods are wrapped on the instance.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from highwater_worker.errors import Notes
from highwater_worker.extension import MemoryExtension
from highwater_worker.memory.start_phases import StartPhases
from highwater_worker.processes import start_process_file, worker_made
from highwater_worker.recorder import begin_recorder, folder_from, instance_of, options_from, running_recorder
from highwater_worker.state import state_of, watch_sleep

_WORKERS = "vllm.v1.worker.worker_base"
_MARK = "_highwater_plugin"

# Beneath vLLM's own logger, so that it is written where vLLM writes.
log = logging.getLogger("vllm.highwater_worker")


def register() -> None:
    """Wrap vLLM's worker class and start this process's file; a second call does nothing."""
    try:
        if folder := folder_from(os.environ):
            start_process_file(folder)
    except Exception as error:  # noqa: BLE001 - as below
        log.warning("Highwater does not record this process's host memory: %s", error)
    try:
        _wrap(import_module(_WORKERS).WorkerBase)
    except Exception as error:  # noqa: BLE001 - vLLM calls this unguarded: what is raised here ends its process
        log.warning("Highwater's worker plugin cannot work with this vLLM, and changes nothing: %r", error)


def _wrap(worker_class: Any) -> None:  # noqa: ANN401 - vLLM's class, of any version
    original: Callable[..., None] = worker_class.__init__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: ANN401, N807 - vLLM's own
        original(self, *arguments, **named)
        try:
            attach(self)
        except Exception as error:  # noqa: BLE001 - the worker must come up all the same
            log.warning("Highwater's worker plugin could not attach to a worker, and leaves it alone: %r", error)

    setattr(__init__, _MARK, True)
    worker_class.__init__ = __init__


def attach(worker: Any) -> None:  # noqa: ANN401 - vLLM's worker, of any version
    """Bind everything to one worker; a second call does nothing."""
    state = state_of(worker)
    if state.start is not None:
        return
    reference = weakref.ref(worker)
    if not hasattr(worker, "highwater_rpc"):  # no extension class brings it

        @functools.wraps(MemoryExtension.highwater_rpc)
        def highwater_rpc(*arguments: object, **named: object) -> str:
            return MemoryExtension.highwater_rpc(reference(), *arguments, **named)  # type: ignore[arg-type]

        worker.highwater_rpc = highwater_rpc
    with suppress(Exception):  # it decides about nothing else
        worker_made(worker)
    watch_sleep(worker)
    state.sleep.is_complete = True  # the worker has only just been made: nothing of it can be asleep
    state.start = StartPhases(worker, ended=lambda: _phase_ended(reference()))
    state.start.watch()


def _phase_ended(worker: object) -> None:
    if worker is None:
        return
    recorder = running_recorder(worker)
    if recorder is not None:
        recorder.start_changed()
        return
    try:
        folder = folder_from(os.environ)
        if folder is None:
            return
        options = options_from(os.environ, folder, instance_of(worker))
        recorder = begin_recorder(worker, options, Notes(), is_starting=True)
    except Exception as error:  # noqa: BLE001 - an engine without a recorder serves as well as one with it
        state = state_of(worker)
        if not state.has_warned:  # once, not after every phase
            state.has_warned = True
            log.warning("Highwater's recorder was not started: %s", error)
    else:
        log.info("Highwater's recorder writes to %s", recorder.ring.path)
