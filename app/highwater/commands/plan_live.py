"""``highwater plan --live``: a sidecar is asked for its engine under other flags, or for the flags of a wish."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from kvplan.errors import PlanError

_PATH = "/memory/plan"
_REFUSED = 422
_NOT_LIVE = ("device", "others", "image", "pod", "measured", "table")


def ask_sidecar(url: str, words: tuple[str, ...], wish: str | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sidecar's plan of its running engine with the flags in ``words``, or for a wish.

    ``own`` are the options that plan no running engine. Raises PlanError where the sidecar refuses.
    """
    from highwater.client.options import sidecar_at
    from highwater.errors import SidecarRefused
    from highwater.plan.command_line import Line, parse

    if given := [name for name in _NOT_LIVE if own[name]]:
        raise PlanError(f"--live: the running engine has its own; leave --{given[0].replace('_', '-')} out")
    if before := " ".join(takewhile(lambda word: not word.startswith("-"), words)):
        raise PlanError(f"--live plans the running engine with other flags: leave {before} out, or --live")
    parsed = parse(Line(words, {}))
    if parsed.model is not None:
        raise PlanError(f"--live plans the running engine: leave {parsed.model} out, or --live")
    body = {"wish": wish, **parsed.given} if wish is not None else dict(parsed.given)
    with sidecar_at(url) as sidecar:
        try:
            answer: dict[str, Any] = sidecar.post(_PATH, body)
        except SidecarRefused as exc:
            if exc.status == _REFUSED:
                raise PlanError(exc.message) from exc
            raise
    return answer
