"""What two ranks and sleep mode need beside the stand-in for CANN: collectives through the host, and its memory copy.

Collectives are HCCL's, of which there is nothing: ranks exchange tensors over the group that vLLM keeps for the host
(gloo). Sleep mode is vllm-ascend's own allocator, compiled from its source: `vllm_ascend_C`, on the path. vLLM calls
`register` in every process of an engine; it finds it by its entry point.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, TypeAlias

# torch is not where this file is checked: its values have no types here.
Tensor: TypeAlias = Any


def register() -> None:
    """Put everything in place, before vllm-ascend's worker is imported."""
    import acl.rt  # noqa: PLC0415 - the engine's path alone has it
    import vllm_ascend_C  # noqa: PLC0415 - as that

    sys.modules["vllm_ascend.vllm_ascend_C"] = vllm_ascend_C
    acl.rt.memcpy = memcpy
    from vllm_ascend.distributed.device_communicators.npu_communicator import NPUCommunicator  # noqa: PLC0415 - as that

    for collective in (all_reduce, all_gather, gather):
        setattr(NPUCommunicator, collective.__name__, collective)


def memcpy(to: int, room: int, source: int, size: int, kind: int) -> int:
    """Copy between host and device, as CANN's own Python package does; the room is the caller's word."""
    places = ctypes.c_void_p(to), ctypes.c_size_t(room), ctypes.c_void_p(source), ctypes.c_size_t(size)
    status: int = ctypes.CDLL("libascendcl.so").aclrtMemcpy(*places, kind)
    if status != 0:
        raise RuntimeError(f"aclrtMemcpy of {size} bytes: {status}")
    return status


def all_reduce(self: Any, input_: Tensor) -> Tensor:
    import torch.distributed as dist  # noqa: PLC0415 - an engine alone has it

    sums = input_.cpu()
    dist.all_reduce(sums, group=self.cpu_group)
    return input_.copy_(sums)


def all_gather(self: Any, input_: Tensor, dim: int = -1) -> Tensor:
    import torch  # noqa: PLC0415 - an engine alone has it

    own = input_.cpu().contiguous()
    pieces = [torch.empty_like(own) for _ in range(self.world_size)]
    torch.distributed.all_gather(pieces, own, group=self.cpu_group)
    return torch.cat(pieces, dim).to(input_.device)


def gather(self: Any, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
    whole = all_gather(self, input_, dim)
    return whole if self.rank_in_group == dst else None
