"""Whether used memory grew, how fast, and which component did. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from app.incidents import advice as known
from app.incidents.incident import Evidence, Finding
from app.incidents.latest import NOTABLE_BYTES, Latest, component_growth
from app.table import component_title
from app.units import mib


def growth(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether used memory had grown since the engine was ready, and how fast it still did."""
    grown, slope = evidence.growth.since_ready_bytes, evidence.growth.bytes_per_second
    if grown is None or grown <= _notable(ranks):
        return None
    text = f"Since the engine was ready, used memory grew by {mib(grown)} MiB over all ranks."
    left = evidence.growth.seconds_to_full
    if slope is not None:
        text += f" In the last minute it moved by {mib(slope * 60, signed=True)} MiB a minute"
        if left is not None:
            text += f"; at that pace the first device is full after {left / 60:,.1f} minutes"
        text += "."
    return Finding(
        name="growth",
        weight="clue",
        title=f"used memory had grown by {mib(grown)} MiB since the engine was ready",
        text=text,
        figures={"since_ready_bytes": grown, "bytes_per_second": slope, "seconds_to_full": left},
        advice=(known.POLICY_EARLIER,),
    )


def grew_most(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Which component grew most, and what keeps it small."""
    since_ready, grown = component_growth(evidence)
    if not grown:
        return None
    name, size = max(grown.items(), key=lambda item: item[1])
    if size <= _notable(ranks):
        return None
    since = "since the engine was ready" if since_ready else "over the minutes that were kept"
    return Finding(
        name="grew_most",
        weight="clue",
        title=f"{component_title(name)} grew most, by {mib(size)} MiB",
        text=f"Of all components {component_title(name)} grew most {since}: {known.COMPONENT_MEANING[name]}",
        figures={"component": name, **grown},
        advice=known.for_component(name, next((rank.device_type for rank in ranks if rank.device_type), None)),
    )


def _notable(ranks: Sequence[Latest]) -> int:
    return max(sum(rank.notable_bytes for rank in ranks), NOTABLE_BYTES)
