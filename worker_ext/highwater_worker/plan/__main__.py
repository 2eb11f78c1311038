"""`python -m highwater_worker.plan [--card NAME ...] -- vllm serve MODEL ...`, or `--serve` for many questions."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from highwater_worker.plan import arguments, process
from highwater_worker.plan.answer import CANNOT_BE_ASKED, SCHEMA, STATUSES
from highwater_worker.plan.cards import CARDS

_EPILOG = (
    "Exit status: 0 it fits, or no bytes are known to compare with; 1 it does not fit, may not, or vLLM refuses it;"
    f" 2 invalid; {CANNOT_BE_ASKED} this vLLM cannot be asked: the answer says why, and what would help."
)


class _Vllm:
    """vLLM, imported for the first question, with the environment that stands before its command."""

    def __init__(self, card: str, deadline_seconds: float) -> None:
        self._card, self._deadline_seconds = CARDS[card], deadline_seconds
        self._environ: dict[str, str] | None = None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            environ, words = arguments.split(question.get("argv") or question.get("command") or "")
            if self._environ not in (None, environ):
                raise arguments.InvalidError(f"the environment was {self._environ}; another needs another process")
            if self._environ is None:
                process.import_vllm(self._card, environ, self._deadline_seconds)
                self._environ = environ
            return process.ask({**question, "words": words}, self._card, self._deadline_seconds)
        except arguments.InvalidError as error:
            return {"schema": SCHEMA, "status": "invalid", "error": str(error)}
        except process.CannotBeAskedError as error:
            return {"schema": SCHEMA, "status": "cannot_be_asked", "error": str(error), "help": None}


def main(words: list[str]) -> int:
    """Return the exit status."""
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser("python -m highwater_worker.plan", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--serve", action="store_true", help="read a JSON question a line, write a JSON answer a line")
    parser.add_argument("--card", choices=CARDS, default="H100", help="[default: H100]")
    parser.add_argument("--device-bytes", type=int, help="the card's memory, in place of the table's")
    parser.add_argument("--in-use-bytes", type=int, help="what others have in use of it")
    parser.add_argument("--kv-cache-bytes", type=int, help="bytes for the KV cache of one rank")
    parser.add_argument("--ranks", choices=["stages", "all"], help="which are constructed  [default: one a stage]")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for the import, and for an answer")
    own = vars(parser.parse_args(words[:at]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints too, and not JSON
    vllm, serves = _Vllm(own["card"], own.pop("deadline")), own.pop("serve")
    for line in sys.stdin if serves else [json.dumps({**own, "argv": words[at + 1 :]})]:
        try:
            question = json.loads(line)
        except ValueError:
            question = None
        if isinstance(question, dict):
            found = vllm.ask({**own, **question})
        else:
            why = f'the line {line[:80]!r} is no JSON object; must be like {{"command": "vllm serve MODEL"}}'
            found = {"schema": SCHEMA, "status": "invalid", "error": why}
        print(json.dumps(found), file=answers, flush=True)
    return 0 if serves else STATUSES.get(found["status"], CANNOT_BE_ASKED)


def _in_a_child(words: list[str]) -> int:
    """Return the exit status; a library that ends its process is an answer too."""
    child = os.fork()
    if child == 0:
        status = CANNOT_BE_ASKED
        try:
            status = main(words)
        except SystemExit as end:  # argparse's
            status = int(end.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(status)  # vLLM's libraries have a lot to say of an end between two questions
    ended = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(ended):
        why = f"importing vLLM ended the process with signal {os.WTERMSIG(ended)}; stderr has what it said"
        print(json.dumps({"schema": SCHEMA, "status": "cannot_be_asked", "error": why, "help": None}))
        return CANNOT_BE_ASKED
    return os.WEXITSTATUS(ended)


if __name__ == "__main__":
    sys.exit(_in_a_child(sys.argv[1:]))
