"""Keeps the door's mode and limits by what is seen, and has images wait while a rank is very short of memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from gated_proxy.door import Door
from gated_proxy.door_items import DoorLimits
from highwater.act.door import DoorFacts, EncoderPeaks, limits_of, mode_of
from highwater.host.reading import HostReading
from highwater.model.engine_budget import EngineBudget
from highwater.model.policy import PolicyLevel
from highwater.model.rank import RankReading
from highwater.model.report import DoorFigure, DoorState, Report
from highwater.server.settings.sections import DoorSettings

# Images wait for a relief for so long; one that has not helped by then will not, and they are let in.
MAX_HOLD_SECONDS = 30.0
# Each hold: it is renewed with every poll, of which a very short rank causes several a second.
HOLD_SECONDS = 3.0

log = logging.getLogger("highwater")


class DoorWatch:
    """Takes each report, with the last reading of host memory."""

    def __init__(
        self,
        door: Door,
        given: DoorSettings,
        *,
        budget_of: Callable[[RankReading], EngineBudget | None],
        host: Callable[[], HostReading | None],
        level: Callable[[], PolicyLevel],
        clock: Callable[[], float],
    ) -> None:
        self._door = door
        self._mode = given.mode
        self._given = DoorLimits(**given.model_dump(exclude={"mode"}))
        self._budget_of, self._host, self._level = budget_of, host, level
        self._clock = clock
        self._peaks = EncoderPeaks()
        self._urgent_since = math.inf
        self._why = ""
        self._logged: tuple[str, str] | None = None  # first with the first report: nothing is known before
        self._change((), None)

    def notice(self, report: Report) -> None:
        budgets = map(self._budget_of, report.ranks)
        budget = next((each for each in budgets if each is not None and each.encoder is not None), None)
        encoded, most = self._door.take_tokens()
        step = None if budget is None or budget.encoder is None else budget.encoder.compute_budget
        self._peaks.notice(report.ranks, encoded_tokens=encoded, tokens_in_flight=min(most, step or most))
        self._change(report.ranks, budget)
        now = self._clock()
        is_urgent = self._door.mode == "on" and self._level() == "urgent"
        self._urgent_since = min(self._urgent_since, now) if is_urgent else math.inf
        if is_urgent and now - self._urgent_since < MAX_HOLD_SECONDS:
            self._door.hold(HOLD_SECONDS, "a rank is very short of device memory, and some is given back first")
        elif self._door.held_for is not None:
            self._door.hold(0.0, "")

    def _change(self, ranks: Sequence[RankReading], budget: EngineBudget | None) -> None:
        facts = self._facts(ranks, budget)
        mode, why = mode_of(self._mode, facts)
        if ranks and (mode, why) != self._logged:
            self._logged = (mode, why)
            log.info("images and videos at the door: %s, because %s (door.mode)", mode, why)
        self._why = why
        self._door.change(mode=mode, limits=limits_of(self._given, facts))

    def _facts(self, ranks: Sequence[RankReading], budget: EngineBudget | None) -> DoorFacts:
        host = self._host()
        container = None if host is None else host.container
        free, limit = (None, None) if container is None else (container.room_bytes, container.limit_bytes)
        has_limit = free is not None
        if free is None and host is not None and host.processes:
            free, limit = host.machine.available_bytes, host.machine.total_bytes
        room = [_room_bytes(rank) for rank in ranks]
        return DoorFacts(
            free_bytes=None if free is None else free + self._door.inside.decoded_bytes,
            limit_bytes=limit,
            has_container_limit=has_limit,
            budget=budget,
            encoder_is_profiled=all(rank.launch.encoder_unprofiled_by is None for rank in ranks),
            peaks=self._peaks,
            device_room_bytes=min((each for each in room if each is not None), default=None),
        )

    def state(self) -> DoorState:
        door, limits = self._door, self._door.limits
        return DoorState(
            mode=door.mode,
            why=self._why,
            held_for=door.held_for,
            requests_waiting=door.waiting,
            decoded_bytes=DoorFigure(taken=door.inside.decoded_bytes, limit=limits.decoded_bytes),
            encoder_tokens=DoorFigure(taken=door.inside.encoder_tokens, limit=limits.encoder_tokens),
            items=DoorFigure(taken=door.inside.items, limit=limits.items),
            request_decoded_bytes=limits.request_bytes,
            device_tokens=limits.device_tokens,
            bytes_per_token=None if (size := self._peaks.bytes_per_token) is None else round(size),
            token_side_pixels=limits.token_rule.side_pixels,
            uses_engines_rule=limits.token_rule.is_engines,
            requests_total=door.counts.requests,
            waits_total=door.counts.waited,
            refused_total=door.counts.refused.total(),
        )


def _room_bytes(rank: RankReading) -> int | None:
    """Return what the rank's allocator could allocate: of its own reserve, and of the device."""
    free, reserved, allocated = rank.free_bytes, rank.torch.reserved_bytes, rank.torch.allocated_bytes
    return None if free is None or reserved is None or allocated is None else free + reserved - allocated
