"""The check that ``/dev/shm`` is large enough, from ``GET /memory/host`` as the sidecar sent it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from highwater.text.strict_json import part
from highwater.units import size_text

Judged: TypeAlias = tuple[Literal["ok", "warn", "fail", "skip"], str, str | None]
_LEVELS: Final[Mapping[str, Literal["warn", "fail"]]] = {"shm_promised_too_much": "fail", "shm_too_small": "warn"}


def judge_shm(host: Mapping[str, Any]) -> Judged:
    """Return the level, the text and the advice: the sidecar's own findings, and its figures where it has none.

    Figures that are missing in the response are not known.
    """
    shm, needs = part(part(host, "reading"), "shm"), part(host, "shm_needs")
    size, free = _number(shm.get("size_bytes")), _number(shm.get("free_bytes"))
    if size is None or free is None:
        text = "not known: no process of the engine writes a file (HIGHWATER_RECORDER_DIR)"
        return "skip", text, None
    unknown = [str(row.get("name")) for row in _rows(needs.get("rows")) if row.get("bytes") is None]
    not_known = f", and what {', '.join(unknown)} need is not known" if unknown else ""
    for finding in _rows(host.get("findings")):
        if level := _LEVELS.get(str(finding.get("name"))):
            return level, f"{finding.get('text')}{not_known if level == 'warn' else ''}", str(finding.get("advice"))
    has, known = f"{size_text(size)}, {size_text(free)} free", _number(needs.get("known_bytes"))
    if known is None:
        return "ok", f"{has}; what this command line can need is not known: no worker reports its settings", None
    return "ok", f"{has}; this command line can need {size_text(known)}{not_known}", None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _rows(rows: object) -> list[Mapping[str, Any]]:
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list | tuple) else []
