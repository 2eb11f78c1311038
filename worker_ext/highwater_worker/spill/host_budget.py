"""The host memory that one worker may fill with spilled entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from highwater_worker.attributes import look_up, whole
from highwater_worker.devices.host import read_host
from highwater_worker.errors import RefusedError

if TYPE_CHECKING:
    from highwater_worker.devices.host import HostMemory
    from highwater_worker.notes import Notes


class HostBudget(NamedTuple):
    """Bytes of host memory for spilled entries."""

    total: int
    taken: int
    """The bytes that lie there already."""

    @property
    def left(self) -> int:
        """The bytes that may still be added; negative where more lie there than is allowed now."""
        return self.total - self.taken

    def __str__(self) -> str:
        return f"the host's budget is {self.total} bytes, of which {self.taken} are taken"


def read_host_budget(
    worker: object, given: int | None, taken: int, notes: Notes, host: HostMemory | None = None
) -> HostBudget:
    """Return one worker's budget: the caller's, or half of what the host could give if nothing were spilled.

    Never more than the host has left for this worker: the kernel ends a process that takes more, and so the engine.

    Args:
        worker: The worker. Others of its engine on the same machine get the same call at the same time.
        given: The caller's limit; None without one.
        taken: The bytes that this worker has spilled already.
        notes: Gets the reason why the budget is less than given.
        host: The host's memory; None to read it.

    Raises:
        RefusedError: There is no limit, and the host's free memory is unknown.
    """
    host = host or read_host(notes)
    if host.free_bytes is None:
        if given is None:
            raise RefusedError("what the host's memory has left cannot be read: give host_budget_bytes")
        return HostBudget(given, taken)
    share = taken + host.free_bytes // _ranks_on_this_host(worker, notes)
    if given is None:
        return HostBudget(share // 2, taken)
    if given > share:
        notes.add("host_budget_bytes", f"{share} instead of {given}: the host has no more left for this worker")
    return HostBudget(min(given, share), taken)


def _ranks_on_this_host(worker: object, notes: Notes) -> int:
    parallel = look_up(worker, "vllm_config", "parallel_config")
    # Older engines do not show how many of their ranks are on this machine: all of them is the safe assumption.
    local = notes.attempt("host_budget_bytes", lambda: whole(look_up(parallel, "local_world_size")))
    ranks = local or whole(look_up(parallel, "world_size")) or 1
    return max(1, ranks) * max(1, whole(look_up(parallel, "data_parallel_size_local")) or 1)
