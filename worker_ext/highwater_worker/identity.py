"""The worker's ranks, host and process, for the head of every response.

A rank that the engine does not show is null, never guessed: two workers that claim one rank would be added up wrongly.
"""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import Any, cast

from highwater_worker.attributes import first_of, look_up, whole
from highwater_worker.errors import Notes, printable
from highwater_worker.files import ROOT

EXTENSION_VERSION = "0.1.0"

_STARTED_FIELD = 22


def identity(worker: object) -> dict[str, Any]:
    attempt = Notes().attempt  # of no use here: it is the head of an error's response, too
    return {
        "rank": attempt("rank", lambda: whole(look_up(worker, "rank"))),
        "local_rank": attempt("local_rank", lambda: whole(look_up(worker, "local_rank"))),
        "dp_rank": attempt("dp_rank", lambda: _dp_rank(worker)),
        "tp_rank": attempt("tp_rank", lambda: _tp_rank(worker)),
        "pp_rank": attempt("pp_rank", lambda: pp_rank(worker)),
        "host": attempt("host", socket.gethostname),
        "pid": os.getpid(),
        "pid_started": attempt("pid_started", pid_started),
    }


def boot_id(root: Path = ROOT) -> str:
    """Return the kernel's name of this boot of the machine; raises OSError where the kernel does not report it."""
    return printable((root / "proc/sys/kernel/random/boot_id").read_text("ascii", "replace"), 64)


def pid_namespace(root: Path = ROOT) -> int:
    """Return the inode of this process's PID namespace, in which its pid counts; raises OSError as above."""
    return os.stat(root / "proc/self/ns/pid").st_ino


def pid_started(root: Path = ROOT, pid: int | str = "self") -> int:
    """Return a process's start in the kernel's ticks since boot: it differs from that of a later process of its pid.

    Raises OSError where the kernel does not report it, ValueError or IndexError where the report is not understood.
    """
    # The second field is the program's name, in brackets, with whatever it likes between them (proc_pid_stat(5)).
    _, _, after = (root / f"proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")
    return int(after.split()[_STARTED_FIELD - 3])


def _dp_rank(worker: object) -> int | None:
    parallel = _parallel_config(worker)
    # For models without experts newer engines reset data_parallel_rank to 0 in every replica, and only the index still
    # distinguishes them (vllm 0.32.0 v1/engine/core.py:1481, `run_engine_core`). Older engines have the rank alone.
    index = whole(look_up(parallel, "data_parallel_index"))
    return whole(look_up(parallel, "data_parallel_rank")) if index is None else index


# The ranks of a world lie as (external DP x DP x) PP x PCP x TP, the last varying fastest
# (vllm 0.32.0 distributed/parallel_state.py:2126, `initialize_model_parallel`). A worker's `rank` counts within its own
# replica, and across replicas only under an external launcher; the remainders below are right for both.
def _tp_rank(worker: object) -> int | None:
    rank = whole(look_up(worker, "rank"))
    tensor = parallel_size(worker, "tensor_parallel_size")
    return None if rank is None or tensor is None else rank % tensor


def pp_rank(worker: object) -> int | None:
    rank = whole(look_up(worker, "rank"))
    tensor = parallel_size(worker, "tensor_parallel_size")
    pipeline = parallel_size(worker, "pipeline_parallel_size")
    if rank is None or tensor is None or pipeline is None:
        return None
    if hasattr(_parallel_config(worker), "prefill_context_parallel_size"):
        context = parallel_size(worker, "prefill_context_parallel_size")
    else:  # engines before it came have PP x TP
        context = 1
    return None if context is None else rank // (tensor * context) % pipeline


def ranks_expected(worker: object) -> int | None:
    """Return how many workers an API server has, all of its data-parallel replicas counted; None where unknown.

    A replica of a dense model runs as an engine of its own (`_dp_rank`) and knows only how many come before it: there
    it is a lower bound, and the last replica's is right.
    """
    sizes = list(parallel_sizes(worker).values())
    if hasattr(_parallel_config(worker), "prefill_context_parallel_size"):
        sizes.append(parallel_size(worker, "prefill_context_parallel_size"))
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def parallel_sizes(worker: object) -> dict[str, int | None]:
    """Return how many engines share the work, how many stages one has, and in how many parts each is computed.

    The first is a lower bound as in `ranks_expected`.
    """
    return {
        "data_parallel": _replicas(worker),
        "pipeline_parallel": parallel_size(worker, "pipeline_parallel_size"),
        "tensor_parallel": parallel_size(worker, "tensor_parallel_size"),
    }


def _replicas(worker: object) -> int | None:
    size, parallel = parallel_size(worker, "data_parallel_size"), _parallel_config(worker)
    if size is None:
        return None
    # Behind a load balancer of its own each replica, or each machine, has an API server, and a sidecar beside that: of
    # replicas that share experts the size is the whole world's.
    if look_up(parallel, "data_parallel_external_lb"):
        return 1
    is_local = bool(look_up(parallel, "data_parallel_hybrid_lb"))
    known = parallel_size(worker, "data_parallel_size_local") or 1 if is_local else size
    # A replica's place among those of its server: a dense one's own sizes say that it is alone
    # (vllm 0.32.0 v1/engine/core.py:1407, `run_engine_core`).
    place = whole(look_up(parallel, "data_parallel_rank_local" if is_local else "data_parallel_index"))
    return known if place is None else max(known, place + 1)


def model_name(worker: object) -> str | None:
    """Return the name under which the model is served, its path or repository where it has no other."""
    config = look_up(worker, "vllm_config", "model_config")
    served = look_up(config, "served_model_name")
    name = served[0] if isinstance(served, list) and served else served or look_up(config, "model")
    return name if isinstance(name, str) else None


def parallel_size(worker: object, name: str) -> int | None:
    size = whole(look_up(_parallel_config(worker), name))
    return size if size is not None and size > 0 else None


def _parallel_config(worker: object) -> object:
    return cast("object", first_of(worker, "parallel_config", "vllm_config.parallel_config"))
