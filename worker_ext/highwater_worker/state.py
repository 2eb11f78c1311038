"""The state that is kept between two calls, in one private object on the worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from highwater_worker.encoder_cache.sightings import Sightings
from highwater_worker.encoder_cache.sleep import SleepRecord
from highwater_worker.encoder_cache.spilling_dict import Ledger
from highwater_worker.memory.allocation_history import AllocationHistory
from highwater_worker.memory.allocator_reserve import AllocatorReserve
from highwater_worker.memory.residency import Residency
from highwater_worker.memory.weights import WeightCount

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from highwater_worker.memory.start_phases import StartPhases

ATTRIBUTE = "_highwater_state"


class RecorderHandle(Protocol):
    """A worker's recorder, as far as operations use it; the recorder itself reads this state."""

    @property
    def instance(self) -> str:
        """The engine life that it records, as its starter named it."""

    @property
    def path(self) -> Path:
        """The path of its file."""

    @property
    def nbytes(self) -> int:
        """The size of its file."""

    @property
    def slots(self) -> int:
        """The number of samples that its file holds."""

    def has_file(self) -> bool:
        """Return whether its file is still in its place."""

    def is_running(self) -> bool:
        """Return whether its thread runs."""

    def operation(self, op: str) -> AbstractContextManager[None]:
        """Record an operation while it runs."""

    def start_changed(self) -> None:
        """Record another phase of the worker's start."""

    def stop(self) -> bool:
        """Stop recording, and return whether its thread has ended."""


@dataclass
class WorkerState:
    """One worker's memory of earlier calls."""

    sightings: Sightings = field(default_factory=Sightings)
    residency: Residency = field(default_factory=Residency)
    ledger: Ledger = field(default_factory=Ledger)
    """The counts of moves between device and host; they outlive a cache that the engine makes anew."""
    sleep: SleepRecord = field(default_factory=SleepRecord)
    """The engine's pools that are asleep, as far as its calls show."""
    weights: WeightCount = field(default_factory=WeightCount)
    """The bytes of the models' weights, counted once."""
    allocator_reserve: AllocatorReserve = field(default_factory=AllocatorReserve)
    """The knowledge of how much the allocator can give back."""
    history: AllocationHistory = field(default_factory=AllocationHistory)
    """The history of torch's allocator, while we have it on."""
    start: StartPhases | None = None
    """How the worker's start went; None where the plugin did not see it."""
    recorder: RecorderHandle | None = None
    """The recorder that was started last, running or not."""


def state_of(worker: object) -> WorkerState:
    """Return the worker's state, made at the first call: a mixed-in class has no `__init__` that runs."""
    state = getattr(worker, ATTRIBUTE, None)
    if not isinstance(state, WorkerState):
        state = WorkerState()
        setattr(worker, ATTRIBUTE, state)
    return state


def running_recorder(worker: object) -> RecorderHandle | None:
    """Return the recorder that runs for the worker, None without one; no state is made."""
    state = getattr(worker, ATTRIBUTE, None)
    recorder = state.recorder if isinstance(state, WorkerState) else None
    return recorder if recorder is not None and recorder.is_running() else None


def end_recorder(worker: object) -> bool:
    """End the worker's recorder, whoever started it.

    Returns:
        True where its thread has ended, or there is no recorder.
    """
    recorder = running_recorder(worker)
    if recorder is None:
        return True
    state_of(worker).recorder = None
    return recorder.stop()
