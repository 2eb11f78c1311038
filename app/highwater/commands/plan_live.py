"""``highwater plan --live`` and ``--wish``: a running engine's plan under other flags, and the flags for a wish."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import click

from highwater.exit_codes import DOES_NOT_FIT, OK
from highwater.units import size_text
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags, command_line, given_flags

if TYPE_CHECKING:
    from highwater.plan.images import ImageTokens
    from highwater.plan.offline import OfflinePlan
    from highwater.plan.wish import Wish

_PATH = "/memory/plan"
_REFUSED = 422


def ask_sidecar(url: str, given: Mapping[str, Any], wish: str | None, model: str | None) -> dict[str, Any]:
    """Return a sidecar's plan of its running engine with other flags, or for a wish.

    ``given`` are vLLM's flags by the names of `EngineFlags` (None and defaults: as the engine runs); ``model`` is a
    folder or config.json, for the tokens of images in pixels. Raises PlanError where the sidecar refuses, or the folder
    cannot be read.
    """
    from highwater.client.options import sidecar_at
    from highwater.errors import SidecarRefused

    body = {"wish": _in_tokens(wish, model)} if wish is not None else given_flags(EngineFlags(**given))
    with sidecar_at(url) as sidecar:
        try:
            answer: dict[str, Any] = sidecar.post(_PATH, body)
        except SidecarRefused as exc:
            if exc.status == _REFUSED:
                raise PlanError(exc.message) from exc
            raise
    return answer


def grant_for_model(
    model: str, values: Mapping[str, Any], text: str, flags: EngineFlags, plan: Callable[[EngineFlags], OfflinePlan]
) -> dict[str, Any]:
    """Return the plan of the flags that a wish needs, for a model that does not run yet.

    ``values`` are its config.json's, ``flags`` the command line so far. Raises PlanError where it cannot be planned.
    """
    from highwater.plan.answer import plan_json
    from highwater.plan.wish import grant_offline, parse_wish, wish_json

    wish = parse_wish(text)
    granted = grant_offline(wish, flags, plan, _image(wish, values, model))
    given = given_flags(flags)
    chosen = {} if granted.chosen is None else dict(granted.chosen.flags)
    line = command_line({**given, **chosen}, model) if chosen else None
    chosen.pop("limit_mm_per_prompt", None)  # it changes no byte of the KV cache that is planned here
    return {
        **plan_json(plan(replace(flags, **chosen)), model),
        "wish": wish_json(granted, given, model),
        "command_line": line,
    }


def end_with(answer: Mapping[str, Any], *, as_json: bool) -> NoReturn:
    wish = answer.get("wish")
    if as_json:
        print_json(answer)
    else:
        click.echo(_plan_text(answer) if wish is None else _wish_text(answer, wish))
        for note in answer.get("notes") or ():
            click.echo(f"note: {note}")
    sys.exit(OK if _fits(answer) else DOES_NOT_FIT)


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


def _plan_text(answer: Mapping[str, Any]) -> str:
    kv = answer["kv_cache"]
    length, fits = answer["flags"]["max_model_len"], _fits(answer)
    longest = f"the longest that fits is {kv['max_model_len_that_fits']:,}."
    # The card decides, unless the length is too long whatever the card holds.
    by_card = None if fits is False and kv["max_model_len_that_fits"] else kv.get("on_card")
    lines = [
        f"{answer['model']['architecture']} on vLLM {answer['vllm_version']}, as it started"
        + (f", with {answer['command_line'].removeprefix('vllm serve MODEL ')}" if answer["command_line"] else ""),
        {
            True: f"It fits: the KV cache holds a request of {length:,} tokens. {by_card or ''}".rstrip(),
            False: f"It does not fit: {by_card or longest}",
            None: f"It may not fit: {by_card or f'by the estimate {longest}'}",
        }[fits],
        "",
        f"KV cache        {_available_text(answer)}",
        f"blocks          {kv['blocks']:,} of {kv['bytes_per_block']:,} bytes, {kv['grades']['blocks']}",
    ]
    if kv["tokens"] is not None:
        lines.append(f"tokens          {kv['tokens']:,} as vLLM prints them")
        lines.append(f"requests        {kv['max_concurrency']:.2f} of {length:,} tokens at once")
    lines.append(f"a request       {size_text(kv['needed_bytes'])}")
    return "\n".join(lines)


def _wish_text(answer: Mapping[str, Any], wish: Mapping[str, Any]) -> str:
    chosen = wish["chosen"]
    lines = [wish["proof"]]
    if wish["image"] is not None:
        image = wish["image"]
        lines.append(
            f"An image is {image['prompt_tokens']:,} tokens, {image['embeddings']:,} of them in the encoder cache."
        )
    if chosen is None:
        lines.append("It does not fit, and no other flags that were tried make it fit.")
    elif wish["fits"] and "kv_cache_memory_bytes" in chosen["flags"]:
        needed = size_text(chosen["needed_bytes"])
        lines.append(f"No device was named, so nothing was compared. The KV cache needs {needed} on each rank, as in:")
        lines += ["", f"  {answer['command_line']}", ""]
    else:
        why = answer["kv_cache"].get("on_card") or "the bounds of the estimate leave that open"
        fits = "fits" if _fits(answer) else f"may fit ({why.rstrip('.')})"
        lines.append(f"It {fits}:" if wish["fits"] else f"It does not fit as it is. With {chosen['why']} it {fits}:")
        lines += ["", f"  {answer['command_line']}", ""]
        lines += [f"  --{name.replace('_', '-')}: {why}" for name, why in wish["reasons"].items()]
    if answer["kv_cache"]["available_bytes"] is not None:
        flags = "as it is" if chosen is None else "with these flags"
        lines += ["", f"KV cache of a rank {flags}: {_available_text(answer)}"]
    if wish["nearest"]:
        lines += ["", "Nearest:"]
        lines += [f"  {option['why']}: {option['command_line']}" for option in wish["nearest"]]
    return "\n".join(lines)


def _available_text(answer: Mapping[str, Any]) -> str:
    kv = answer["kv_cache"]
    low, high = kv["available_bytes_low"], kv["available_bytes_high"]
    between = "" if low is None else f" (between {size_text(low)} and {size_text(high)})"
    return f"{size_text(kv['available_bytes'])}{between}, {kv['grades']['available_bytes']}"


def _in_tokens(text: str, model: str | None) -> str:
    from highwater.plan.offline import read_config
    from highwater.plan.wish import parse_wish

    wish = parse_wish(text)
    if model is None or wish.images is None or wish.images.width is None:
        return text
    image = _image(wish, read_config(model), model)
    tokens = 0 if image is None else image.prompt_tokens
    return f"{wish.conversations} x {wish.tokens} + {wish.images.count} images of {tokens} tokens"


def _image(wish: Wish, values: Mapping[str, Any], model: str) -> ImageTokens | None:
    from highwater.plan.images import ImageTokens, image_tokens, takes_images
    from highwater.plan.offline import read_preprocessor

    images = wish.images
    if images is None:
        return None
    if not takes_images(values):
        raise PlanError(
            f"wish: {images.count} images: the model ({values.get('model_type')!r}) takes none, its config.json has no"
            " vision_config; wish for conversations alone"
        )
    if images.tokens is not None:
        return ImageTokens(embeddings=images.tokens, prompt_tokens=images.tokens)
    if images.width is None or images.height is None:
        raise PlanError(f"wish: {images.count} images: of what size? As in '{images.count} images of 1080p'")
    return image_tokens(values, read_preprocessor(model), images.width, images.height)
