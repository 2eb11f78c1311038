"""What this process is to vLLM, by the name under which it was started.

vLLM names its processes where it makes them: `ApiServer_0` (vllm 0.12.0 v1/utils.py:210, vllm 0.32.0 v1/utils.py:250),
`APIServer_DPRank_0` (vllm 0.32.0 entrypoints/launchers/dp_supervisor.py:405), `EngineCore_DP0` and `EngineCore` (vllm
0.12.0 v1/engine/utils.py:123, vllm 0.32.0 v1/engine/utils.py:284), `VllmWorker-0` (vllm 0.12.0
v1/executor/multiproc_executor.py:598, vllm 0.32.0 v1/executor/multiproc_executor.py:747) and `VLLM_DP_Coordinator`
(vllm 0.12.0 v1/engine/coordinator.py:80, vllm 0.32.0 v1/engine/coordinator.py:106). The main process is the API server
where it started no other.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NAMES = (
    (re.compile(r"API_?Server(?:_DPRank)?_?([0-9]{0,6})", re.IGNORECASE), "api_server"),
    (re.compile(r"(?:DP)?EngineCore(?:Actor)?(?:_DP([0-9]{1,6}))?"), "engine_core"),
    (re.compile(r"(?:Vllm)?Worker[-_]([0-9]{1,6})"), "worker"),
    (re.compile(r"VLLM_DP_Coordinator()"), "coordinator"),
)
_API_SERVER = re.compile(r"API_?Server", re.IGNORECASE)
_SERVES = re.compile(r"serve|vllm|api_server|openai", re.IGNORECASE)


class Role(NamedTuple):
    """A role, and which of several it is; the names are those of the file."""

    role: str
    number: int | None = None


def role_of(name: str, children: Iterable[str] = (), arguments: Sequence[str] = ()) -> Role:
    """Return what a process is.

    Args:
        name: As `multiprocessing` names it.
        children: The names of the processes that it has started.
        arguments: Of the command line.
    """
    for pattern, role in _NAMES:
        found = pattern.fullmatch(name)
        if found is not None:
            return Role(role, int(found[1]) if found[1] else None)
    if name != "MainProcess":
        return Role("other")
    if any(_API_SERVER.match(child) for child in children):
        return Role("launcher")
    if any("EngineCore" in child for child in children) or any(_SERVES.search(word) for word in arguments[:2]):
        # `vllm serve`, `python -m vllm.entrypoints.openai.api_server`: the first words name it
        return Role("api_server")
    return Role("other")


def own_role() -> Role:
    """Return what this process is."""
    return role_of(multiprocessing.current_process().name, _children(), sys.argv)


def _children() -> list[str]:
    # Not `active_children()`, which waits for those that have ended: they are vLLM's to wait for.
    known = getattr(multiprocessing.process, "_children", ())
    return [str(getattr(child, "name", "")) for child in list(known)]
