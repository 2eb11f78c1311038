"""A pasted command line, as vLLM's own parser takes it."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from typing import Any

from highwater_worker.plan import versions

_BEFORE = re.compile(r"(?:env|export|([A-Za-z_][A-Za-z0-9_]*)=(.*))", re.DOTALL)
_BYTES = ("kv_cache_bytes", "device_bytes", "in_use_bytes")
_KEYS = {"command", "argv", *_BYTES, "activation", "measured", "images"}
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")


class InvalidError(Exception):
    """The command line is not one that vLLM takes; says so in vLLM's words where they are."""


def split(words: list[str] | str) -> tuple[dict[str, str], list[str]]:
    """Return the environment that stands before a command, and what follows `vllm serve`.

    Text may have line breaks with backslashes, as it is pasted. Raises InvalidError.
    """
    if isinstance(words, str):
        try:
            words = shlex.split(words.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise InvalidError(f"the command line {words[:200]!r} cannot be split into words: {error}") from error
    rest = [word for word in map(str, words) if word.strip()]
    environ: dict[str, str] = {}
    while rest and (before := _BEFORE.fullmatch(rest[0])):
        environ |= {before[1]: before[2]} if before[1] else {}
        del rest[0]
    for at, (word, following) in enumerate(zip(rest, [*rest[1:], ""])):
        if word == "-m" and following in _MODULES:
            rest = rest[at + 2 :]
            return environ, rest[1:] if rest[:1] == ["serve"] else rest
        if word.rpartition("/")[2] == "vllm" and following == "serve":
            return environ, rest[at + 2 :]
        if word.startswith("-"):
            break
    given = " ".join(rest[:4])[:200]
    must = f"'vllm serve MODEL ...', or python -m {_MODULES[0]}"
    raise InvalidError(f"the command line begins with {given!r}; must be {must}")


def checked(question: dict[str, Any]) -> dict[str, Any]:
    """Return a question whose keys are known, and whose values are what they must be. Raises InvalidError."""
    measured, images = question.get("measured") or {}, question.get("images") or []
    sizes = {name: question[name] for name in _BYTES if question.get(name) is not None}
    wrong = {name: value for name, value in sizes.items() if type(value) is not int or value < 0}
    if unknown := question.keys() - _KEYS:
        raise InvalidError(f"the question has {sorted(unknown)}; must be of {sorted(_KEYS)}")
    if wrong:
        raise InvalidError(f"the question has {wrong}; must be bytes, 0 or more")
    if not isinstance(measured, dict) or any(type(value) is not int for value in measured.values()):
        raise InvalidError(f"measured is {measured!r}; must be parts of a start by name, with bytes")
    pairs = images if isinstance(images, list) else [images]
    if not all(isinstance(one, list) and [type(side) for side in one] == [int, int] for one in pairs):
        raise InvalidError(f"images is {images!r}; must be a list of [width, height] in pixels")
    return question


def parsed(rest: list[str]) -> Any:
    """Return what vLLM's parser makes of a command line. Raises InvalidError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            arguments = versions.argument_parser().parse_args(rest)
    except SystemExit as end:
        last = said.getvalue().strip().rpartition("\n")[2] if end.code else "--help or --version was asked for"
        raise InvalidError(last.partition("error: ")[2] or last) from end
    except (OSError, ValueError) as error:  # of --config
        raise InvalidError(str(error)) from error
    if getattr(arguments, "model_tag", None):
        arguments.model = arguments.model_tag
    return arguments


def engine_config(arguments: Any) -> Any:
    """Return the configuration that the API server would make. Raises whatever vLLM raises."""
    made = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(arguments)
    usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    return made.create_engine_config(usage_context=usage)
