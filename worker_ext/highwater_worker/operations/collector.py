"""Python's garbage collector, held off while we work."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running by itself meanwhile.

    A thousand encoder entries make a few thousand short-lived objects, enough to start a full collection now and then:
    about 100 ms in a process with torch in it, and every call of ours stops the engine. We leave no cycles behind.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
