"""A command line as a report may show it: arguments that look like secrets are masked. Pure.

A report is meant to be shared. How a program names its secrets is not known, so the usual names are looked for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Final

from highwater.text.printable import plain

MASK = "***"
_NAMES: Final = r"(?:api[-_]?key|token|password|passwd|secret|credential|authorization|access[-_]?key)"
_NAME = re.compile(rf"^-{{0,2}}[\w.-]*{_NAMES}[\w.-]*$", re.IGNORECASE)
# `--max-tokens 5` names no secret: such tokens are a model's.
_HARMLESS = re.compile(r"token(s|iz|_id|-id|_len|-len)", re.IGNORECASE)
_OPTION = re.compile(rf"(-{{1,2}}[\w.-]*{_NAMES}[\w.-]*=)", re.IGNORECASE)
_WITHIN = re.compile(rf"""([\w.-]*{_NAMES}[\w.-]*['"]?\s*[=:]\s*['"]?)(?!bearer\b|basic\b)[^\s'",;&]+""", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)\s+\S+", re.IGNORECASE)
_KEY = re.compile(r"\b(sk|hf|ghp|glpat)[-_][A-Za-z0-9_-]{8,}")
_USER = re.compile(r"(\w+://)[^/@\s]+@")


def masked(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command's arguments; those that follow or are assigned to a secret's name are masked."""
    shown: list[str] = []
    hides_next = False
    for argument in command:
        if hides_next and not argument.startswith("--"):
            shown.append(MASK)
            hides_next = False
            continue
        hides_next = argument.startswith("-") and bool(_NAME.match(argument)) and not _HARMLESS.search(argument)
        shown.append(argument if hides_next else _masked(argument))
    return tuple(shown)


def shown_command(command: Sequence[str], most: int = 2000) -> str:
    return plain(shlex.join(command), most)


def _masked(argument: str) -> str:
    hidden = _USER.sub(rf"\1{MASK}@", _KEY.sub(MASK, _BEARER.sub(rf"\1 {MASK}", argument)))
    whole = _OPTION.match(hidden)
    if whole is not None and not _HARMLESS.search(whole[1]):
        return f"{whole[1]}{MASK}"
    # A script, a header, JSON: only the value right after the name is masked.
    return _WITHIN.sub(lambda found: found[0] if _HARMLESS.search(found[1]) else f"{found[1]}{MASK}", hidden)
