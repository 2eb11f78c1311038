"""``highwater plan --live``: a running engine's plan under other flags, or the flags for a wish."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, NoReturn

import click

from highwater.exit_codes import DOES_NOT_FIT, OK
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


def show_live(answer: Mapping[str, Any], *, as_json: bool) -> NoReturn:
    """Print the answer of a sidecar, and end with the exit status that it has."""
    from highwater.commands.plan_text import show

    fits = _fits(answer)
    if as_json:
        print_json(answer)
    else:
        changed = f", with {answer['command_line'].removeprefix('vllm serve MODEL ')}" if answer.get("changed") else ""
        show({
            **answer,
            "status": {True: "fits", False: "does_not_fit", None: "may_not_fit"}[fits],
            "road": f"{answer['model']['architecture']} on vLLM {answer['vllm_version']}, as it started{changed}",
            "config": {"model": answer["flags"]},
        })  # fmt: skip
    sys.exit(OK if fits else DOES_NOT_FIT)


def print_json(answer: Mapping[str, Any]) -> None:
    click.echo(json.dumps(answer, indent=2))


def _fits(answer: Mapping[str, Any]) -> bool | None:
    """Return whether a plan fits, or a wish without other flags; None where an estimate's bounds leave that open."""
    kv, wish = answer["kv_cache"], answer.get("wish")
    if wish is not None and not (wish["fits"] and wish["chosen"]):
        return False
    needed, likely = kv["needed_bytes"] if wish is None else wish["chosen"]["needed_bytes"], kv["fits"]
    low, high = kv["available_bytes_low"], kv["available_bytes_high"]
    return likely if low is None or (needed <= low) == (needed <= high) else None
