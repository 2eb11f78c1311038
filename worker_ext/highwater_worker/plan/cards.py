"""The cards that can be pretended: one table of what vLLM asks of a card before it allocates."""

from __future__ import annotations

from typing import NamedTuple

_GIB = 1 << 30


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
