"""What is asked of the numbers: each question answers with a finding, or with nothing. Pure.

A new question is a function here and a line in ``QUESTIONS``. What is not known answers no question: a finding never
rests on a ``None``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from app.incidents.incident import Evidence, Finding
from app.incidents.latest import Latest
from app.incidents.questions.allocator import alloc_retries, ooms, unused_reserve
from app.incidents.questions.caches import encoder_cache, host_memory, kv_cache
from app.incidents.questions.device import device_full, device_had_room, over_budget, unprofiled_encoder
from app.incidents.questions.ends import ended_by_signal, killed_by_kernel
from app.incidents.questions.growth import grew_most, growth
from app.incidents.questions.policy import policy
from app.incidents.questions.ranks import long_step, lost_ranks, no_readings, skew

__all__ = ["QUESTIONS", "Question"]

Question: TypeAlias = Callable[[Evidence, Sequence[Latest]], Finding | None]

# In the order in which findings of the same weight are shown.
QUESTIONS: Final[tuple[Question, ...]] = (
    killed_by_kernel,
    ooms,
    device_full,
    unused_reserve,
    host_memory,
    lost_ranks,
    long_step,
    ended_by_signal,
    grew_most,
    growth,
    over_budget,
    alloc_retries,
    encoder_cache,
    skew,
    unprofiled_encoder,
    policy,
    device_had_room,
    kv_cache,
    no_readings,
)
