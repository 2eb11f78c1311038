"""The class that vLLM mixes into its workers, and nothing else.

vLLM resolves it before the device exists, and appends it to the bases of a live worker class once it has asserted that
the worker has none of its attributes (vllm 0.12.0 v1/worker/worker_base.py:272, vllm 0.32.0
v1/worker/worker_base.py:306, `init_worker`). Hence few public names, no `__init__` (it would never run), no
`__slots__`, no metaclass; whatever must be kept stays in `_highwater_state`, set on the worker when first needed.
"""

from __future__ import annotations

from contextlib import suppress

from highwater_worker.answers import UNANSWERABLE, answer
from highwater_worker.state import end_recorder


class MemoryExtension:
    """Adds one remote procedure to a vLLM worker: `highwater_rpc`."""

    def destroy_worker_extension(self) -> None:
        """End the recorder while the worker is still whole; never raises.

        vLLM calls it before `worker.shutdown()` where it knows the hook (vllm 0.33.0 v1/worker/worker_base.py:254);
        older ones do not, and have no attribute of this name either. Its other hook, `init_worker_extension`, would run
        after `init_device`, where there is nothing for us to do yet.
        """
        with suppress(Exception):  # the worker is about to end, and the recorder with it
            end_recorder(self)

    def highwater_rpc(self, op: object = "", payload: object = "{}", *excess: object, **unknown: object) -> str:
        """Run one operation on this worker's memory, and return its answer.

        Args:
            op: An operation's name, such as `memory`; `hello` lists them.
            payload: The operation's arguments as the text of one JSON object.
            excess: Refused in the answer. It is here because a call that does not fit raises before our first line.
            unknown: Refused in the answer, for the same reason.

        Returns:
            One JSON object in ASCII, always. An exception, a wrong type or a missing argument would do more than fail
            this call: the replies of all ranks stay one behind for ever. `collective_rpc` raises at the first failure
            and leaves the other ranks' replies queued (vllm 0.12.0 v1/executor/multiproc_executor.py:343, vllm 0.32.0
            v1/executor/multiproc_executor.py:443).

        Raises:
            SystemExit: As vLLM's worker answers SIGTERM with it.
            KeyboardInterrupt: Likewise; the process is to end, and nobody waits for replies then.
        """
        try:
            return answer(self, op, payload, excess, unknown)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException:  # noqa: BLE001 - the last guard, see Returns
            return UNANSWERABLE
