"""The state that is kept between two calls, in one private object on the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from highwater_worker.encoder_cache.sleep import SleepRecord
from highwater_worker.encoder_cache.spilling_dict import Ledger
from highwater_worker.memory.allocator import AllocationHistory, AllocatorReserve
from highwater_worker.memory.kv_cache import Residency
from highwater_worker.memory.start_phases import StartPhases
from highwater_worker.memory.storages import WeightCount

ATTRIBUTE = "_highwater_state"


@dataclass
class WorkerState:
    index: object = None
    """The index of the encoder cache that operations keep; `recorder.encoder_index.read_index` returns it."""
    residency: Residency = field(default_factory=Residency)
    ledger: Ledger = field(default_factory=Ledger)
    """The counts of moves between device and host; they outlive a cache that the engine makes anew."""
    sleep: SleepRecord = field(default_factory=SleepRecord)
    weights: WeightCount = field(default_factory=WeightCount)
    allocator_reserve: AllocatorReserve = field(default_factory=AllocatorReserve)
    history: AllocationHistory = field(default_factory=AllocationHistory)
    start: StartPhases | None = None  # None where the plugin did not see it
    recorder: object = None
    """The recorder that was started last, running or not; `recorder.begin.running_recorder` returns it."""


def state_of(worker: object) -> WorkerState:
    """Return the worker's state, made at the first call: a mixed-in class has no `__init__` that runs."""
    state = getattr(worker, ATTRIBUTE, None)
    if not isinstance(state, WorkerState):
        state = WorkerState()
        setattr(worker, ATTRIBUTE, state)
    return state
