"""The words of a pasted shell text: the one command in it that starts a server, with what the shell does before it.

A shell's line breaks, comments, redirections, variables and other commands are read, and nothing is run. More is taken
than a shell takes: a line break without a backslash ends no command whose next line begins with a flag.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvplan.errors import PlanError, short

ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=")
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r]+|\\[ \t\r]*\n|\#[^\n]*)
    |(?P<redirect>(?:\d+|&)?(?:>>?|<)(?:&[\d-]+)?)
    |(?P<end>\n|;|&&?|\|\|?&?)
    |(?P<word>(?:[^\s'"\\;&|<>]|\\[^\n]|'[^']*'|"(?:\\.|[^"\\])*")+)""",
    re.VERBOSE | re.DOTALL,
)
_VARIABLE: Final = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")


def words_of(text: str, is_server: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return the words of the first command that starts a server, after the assignments of the commands before it.

    Where none is known to, all of the text is one command. Raises PlanError: it cannot be split.
    """
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    first: list[str] = []
    for raw in _commands(text):
        words = _expanded(raw, variables)
        if is_server(words):
            return [*(f"{name}={value}" for name, value in exported.items()), *words]
        given = words[1:] if words[:1] == ["export"] else words
        if given and all(ASSIGNMENT.match(word) for word in given):
            found = dict(word.split("=", 1) for word in given)
            variables |= found
            # One that the text uses itself, without `export`, is the shell's own.
            is_own = given is words
            exported |= {name: v for name, v in found.items() if not (is_own and re.search(rf"\${{?{name}\b", text))}
        elif not first:
            first = [*(f"{name}={value}" for name, value in exported.items()), *words]
    return first


def _commands(text: str) -> Iterator[list[str]]:
    """Yield each command's words, still quoted, without redirections."""
    words: list[str] = []
    at, skips = 0, False
    text = text.rstrip().rstrip("\\")  # a paste may end before the line did
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            said = short(" ".join(text.split()))
            raise PlanError(f"the command line {said} cannot be split into words: a quote is open")
        at, word = token.end(), token[0]
        if token["redirect"]:
            if word == "<" and (name := re.match(r"[\w ./-]+>", text[at:])):
                raise PlanError(f"the command line holds <{name[0]}; put there what is meant")
            skips = "&" not in word[1:]
        elif token["word"]:
            words += [] if skips else [word]
            skips = False
        elif token["end"] and not (word == "\n" and _goes_on(words, text[at:])):
            yield words
            words, skips = [], False
    yield words


def _goes_on(words: Sequence[str], rest: str) -> bool:
    is_open = bool(words) and (words[-1] == "serve" or (words[-1].startswith("-") and "=" not in words[-1]))
    return is_open or rest.lstrip().startswith(("-", "\\"))


def _expanded(raw: Sequence[str], variables: dict[str, str]) -> list[str]:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[0] if match[3] is None else match[3]
        return variables.get(name, os.environ.get(name, default))

    return [word for each in raw for word in shlex.split(each if "'" in each else _VARIABLE.sub(value, each))]
