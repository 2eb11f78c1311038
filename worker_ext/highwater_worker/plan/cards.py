"""The cards that can be pretended, what a start takes of one that no run on `meta` shows, and what that leaves.

Pure: the sidecar uses cards and figures too, for plans that it makes itself, and the form that a KV cache has in an
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Pool = Callable[[list[int]], dict[str, Any]]
"""Sizes a KV cache by so many bytes of each rank; an empty list: by as many as any layers want."""
_MIB, _GIB = 1 << 20, 1 << 30


class Card(NamedTuple):
    """A card as its driver shows it."""

    name: str
    capability: tuple[int, int]
    """CUDA's compute capability; (0, 0): an NPU."""
    total_bytes: int
    processors: int
    """Streaming multiprocessors."""
    read_in: str
    """Source of the total. CUDA shows programs less than `nvidia-smi` prints, some 0.4 GiB on most cards."""

    @property
    def is_npu(self) -> bool:
        return self.capability == (0, 0)


def _card(name: str, capability: tuple[int, int], gib: float, processors: int, read_in: str) -> Card:
    return Card(name, capability, int(gib * _GIB), processors, read_in)


_SMI = "nvidia-smi's total (modal-labs/modal-client#2797); CUDA shows less"
_OOM = "PyTorch's message that memory is out"
CARDS = {
    "H100": _card("NVIDIA H100 80GB HBM3", (9, 0), 79.19, 132, "starts of vLLM 0.19.0 (llm-d-planner, accuracy/)"),
    "H200": _card("NVIDIA H200", (9, 0), 139.8, 132, "no print was found: a figure from memory"),
    "A100": _card("NVIDIA A100-SXM4-80GB", (8, 0), 79.25, 108, f"{_OOM} (vllm-project/vllm#20581)"),
    "A100-40": _card("NVIDIA A100-PCIE-40GB", (8, 0), 39.38, 108, "a report's environment (vllm-project/vllm#16570)"),
    "A10": _card("NVIDIA A10", (8, 6), 23028 / 1024, 72, _SMI),
    "L4": _card("NVIDIA L4", (8, 9), 23034 / 1024, 58, _SMI),
    "L40S": _card("NVIDIA L40S", (8, 9), 44.53, 142, f"{_OOM} (Wan-Video/Wan2.1#205)"),
    "T4": _card("Tesla T4", (7, 5), 15360 / 1024, 40, _SMI),
    "B200": _card("NVIDIA B200", (10, 0), 178.35, 148, "a device query (pytorch/ao#4002)"),
    "RTX4090": _card("NVIDIA GeForce RTX 4090", (8, 9), 23.52, 128, f"{_OOM} (vllm-project/vllm#42049)"),
    "RTX5090": _card("NVIDIA GeForce RTX 5090", (12, 0), 31.36, 170, f"{_OOM} (TrajectoryCrafter#20)"),
    "910B": _card("Ascend910B3", (0, 0), 64, 0, "npu-smi's total in a report; torch_npu shows less"),
}
"""By the short name that a question gives."""


def card_of(name: str) -> Card:
    """Return a card by its short name, or the first of a compute capability such as 9.0. Raises ValueError."""
    for short, card in CARDS.items():
        if name in (short, ".".join(map(str, card.capability))):
            return card
    raise ValueError(f"the card is {name!r}; must be one of {', '.join(CARDS)}, or a compute capability")


ROUND_BYTES = 512  # to which PyTorch's allocator rounds up


class CachingAllocator:
    """Counts what is allocated and never given back, in bytes, as PyTorch's does.

    It splits no block where 1 MiB or less would remain: Qwen2.5-7B has 14.19 GiB of tensors, and 14.25 GiB are counted
    and printed.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._free: dict[bool, list[int]] = {True: [], False: []}

    def allocate(self, size: int) -> None:
        size = max(ROUND_BYTES, -(-size // ROUND_BYTES) * ROUND_BYTES)
        is_small = size <= _MIB
        free = self._free[is_small]
        block = min((one for one in free if one >= size), default=0)
        if block:
            free.remove(block)
        elif is_small:
            block = 2 * _MIB
        else:
            block = 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
        if block - size >= (ROUND_BYTES if is_small else _MIB + 1):
            free.append(block - size)
            block = size
        self.allocated_bytes += block


# --- the parts of a start, estimated by what starts printed ---

_BATCH = 512  # the largest that a graph is captured for by default
OF_LAYERS = ("bytes_per_block", "block_size", "needed_bytes", "groups")
"""The figures of a pool that follow from its layers; the others are known as well as its bytes are."""
STATUS = {True: "fits", False: "does_not_fit", None: "may_not_fit"}
"""An answer's status by whether its KV cache fits; None: that depends on what is only estimated."""


class Figure(NamedTuple):
    """Bytes between bounds, with how they are known: `exact`, `measured` or `estimated`."""

    bytes: int
    low: int
    high: int
    grade: str
    why: str


def measured(value: int, why: str) -> Figure:
    return Figure(value, value, value, "measured", why)


def measured_parts(sizes: Mapping[str, int]) -> dict[str, Figure]:
    return {name: measured(size, "a start measured it") for name, size in sizes.items()}


def exact(value: int, why: str) -> Figure:
    return Figure(value, value, value, "exact", why)


def outside_torch(*, is_alone: bool, is_npu: bool) -> Figure:
    """Estimate contexts, communication buffers and kernels of a rank; `is_alone`: one that talks to no other."""
    low, likely, high, why = {
        (True, True): (100, 350, 1536, "context and operators of one NPU"),
        (True, False): (400, 600, 3072, "context, operators and HCCL's buffers (HCCL_BUFFSIZE)"),
        (False, True): (100, 250, 512, "starts with one GPU printed 0.13 to 0.46 GiB"),
        (False, False): (512, 2150, 2662, "starts with several GPUs printed 2.07 to 2.17 GiB"),
    }[is_npu, is_alone]
    return Figure(likely * _MIB, low * _MIB, high * _MIB, "estimated", why)


def graphs(*, layers: int, has_experts: bool, tensor_parallel_size: int, largest_batch: int) -> Figure:
    """Estimate the graphs that a rank captures after profiling; `largest_batch` in tokens, 0: none is captured."""
    if not largest_batch:
        return exact(0, "no graphs are captured")
    gib = 0.4 + 0.0115 * layers + 0.3 * has_experts + 0.3 * (tensor_parallel_size > 1)
    likely = gib * (0.3 + 0.7 * min(largest_batch, _BATCH) / _BATCH) * _GIB
    why = "what starts printed, by layers"
    return Figure(round(likely), round(0.2 * likely), round(1.8 * likely), "estimated", why)


def left(requested: int, parts: Mapping[str, Figure]) -> Figure:
    """Return what is left of `requested` bytes for the KV cache; nothing is less than 0."""
    taken = [(part.bytes, part.high, part.low) for part in parts.values()]
    likely, low, high = (max(requested - sum(sizes), 0) for sizes in zip((0, 0, 0), *taken))
    grades = {part.grade for part in parts.values()}
    grade = next((one for one in ("estimated", "measured") if one in grades), "exact")
    return Figure(likely, low, high, grade, f"the share of the card less {', '.join(parts)}")


def kv_cache(remains: list[Figure], pool: Pool, of_layers: str) -> dict[str, Any]:
    """Return the pool of the likely bytes of each rank (empty: not known), with what the bounds make of it."""
    likely = pool([one.bytes for one in remains])
    if not remains:
        known = {name: likely[name] if name in OF_LAYERS else None for name in likely}
        return {**known, "grades": dict.fromkeys(OF_LAYERS, of_layers)}
    grade = remains[0].grade if of_layers == "exact" else of_layers
    low, high = likely, likely
    if grade == "estimated":
        low, high = pool([one.low for one in remains]), pool([one.high for one in remains])
    names = [name for name, value in likely.items() if value is not None and name != "refusal"]
    return {
        **likely,
        "fits": likely["fits"] if low["fits"] == high["fits"] else None,
        "available_bytes_low": low["available_bytes"],
        "available_bytes_high": high["available_bytes"],
        "blocks_low": low.get("blocks", 0),
        "blocks_high": high.get("blocks", 0),
        "grades": {name: of_layers if name in OF_LAYERS else grade for name in names},
    }


def answered(
    given: int | None, total: int, requested: list[int], parts: list[dict[str, Figure]], pool: Pool, *, of_layers: str
) -> dict[str, Any]:
    """Return an answer's status, KV cache and budget: of given bytes, or of what the parts leave of each rank's share.

    `parts` are empty where they are not known; `of_layers` is the grade of what follows from the layers alone.
    """
    found: dict[str, Any] = {}
    remains: list[Figure] = []
    if given is not None:
        remains = [exact(int(given), "given")] * len(requested)
    elif parts:
        remains = [left(size, of_rank) for size, of_rank in zip(requested, parts)]
        rows = [{name: part._asdict() for name, part in of_rank.items()} for of_rank in parts]
        found["budget"] = {"total_bytes": total, "requested_bytes": requested[0], "ranks": rows}
    found["kv_cache"] = kv = kv_cache(remains, pool, of_layers)
    found["status"] = STATUS[kv["fits"]] if remains else "not_known"
    return found
