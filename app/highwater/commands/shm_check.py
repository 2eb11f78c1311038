"""The check that ``/dev/shm`` is large enough, from ``GET /memory/host`` as the sidecar sent it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from highwater.units import size_text

Judged: TypeAlias = tuple[Literal["ok", "warn", "fail", "skip"], str, str | None]
CHANGE: Final = "docker run --shm-size; in Kubernetes a volume of medium Memory at /dev/shm with a larger sizeLimit"


def judge_shm(host: Mapping[str, Any]) -> Judged:
    """Return the level, the finding and the advice; figures that are missing in the response are not known."""
    shm, needs = _part(_part(host, "reading"), "shm"), _part(host, "shm_needs")
    size, free, promised = (_number(shm.get(name)) for name in ("size_bytes", "free_bytes", "promised_bytes"))
    if size is None or free is None:
        text = "not known: no process of the engine writes a file (HIGHWATER_RECORDER_DIR)"
        return "skip", text, None
    has = f"{size_text(size)}, {size_text(free)} free"
    if promised is not None and promised > free:
        text = f"{has}, and files in it may still take {size_text(promised)}: too small by {size_text(promised - free)}"
        return "fail", text, CHANGE
    known, short = _number(needs.get("known_bytes")), _number(needs.get("short_bytes"))
    if known is None:
        return "ok", f"{has}; what this command line can need is not known: no worker reports its settings", None
    unknown = [str(row.get("name")) for row in _rows(needs.get("rows")) if row.get("bytes") is None]
    needed = f"{has}; this command line can need {size_text(known)}"
    if unknown:
        needed += f", and what {', '.join(unknown)} need is not known"
    if short:
        return "warn", f"{needed}: too small by {size_text(short)} before a SIGBUS", CHANGE
    return "ok", needed, None


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = whole.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _rows(rows: object) -> list[Mapping[str, Any]]:
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list | tuple) else []
