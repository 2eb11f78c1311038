"""A modelled card, a modelled allocator on it, and the `torch` that reports them.

What is modelled is what decides whether an engine lives: blocks that the next step takes again, whole segments that no
step fits into, pieces of segments that somebody still holds, the free part of captured graphs' pools, memory outside
of the allocator (context, workspaces, other processes), and what an allocation does when the device is full.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.unit.worker_ext.fakes import FakeDeviceModule, FakeStorage, FakeTensor, FakeTorch

MIB = 1 << 20
GIB = 1 << 30


class DeviceFullError(RuntimeError):
    """torch.OutOfMemoryError: the engine dies of it."""

    def __init__(self, what: str, nbytes: int, rank: Rank) -> None:
        free = rank.card.free
        super().__init__(f"{what}: tried to allocate {nbytes / MIB:.0f} MiB; {free / MIB:.0f} MiB free")
        self.what, self.nbytes, self.rank, self.free = what, nbytes, rank, free


class Card:
    """One device, or one slice of it, with so many bytes in all, as `mem_get_info` reports them."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.neighbours = 0  # what other processes hold
        self.ranks: list[Rank] = []

    @property
    def free(self) -> int:
        return self.total - self.neighbours - sum(rank.driver_bytes for rank in self.ranks)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory that one rank of an engine takes."""

    weights: int  # of the model
    kv_cache: int  # the pool
    context: int  # memory outside of the allocator once the engine is ready
    peak: int  # what a step with an image takes for a moment
    text_peak: int  # what a step without one takes
    other: int = 64 * MIB  # further tensors that live as long as the engine
    graphs_free: int = 0  # free memory in the private pools of captured graphs, which nobody gives back
    workspace: int = 0  # what operators' workspaces grow to, outside of the allocator
    workspace_growth: int = 20 * MIB  # by how much with each image
    # What each image needs of the driver for a moment, besides the allocator: a workspace, a library.
    outside: int = 64 * MIB
    token_peak: int = 0  # what encoding takes for a moment for each embedding of an image that came through the sidecar
    image: int = 0  # an encoder output
    image_embeds: int = 1024  # its embeddings
    encoder_budget_embeds: int = 0  # what the scheduler lets the encoder cache hold; 0: a text model


class Rank:
    """One worker's memory on a card."""

    def __init__(self, card: Card, index: int, plan: Plan) -> None:
        self.card, self.index, self.plan = card, index, plan
        self.live = 0  # encoder outputs and reserves: allocated, and given up again
        self.leaked = 0  # allocated for nothing, forever
        self.reusable = 0  # free segments that the next step takes again
        self.stray = 0  # free segments that no step fits into
        self.split = 0  # free pieces of segments of which something is in use
        self.workspace = 0
        self.retries = 0
        self.peak = self.allocated
        self.asleep: set[str] = set()
        card.ranks.append(self)

    @property
    def allocated(self) -> int:
        plan = self.plan
        return plan.weights + plan.kv_cache + plan.other + self.live + self.leaked

    @property
    def reserved(self) -> int:
        return self.allocated + self.reusable + self.stray + self.split + self.plan.graphs_free

    @property
    def driver_bytes(self) -> int:
        unmapped = sum({"weights": self.plan.weights, "kv_cache": self.plan.kv_cache}[tag] for tag in self.asleep)
        return self.reserved + self.plan.context + self.workspace - unmapped

    @property
    def releasable(self) -> int:
        """Return what `empty_cache` gives back."""
        return self.reusable + self.stray

    def take(self, nbytes: int, what: str) -> None:
        """Allocate, as torch does: from what it keeps, else from the driver, else once more with empty hands."""
        kept = min(nbytes, self.reusable)
        if nbytes - kept > self.card.free and self.releasable:
            self.retries += 1
            self.reusable = self.stray = kept = 0
        if nbytes - kept > self.card.free:
            raise DeviceFullError(what, nbytes - kept, self)
        self.reusable -= kept
        self.live += nbytes
        self.peak = max(self.peak, self.allocated)

    def give_up(self, nbytes: int) -> None:
        """Free; the allocator keeps it."""
        self.live -= nbytes
        self.reusable += nbytes

    def take_for_a_moment(self, nbytes: int, what: str) -> None:
        """A step's activations."""
        self.take(nbytes, what)
        self.give_up(nbytes)

    def take_outside(self, nbytes: int, what: str) -> None:
        """Check that the driver has it: what allocates past torch's allocator cannot make that give anything back."""
        if nbytes > self.card.free:
            raise DeviceFullError(what, nbytes, self)

    def end(self) -> None:
        self.card.ranks.remove(self)


class EncoderStorage(FakeStorage):
    """Bytes of a rank's device for as long as something refers to them."""

    def __init__(self, nbytes: int, rank: Rank) -> None:
        super().__init__(nbytes)
        rank.take(nbytes, "an encoder output")
        weakref.finalize(self, rank.give_up, nbytes).atexit = False


class ModelDeviceModule(FakeDeviceModule):
    """`torch.npu` or `torch.cuda`, telling of modelled ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.ranks: dict[int, Rank] = {}  # by device number
        self.current = 0  # whose worker runs now: `empty_cache` takes no device
        self.lies = False  # `empty_cache` does nothing

    def _called(self, name: str, index: object) -> None:
        """Nobody looks at the calls, and a day has many."""

    def mem_get_info(self, index: object = None) -> tuple[int, int]:
        card = self._rank(index).card
        return max(card.free, 0), card.total

    def memory_stats(self, index: object = None) -> dict[str, object]:
        rank = self._rank(index)
        return {
            "allocated_bytes.all.current": rank.allocated,
            "reserved_bytes.all.current": rank.reserved,
            "allocated_bytes.all.peak": rank.peak,
            "inactive_split_bytes.all.current": rank.split,
            "active.all.current": 400,
            "inactive_split.all.current": 40,
            "segment.all.current": 100,
            "num_alloc_retries": rank.retries,
            "num_ooms": 0,
        }

    def get_device_properties(self, index: object = None) -> SimpleNamespace:
        rank = self._rank(index)
        return SimpleNamespace(total_memory=rank.card.total, uuid=f"0000-{rank.index:04d}", is_integrated=False)

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """Return the one segment that matters: what captured graphs keep free."""
        return [
            {
                "device": index,
                "segment_pool_id": (0, 1),
                "is_expandable": False,
                "blocks": [{"size": rank.plan.graphs_free, "state": "inactive"}],
            }
            for index, rank in self.ranks.items()
        ]

    def empty_cache(self) -> None:
        """Give free segments back; on an NPU the operators' workspaces too."""
        if self.lies:
            return
        rank = self.ranks[self.current]
        rank.reusable = rank.stray = 0
        if self.__name__ == "torch.npu":
            rank.workspace = 0

    def _rank(self, index: object) -> Rank:
        assert isinstance(index, int), "a call without a device index makes a context on device 0"
        return self.ranks[index]


class ModelTorch(FakeTorch):
    """The `torch` of modelled ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.device_module: ModelDeviceModule = ModelDeviceModule(kind)
        self.kind = kind
        setattr(self, kind, self.device_module)

    def empty_like(self, tensor: FakeTensor, device: Any, pin_memory: bool = False) -> FakeTensor:
        made = super().empty_like(tensor, device, pin_memory)
        if made.device.type != "cpu":
            made = self.tensor(tensor.shape)
            made.copy_ = lambda source, non_blocking: self._copy(source, made, non_blocking)
        return made

    def _copy(self, source: FakeTensor, made: FakeTensor, non_blocking: bool) -> FakeTensor:
        del non_blocking
        made.content = source.content
        del made.copy_
        return made

    def empty(self, nbytes: int, dtype: str, device: str) -> FakeTensor:
        del dtype, device
        return FakeTensor(0, device=self.kind, storage=EncoderStorage(nbytes, self._current))

    def tensor(self, shape: tuple[int, ...]) -> FakeTensor:
        """An encoder output on the device of the worker that runs now."""
        nbytes = 2
        for size in shape:
            nbytes *= size
        return FakeTensor(*shape, device=self.kind, storage=EncoderStorage(nbytes, self._current))

    @property
    def _current(self) -> Rank:
        return self.device_module.ranks[self.device_module.current]
