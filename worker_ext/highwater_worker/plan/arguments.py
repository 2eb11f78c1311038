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


def engine_config(rest: list[str]) -> Any:
    """Return the configuration that the API server would make. Raises InvalidError, and whatever vLLM raises."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            arguments = versions.argument_parser().parse_args(rest)
    except SystemExit as end:
        last = said.getvalue().strip().rpartition("\n")[2] if end.code else "--help or --version was asked for"
        raise InvalidError(last.partition("error: ")[2] or last) from end
    if getattr(arguments, "model_tag", None):
        arguments.model = arguments.model_tag
    made = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(arguments)
    usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    return made.create_engine_config(usage_context=usage)
