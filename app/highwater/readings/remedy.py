"""The bound of a remedy, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from highwater.readings.rank import Components, Ranked

Outcome: TypeAlias = Literal["done", "refused", "failed", "observed"]
Mode: TypeAlias = Literal["safe", "now"]
# `nothing`: the remedy runs beside requests; `gate`: new requests were held, and running ones had ended.
QuiescedBy: TypeAlias = Literal["nothing", "gate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The bound of a trim, on every rank; at most one of them. None: all that no running request still needs."""

    free_bytes: int | None = None  # device bytes to free
    keep_bytes: int | None = None  # device bytes of encoder outputs to keep at most
    idle_seconds: float | None = None  # free what was not used for so long


UNNEEDED = Target()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDelta(Ranked):
    """The difference between two readings of one rank; its maker defines the sign.

    ``card`` is the same for ranks on one device: used bytes are the whole device's on each of them.
    """

    rank: int | None
    dp_rank: int | None
    card: str | None = None
    used_bytes: int | None
    components: Components


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyResult:
    remedy: str
    outcome: Outcome
    reason: str | None = None  # why it was not done, or what the engine reported
    seconds: float = 0.0  # from start to the reading after it
    # "Less in use now": used bytes before less after, over all ranks; negative when traffic took more meanwhile.
    freed_bytes: int | None = None
    freed_components: Components = Components()  # noqa: RUF009 - frozen
    ranks: tuple[RankDelta, ...] = ()
    # "Given back": of what the remedy can free (app/highwater/accounting/remedies.py), over all ranks, as in `/policy`
    # and in the metric; `None` where that was not measured, as in `credited_components`.
    credited_bytes: int | None = None
    credited_components: Components = Components()  # noqa: RUF009 - as above
    frees: str = ""  # what this remedy can free, in words; `does_not_free`: what it cannot
    does_not_free: str = ""
    quiesced_by: QuiescedBy | None = None  # what kept requests away from it; `None` where it did not come to that
    held_seconds: float | None = None  # how long new requests waited for it at the gate
    detail: tuple[Mapping[str, Any], ...] = ()  # the workers' responses, rank by rank
