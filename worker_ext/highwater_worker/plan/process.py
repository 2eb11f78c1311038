"""The process that imports vLLM once, and a child of it for each question, so that no answer depends on another."""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from highwater_worker.plan.cards import Card

MAX_BYTES = 3 << 29
"""Resident memory of an answer, vLLM included: 1.5 GiB."""
_LOOK_SECONDS, _SAY_SECONDS = 0.2, 5
_QUIET = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "TORCHDYNAMO_DISABLE"), "1"),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "FLASHINFER_DISABLE_JIT": "1",  # else it would look for a compiler
    "VLLM_HAS_FLASHINFER_CUBIN": "1",  # else vLLM asks NVIDIA's server whether it is there
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # its threads would not be there in a child
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIGHWATER_RECORDER_DIR"), ""),
}


class CannotBeAskedError(Exception):
    """This vLLM gives no answer; says why."""


def import_vllm(card: Card, environ: dict[str, str], deadline_seconds: float) -> None:
    """Make this process one that has vLLM and such cards, and says on stderr every five seconds that it imports.

    Standard output is left to answers; there is no network. Raises CannotBeAskedError.
    """
    os.environ.update({**environ, **_QUIET})
    _without_network()
    started = time.monotonic()

    def tick(*_: object) -> None:
        took = time.monotonic() - started
        if took > deadline_seconds:
            raise CannotBeAskedError(f"importing vLLM took more than {deadline_seconds:.0f} s")
        sys.stderr.write(f"importing vLLM: {took:.0f} s\n")

    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, _SAY_SECONDS, _SAY_SECONDS)
    try:
        if card.capability == (0, 0):
            importlib.import_module("highwater_worker.plan.ascend").pretend_npu(card)
        else:
            importlib.import_module("highwater_worker.plan.platform").pretend_cuda(card)
        for name in ("engine.arg_utils", "v1.engine.core", "v1.worker.gpu_worker"):
            importlib.import_module(f"vllm.{name}")
        gc.freeze()
    except CannotBeAskedError:
        raise
    except Exception as error:
        raise CannotBeAskedError(f"vLLM cannot be imported here: {type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def ask(question: dict[str, Any], card: Card, deadline_seconds: float) -> dict[str, Any]:
    """Return a child's answer. Raises CannotBeAskedError: it took too long or too much memory, or ended without."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(int(deadline_seconds) + 60)  # should nobody be left to end it
        status = 1
        try:
            _answer(question, card, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    try:
        found = json.loads(_read(reading, child, deadline_seconds))
    except ValueError as error:
        raise CannotBeAskedError("the process ended without an answer; stderr has what it said") from error
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for name in found.pop("modules"):  # later children have them
        with suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # vLLM collects at every load: what children inherit is not looked at
    return dict(found)


def _answer(question: dict[str, Any], card: Card, writing: int) -> None:
    had = set(sys.modules)
    found = importlib.import_module("highwater_worker.plan.answer").answer(question, card)
    found["modules"] = [name for name in sys.modules if name not in had]
    with os.fdopen(writing, "w") as answers:
        json.dump(found, answers, default=str)


def _read(reading: int, child: int, deadline_seconds: float) -> bytes:
    """Return all that a child writes until it closes its end."""
    started, read = time.monotonic(), b""
    while time.monotonic() - started < deadline_seconds:
        if select.select([reading], [], [], _LOOK_SECONDS)[0]:
            piece = os.read(reading, 1 << 16)
            if not piece:
                return read
            read += piece
        with suppress(OSError), open(f"/proc/{child}/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            if used > MAX_BYTES:
                raise CannotBeAskedError(f"the answer took {used >> 20} MiB of memory; {MAX_BYTES >> 20} are allowed")
    raise CannotBeAskedError(f"there was no answer within {deadline_seconds:.0f} s")


def _without_network() -> None:
    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and self.type == socket.SOCK_STREAM:
            raise OSError("a plan uses no network")
        connect(self, address)

    def resolve(*_: object, **__: object) -> Any:
        raise socket.gaierror("a plan uses no network")

    socket.socket.connect = connect_locally  # type: ignore[method-assign, assignment]
    socket.getaddrinfo = resolve
