"""A sidecar's answers as the values that all layers speak, with nothing in them that a terminal would obey."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from app.errors import SidecarUnreachable
from app.incidents.plain import cleaned
from app.readings import SCHEMA, Event, Report

__all__ = ["cleaned", "event_of", "events_of", "report_of"]

_REPORT = TypeAdapter(Report)
_EVENT = TypeAdapter(Event)


def report_of(data: object) -> Report:
    """What ``GET /memory`` answered.

    Raises:
        SidecarUnreachable: It is no report, or one that this version cannot read.
    """
    if not isinstance(data, dict) or "engine" not in data:
        raise SidecarUnreachable(
            "what answers /memory there is no Highwater sidecar; --url or HIGHWATER_URL names another"
        )
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


def events_of(data: object) -> list[Event]:
    """The events in a list of them, in its order; those that this version does not know are left out."""
    events = []
    for entry in data if isinstance(data, list) else ():
        event = event_of(entry)
        if event is not None:
            events.append(event)
    return events


def event_of(data: object) -> Event | None:
    """One event; None where this version does not know its like."""
    try:
        return _EVENT.validate_python(cleaned(data))
    except ValidationError:
        return None
