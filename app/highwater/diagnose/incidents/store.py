"""The store of incidents: one file each in one folder, or memory.

A file is one JSON object whose first line holds the headline, so that a list reads only the beginning of each. It is
written in one step, so that a crash leaves a whole file or none; the oldest make room for the newest. An incident that
cannot be written stays in memory and is tried again, and `problem` names the reason. No link to a file is followed. A
file that cannot be read, such as a later version's, is named and left alone until it is the oldest. The folder belongs
to one sidecar.
"""

from __future__ import annotations

import math
import os
import re
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from highwater.diagnose.evidence import SCHEMA, Headline, Incident
from highwater.model.components import thin
from highwater.process.errors import os_reason
from highwater.process.regular import read_regular, replace_private
from highwater.process.untrusted import flaw, plain

KEEP, MAX_BYTES = 32, 8 * 1024 * 1024
# Of each rank, whatever the bound: two minutes at ten a second are 1,200, and reading them all holds up the data plane.
MAX_POINTS, MIN_POINTS = 300, 2
# The last of them are all kept: they are of the incident itself.
RECENT_POINTS = 60
MAX_RANKS_LEFT = 8
MAX_IN_MEMORY = 16
# In a list, of a folder that may hold other files.
MAX_LISTED = 1000
# A larger file is not the store's, whatever max_bytes was when it was written.
MAX_FILE_BYTES = 64 * 1024 * 1024
HEAD_BYTES = 16 * 1024

_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[a-z0-9]{1,24}(-[a-z0-9]{1,24}){0,5}", re.ASCII)
_SCHEMA = re.compile(rb'"schema"\s*:\s*([0-9]{1,6})\b')
_HEADLINE = TypeAdapter(Headline)
_INCIDENT: Final = TypeAdapter(Incident)
_HEAD: Final = {field.name for field in fields(Headline)} - {"problem"}
# In this order, until the rest fits.
_CUTS: Final[tuple[tuple[str, Callable[[Incident], Incident]], ...]] = (
    (
        "the series and the entries of the encoder caches are",
        lambda one: replace(one, ranks=tuple(replace(rank, series=(), entries=()) for rank in one.ranks)),
    ),
    ("the requests with images are", lambda one: replace(one, requests=())),
    ("the policy and the events are", lambda one: replace(one, policy=None, decisions=(), events=())),
    ("all but the first ranks are", lambda one: replace(one, ranks=one.ranks[:MAX_RANKS_LEFT])),
)


class UnreadableIncident(Exception):
    """An incident exists and cannot be read. The message says why, in one sentence."""


def is_incident_id(text: str) -> bool:
    """Return whether a text is an incident's id: nothing else becomes part of a path."""
    return _ID.fullmatch(text) is not None


class _InMemory(NamedTuple):
    headline: Headline
    compressed: bytes  # much of it repeats


class IncidentStore:
    """The incidents. Every method may block on the disk, and may be called from any thread.

    At most ``keep`` files are kept, of ``max_bytes`` each. The folder must exist; ``None``: memory only.
    """

    def __init__(self, folder: Path | None, *, keep: int = KEEP, max_bytes: int = MAX_BYTES) -> None:
        self.folder = Path(os.path.realpath(folder)) if folder is not None else None  # links are followed once
        self.problem: str | None = None  # why the last incident could not be written, in one sentence
        self._keep = keep
        self._max_bytes = max_bytes
        self._memory: dict[str, _InMemory] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Check the folder, and remove what a crash left half written. Call it before the first write."""
        folder = self.folder
        if folder is None:
            return
        if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            self.problem = f"incidents.folder: {folder} is missing or not writable; incidents are kept in memory only"
            return
        for draft in folder.glob(".*.draft"):
            if is_incident_id(draft.name[1:].partition(".json.")[0]):
                with suppress(OSError):
                    draft.unlink()

    def write(self, incident: Incident) -> None:
        """Keep an incident in place of the one with its id. Never fails: what cannot be written stays in memory."""
        kept, content = fitted(incident, self._max_bytes)
        with self._lock:
            self._memory.pop(kept.id, None)
            self._memory[kept.id] = _InMemory(kept.headline, zlib.compress(content, 1))
            if self.folder is not None:
                self._flush(self.folder)
            while len(self._memory) > MAX_IN_MEMORY:
                del self._memory[min(self._memory)]

    def remove(self, incident_id: str) -> None:
        with self._lock:
            self._memory.pop(incident_id, None)
            if self.folder is not None and incident_id in _names(self.folder):
                with suppress(OSError):
                    _file(self.folder, incident_id).unlink()

    def headlines(self) -> list[Headline]:
        """Return all of them, newest first; the headline of an unreadable incident names the problem."""
        with self._lock:
            headlines: dict[str, Headline] = {}
            if (folder := self.folder) is not None:
                for name in sorted(_names(folder), reverse=True)[:MAX_LISTED]:
                    with suppress(FileNotFoundError):
                        headlines[name] = _headline(folder, name)
            headlines |= {name: kept.headline for name, kept in self._memory.items()}
        return [headlines[name] for name in sorted(headlines, reverse=True)[:MAX_LISTED]]

    def has(self, incident_id: str) -> bool:
        with self._lock:
            return incident_id in self._memory or (self.folder is not None and incident_id in _names(self.folder))

    def read(self, incident_id: str) -> Incident | None:
        """Raises UnreadableIncident: it exists, and this version cannot read it."""
        content = self._content(incident_id)
        if content is None:
            return None
        try:
            incident = _INCIDENT.validate_json(content)
        except ValidationError as exc:
            errors, schema = exc.errors(include_url=False, include_input=False), _schema(content[:HEAD_BYTES])
            why = f"has another form: {plain(flaw(errors), 240)}"
            if schema != SCHEMA:
                why = _other_schema(schema)
            elif errors[0]["type"] == "json_invalid":
                why = "is not valid JSON"
            raise UnreadableIncident(f"{incident_id} {why}") from exc
        if not _has_times(incident):
            raise UnreadableIncident(f"{incident_id} has an invalid time")
        return incident

    def _content(self, incident_id: str) -> bytes | None:
        if not is_incident_id(incident_id):
            return None
        with self._lock:
            if incident_id in self._memory:
                return zlib.decompress(self._memory[incident_id].compressed)
        if self.folder is None:
            return None
        try:
            return read_regular(_file(self.folder, incident_id), MAX_FILE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise UnreadableIncident(f"{incident_id} cannot be read: {os_reason(exc)}") from exc

    def _flush(self, folder: Path) -> None:
        for incident_id in sorted(self._memory):
            try:
                replace_private(_file(folder, incident_id), zlib.decompress(self._memory[incident_id].compressed))
            except OSError as exc:
                self.problem = (
                    f"incidents.folder: {incident_id} could not be written to {folder}: {os_reason(exc)}; "
                    f"it is kept in memory ({len(self._memory)} of {MAX_IN_MEMORY})"
                )
                return
            del self._memory[incident_id]
        self.problem = None
        for incident_id in sorted(_names(folder))[: -self._keep]:
            # What cannot be removed, such as a folder under such a name, is not the store's.
            with suppress(OSError):
                _file(folder, incident_id).unlink()


def _headline(folder: Path, incident_id: str) -> Headline:
    schema = None
    try:
        start = read_regular(_file(folder, incident_id), MAX_FILE_BYTES, first_bytes=HEAD_BYTES)
        line = start.partition(b"\n")[0].removesuffix(b",") + b"}"
        if (schema := _schema(start)) != SCHEMA:
            problem = _other_schema(schema)
        elif not _has_times(headline := _HEADLINE.validate_json(line)):
            problem = "has an invalid time"
        elif headline.id != incident_id:
            problem = f"says that it is {plain(headline.id, 80)}"
        else:
            return headline
    except FileNotFoundError:
        raise  # it was removed meanwhile
    except OSError as exc:
        problem = f"cannot be read: {os_reason(exc)}"
    except ValidationError:
        problem = "has no headline that this version reads"
    return Headline(schema=schema, id=incident_id, kind=None, at=None, problem=problem)


def _has_times(known: Headline) -> bool:
    return all(math.isfinite(at or 0.0) for at in (known.at, known.last_at, known.ended_at))


def _schema(content: bytes) -> int | None:
    found = _SCHEMA.search(content)
    return int(found[1]) if found is not None else None


def _other_schema(schema: int | None) -> str:
    if schema is None:
        return "is not an incident"
    return f"is of schema {schema}, and this version reads {SCHEMA}"


# --- files ---


def _names(folder: Path) -> set[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return set()
    return {name[:-5] for name in names if name.endswith(".json") and is_incident_id(name[:-5])}


def _file(folder: Path, incident_id: str) -> Path:
    return folder / f"{incident_id}.json"


# --- as JSON ---


def listing(headlines: Sequence[Headline], folder: Path | None, problem: str | None) -> dict[str, Any]:
    listed = [asdict(headline) for headline in headlines]
    where = str(folder) if folder is not None else None
    return {"schema": SCHEMA, "incidents": listed, "folder": where, "problem": problem}


def to_bytes(incident: Incident) -> bytes:
    """Return one JSON object; its first line holds the headline."""
    head = _INCIDENT.dump_json(incident, include=_HEAD)
    rest = _INCIDENT.dump_json(incident, exclude=_HEAD)
    return head[:-1] + b",\n" + rest[1:] + b"\n"


def fitted(incident: Incident, max_bytes: int) -> tuple[Incident, bytes]:
    """Return the incident and its bytes, no more than ``max_bytes``.

    First the series are thinned; where that is not enough, the least useful parts are left out one after another, each
    with a note.
    """
    incident = _thinned(incident, MAX_POINTS)
    content = to_bytes(incident)
    points = _points(incident)
    while len(content) > max_bytes and points > MIN_POINTS:
        points = max(min(points // 2, int(points * max_bytes / len(content))), MIN_POINTS)
        incident = _thinned(incident, points)
        content = to_bytes(incident)
    for what, cut in _CUTS:
        if len(content) <= max_bytes:
            break
        note = f"{what} left out: to keep within {max_bytes:,} bytes"
        incident = replace(cut(incident), notes=(*incident.notes, note))
        content = to_bytes(incident)
    return incident, content


def _thinned(incident: Incident, most: int) -> Incident:
    if _points(incident) <= most:
        return incident
    recent = min(RECENT_POINTS, most // 2)
    ranks = (replace(rank, series=thin(rank.series, most, recent=recent)) for rank in incident.ranks)
    return replace(incident, ranks=tuple(ranks))


def _points(incident: Incident) -> int:
    return max((len(rank.series) for rank in incident.ranks), default=0)
