"""The operations, by name. To add one: a file with an `OPERATION`, and a line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from highwater_worker.operations import (
    budget,
    encoder_cache,
    hello,
    memory,
    record_stacks,
    recorder_start,
    recorder_stop,
    release,
    restore,
    snapshot,
    trim,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from highwater_worker.operations.operation import Operation

_WORKING = (
    budget.OPERATION,
    encoder_cache.OPERATION,
    memory.OPERATION,
    record_stacks.OPERATION,
    recorder_start.OPERATION,
    recorder_stop.OPERATION,
    release.OPERATION,
    restore.OPERATION,
    snapshot.OPERATION,
    trim.OPERATION,
)

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation for operation in (hello.operation([one.name for one in _WORKING]), *_WORKING)
}
