"""A sidecar's responses as the values of ``readings``, with nothing in them that a terminal would obey."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter, ValidationError

from highwater.errors import SidecarUnreachable
from highwater.readings.event import Event
from highwater.readings.rank import RankReading
from highwater.readings.remedy import RemedyResult
from highwater.readings.report import Report
from highwater.readings.schema import SCHEMA
from highwater.text.printable import cleaned

_REPORT = TypeAdapter(Report)
_EVENT = TypeAdapter(Event)
_RANKS = TypeAdapter(tuple[RankReading, ...])
_REMEDY = TypeAdapter(RemedyResult)
_YEAR_10000 = 253_402_300_800.0  # no calendar goes on from there


def not_a_sidecar(path: str) -> SidecarUnreachable:
    return SidecarUnreachable(
        f"what answers {path} there is no Highwater sidecar; --url or HIGHWATER_URL names another"
    )


def report_of(data: object) -> Report:
    """Return the response of ``GET /memory``. Raises SidecarUnreachable where this version cannot read it."""
    if not isinstance(data, dict) or "engine" not in data:
        raise not_a_sidecar("/memory")
    if data.get("schema") != SCHEMA:
        raise SidecarUnreachable(
            f"the sidecar's report is of schema {data.get('schema')!r} and this command reads {SCHEMA}; "
            "use the same version of both"
        )
    try:
        return _REPORT.validate_python(cleaned(data))
    except ValidationError as exc:
        where = ".".join(str(part) for part in exc.errors()[0]["loc"])
        raise SidecarUnreachable(
            f"the sidecar's report has something unknown in {where}; use the same version of both"
        ) from exc


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Map invalid and missing values in a response to one line for people; raises SidecarUnreachable with it."""
    try:
        yield
    except (ValidationError, KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as exc:
        raise SidecarUnreachable(
            f"{what} is not what a sidecar of this version answers; upgrade the older one"
        ) from exc


def ranks_of(data: object) -> tuple[RankReading, ...]:
    with understood("a reading of the ranks"):
        return _RANKS.validate_python(cleaned(data))


def remedy_of(data: Any) -> RemedyResult:  # noqa: ANN401 - JSON
    with understood("/memory/reclaim"):
        freed, credited = data["freed_bytes"], data["credited_bytes"]
        flat = {
            "freed_bytes": freed["total"],
            "freed_components": freed["components"],
            "credited_bytes": credited["total"],
            "credited_components": credited["components"],
        }
        return _REMEDY.validate_python(cleaned({**data, **flat}))


def events_of(data: object) -> list[Event]:
    events = map(event_of, data if isinstance(data, list) else ())
    return [event for event in events if event is not None]


def event_of(data: object) -> Event | None:
    try:
        event = _EVENT.validate_python(cleaned(data))
    except ValidationError:
        return None
    return event if 0 <= event.at < _YEAR_10000 else None
