"""A whole sidecar in a process of its own that can be killed: what `highwater serve` runs, without its start-up."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess
from typing import Any

from highwater.server.settings import Settings
from highwater.terminal.serve import run

TOKEN = "0123456789abcdef-token"
# Forked from a process that has imported everything: each sidecar is there in a fraction of a second.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["highwater.server.main", "highwater.terminal.demo.traffic", __name__])


def start(**settings: Any) -> BaseProcess:
    process = _CONTEXT.Process(target=serve, kwargs=settings, daemon=True)
    process.start()
    return process


def serve(**settings: Any) -> None:
    run(Settings(admin_token=TOKEN, log_level="error", **settings))
