"""From a call to its answer: find the operation, check the payload, run it, and write one JSON object.

Nothing leaves it but that object's text, and the two exceptions that end a process.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from highwater_worker.encoder_cache.sleep import watch_sleep
from highwater_worker.errors import BadPayloadError, RequestError, UnknownOpError, describe, printable
from highwater_worker.identity import identity
from highwater_worker.operations import OPERATIONS
from highwater_worker.operations.collector import no_collection
from highwater_worker.operations.payload import parse_payload
from highwater_worker.state import running_recorder, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

SCHEMA = 1

UNANSWERABLE = (
    '{"schema": 1, "ok": false, "op": null, "rank": null, "local_rank": null, "dp_rank": null, "tp_rank": null, '
    '"pp_rank": null, "host": null, "pid": null, "pid_started": null, "taken_at": null, '
    '"error": {"code": "failed", "message": "the worker extension could not write its answer"}}'
)
"""The answer when even an error's answer cannot be made: a constant, because a constant cannot fail."""


def answer(
    worker: object,
    op: object,
    payload: object,
    excess: tuple[object, ...] = (),
    unknown: Mapping[str, object] | None = None,
) -> str:
    """Run one operation on a worker and return its answer as ASCII JSON; whatever it raises becomes its `error`.

    Raises:
        SystemExit: vLLM's worker was sent SIGTERM meanwhile. Its handler raises that once and never again
            (vllm 0.32.0 v1/executor/multiproc_executor.py:878, `signal_handler`): kept here, the worker would ignore
            its end.
        KeyboardInterrupt: The user of an engine inside their own process wants it to stop.
    """
    name = printable(op, 100) if isinstance(op, str) else None
    try:
        return _text(worker, name, {"ok": True}, _run(worker, op, payload, excess, unknown or {}))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - errors are data here: raised, they would desynchronise the ranks
        message = printable(str(error), 1000) if isinstance(error, RequestError) else describe(error)
        code = error.code if isinstance(error, RequestError) else "failed"
        return _text(worker, name, {"ok": False}, {"error": {"code": code, "message": message}})


def _run(
    worker: object, op: object, payload: object, excess: tuple[object, ...], unknown: Mapping[str, object]
) -> dict[str, Any]:
    operation = OPERATIONS.get(op) if isinstance(op, str) else None
    if operation is None:
        raise UnknownOpError(f"op {printable(repr(op), 100)} is unknown; known: {', '.join(sorted(OPERATIONS))}")
    if excess or unknown:
        raise BadPayloadError(
            f"highwater_rpc takes op and payload; it got {len(excess)} more by position "
            f"and {printable(', '.join(unknown)) or 'none'} by name"
        )
    with suppress(Exception):  # an engine that cannot be watched can be read all the same
        watch_sleep(worker, state_of(worker).sleep)
        state_of(worker).history.end_if_due()
    with _shown(worker, str(op)), no_collection():
        return operation.run(worker, parse_payload(payload, operation.fields))


def _shown(worker: object, op: str) -> AbstractContextManager[None]:
    recorder = running_recorder(worker)
    return nullcontext() if recorder is None else recorder.operation(op)


def _text(worker: object, op: str | None, status: dict[str, Any], body: dict[str, Any]) -> str:
    head = {"schema": SCHEMA, **status, "op": op, **identity(worker), "taken_at": round(time.time(), 3)}
    return json.dumps({**head, **body}, allow_nan=False, ensure_ascii=True)
