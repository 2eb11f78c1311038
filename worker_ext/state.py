"""What is kept between two calls, in one private object on the worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worker_ext.allocator_reserve import AllocatorReserve
from worker_ext.residency import Residency
from worker_ext.sightings import Sightings
from worker_ext.sleep import SleepRecord
from worker_ext.spilling_dict import Ledger

if TYPE_CHECKING:
    from worker_ext.recorder.recorder import Recorder
    from worker_ext.start_phases import StartPhases

ATTRIBUTE = "_highwater_state"


@dataclass
class WorkerState:
    """One worker's memory of earlier calls."""

    sightings: Sightings = field(default_factory=Sightings)
    residency: Residency = field(default_factory=Residency)
    ledger: Ledger = field(default_factory=Ledger)
    """What was moved between device and host; it outlives a cache that the engine makes anew."""
    sleep: SleepRecord = field(default_factory=SleepRecord)
    """Which of the engine's pools are asleep, as far as its calls tell."""
    weights: tuple[tuple[int, ...], int] | None = None
    """The models' identities, and the bytes that they were found to take."""
    allocator_reserve: AllocatorReserve = field(default_factory=AllocatorReserve)
    """What is known of how much the allocator can give back."""
    start: StartPhases | None = None
    """How the worker's start went; None where the plugin did not see it."""
    recorder: Recorder | None = None
    """The recorder that was started last, whether it still runs or not."""


def state_of(worker: object) -> WorkerState:
    """Return the worker's state, made at the first call: a mixed-in class has no `__init__` that runs."""
    state = getattr(worker, ATTRIBUTE, None)
    if not isinstance(state, WorkerState):
        state = WorkerState()
        setattr(worker, ATTRIBUTE, state)
    return state


def running_recorder(worker: object) -> Recorder | None:
    """Return the recorder that runs for the worker, None where none does; nothing is made."""
    state = getattr(worker, ATTRIBUTE, None)
    recorder = state.recorder if isinstance(state, WorkerState) else None
    return recorder if recorder is not None and recorder.is_running() else None


def end_recorder(worker: object) -> bool:
    """End the worker's recorder, whoever started it.

    Returns:
        Whether its thread has ended, or there is none.
    """
    recorder = running_recorder(worker)
    if recorder is None:
        return True
    state_of(worker).recorder = None
    return recorder.stop()
