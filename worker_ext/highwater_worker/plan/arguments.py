"""A pasted command line, as vLLM's own parser takes it."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from typing import Any

from highwater_worker.plan import versions

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
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
            raise InvalidError(f"the command line {words!r} cannot be split into words: {error}") from error
    rest = [word for word in words if word.strip()]
    environ: dict[str, str] = {}
    while rest and (rest[0] in ("env", "export") or _ASSIGNMENT.match(rest[0])):
        name, _, value = rest.pop(0).partition("=")
        if name not in ("env", "export"):
            environ[name] = value
    for at, word in enumerate(rest):
        if word == "-m" and rest[at + 1 : at + 2] and rest[at + 1] in _MODULES:
            rest = rest[at + 2 :]
            return environ, rest[1:] if rest[:1] == ["serve"] else rest
        if word.rpartition("/")[2] == "vllm" and rest[at + 1 : at + 2] == ["serve"]:
            return environ, rest[at + 2 :]
        if word.startswith("-"):
            break
    given = " ".join(rest[:4])
    raise InvalidError(
        f"the command line begins with {given!r}; must be 'vllm serve MODEL ...', or python -m {_MODULES[0]}"
    )


def engine_config(rest: list[str]) -> Any:
    """Return the configuration that the API server would make. Raises InvalidError, and whatever vLLM raises."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = versions.argument_parser().parse_args(rest)
    except SystemExit as end:
        last = said.getvalue().strip().rpartition("\n")[2] or "--help or --version was asked for"
        raise InvalidError(last.partition("error: ")[2] or last) from end
    if getattr(arguments, "model_tag", None):
        arguments.model = arguments.model_tag
    made = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(arguments)
    usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    return made.create_engine_config(usage_context=usage)
