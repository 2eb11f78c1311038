"""Adds one remote procedure to vLLM's workers, which runs an operation and returns one JSON object.

vLLM resolves the class before the device exists, and appends it to the bases of a live worker class once it has
asserted that the worker has none of its attributes (vllm 0.12.0 v1/worker/worker_base.py:272, vllm 0.32.0
v1/worker/worker_base.py:306, `init_worker`). Hence few public names, no `__init__` (it would never run), no
`__slots__`, no metaclass; whatever must be kept stays in `_highwater_state`, set on the worker when first needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

from highwater_worker.engine_view import identity
from highwater_worker.errors import BadPayloadError, RequestError, UnknownOpError, describe, printable
from highwater_worker.operations import OPERATIONS
from highwater_worker.recorder import end_recorder, running_recorder
from highwater_worker.state import state_of, watch_sleep

SCHEMA = 1

UNANSWERABLE = (
    '{"schema": 1, "ok": false, "op": null, "rank": null, "local_rank": null, "dp_rank": null, "tp_rank": null, '
    '"pp_rank": null, "host": null, "pid": null, "pid_started": null, "taken_at": null, '
    '"error": {"code": "failed", "message": "the worker extension could not write its answer"}}'
)
"""The response when even an error's response cannot be made: a constant cannot fail."""


def answer(
    worker: object,
    op: object,
    payload: object,
    excess: tuple[object, ...] = (),
    unknown: Mapping[str, object] | None = None,
) -> str:
    """Run one operation on a worker and return the response as ASCII JSON; an exception becomes its `error`.

    Raises:
        SystemExit: vLLM's worker received SIGTERM. Its handler raises that once and never again (vllm 0.32.0
            v1/executor/multiproc_executor.py:878, `signal_handler`): caught here, the worker would ignore its end.
        KeyboardInterrupt: The user of an engine inside their own process stops it.
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
        watch_sleep(worker)
        state_of(worker).history.end_if_due()
    recorder = running_recorder(worker)
    with nullcontext() if recorder is None else recorder.operation(str(op)):
        return operation.respond(worker, payload)


def _text(worker: object, op: str | None, status: dict[str, Any], body: dict[str, Any]) -> str:
    head = {"schema": SCHEMA, **status, "op": op, **identity(worker), "taken_at": round(time.time(), 3)}
    return json.dumps({**head, **body}, allow_nan=False, ensure_ascii=True)


class MemoryExtension:
    """The class that vLLM mixes into its workers; adds `highwater_rpc`."""

    def destroy_worker_extension(self) -> None:
        """End the recorder while the worker is still whole; never raises.

        vLLM calls it before `worker.shutdown()` where it knows the hook (vllm 0.33.0 v1/worker/worker_base.py:254);
        older ones do not, and have no attribute of this name either. Its other hook, `init_worker_extension`, would run
        after `init_device`, where nothing is to be done yet.
        """
        with suppress(Exception):  # the worker is about to end, and the recorder with it
            end_recorder(self)

    def highwater_rpc(self, op: object = "", payload: object = "{}", *excess: object, **unknown: object) -> str:
        """Run one operation on this worker's memory, and return one JSON object in ASCII, whatever the arguments are.

        An exception would do more than fail this call: the replies of all ranks would stay one behind. `collective_rpc`
        raises at the first failure and leaves the other ranks' replies queued (vllm 0.12.0
        v1/executor/multiproc_executor.py:343, vllm 0.32.0 v1/executor/multiproc_executor.py:443). Only what ends the
        process passes: as `answer` raises.

        `payload` is the text of one JSON object. What does not fit the signature (`excess`, `unknown`) is refused in
        the response: a call that does not fit would raise before the first line.
        """
        try:
            return answer(self, op, payload, excess, unknown)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException:  # noqa: BLE001 - the last guard, as an exception must not leave
            return UNANSWERABLE
