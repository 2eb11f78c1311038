"""`python -m highwater_worker.plan [--card NAME ...] -- vllm serve MODEL ...`, or `--serve` for many questions.

Exit status: 0 it fits, or no bytes are known to compare with; 1 it does not fit, may not, or vLLM refuses it; 2 the
input is invalid; 4 this vLLM cannot be asked: the answer says why, and what would help.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

from highwater_worker.plan import arguments, process
from highwater_worker.plan.answer import CANNOT_BE_ASKED, SCHEMA, STATUSES
from highwater_worker.plan.cards import CARDS, card_of

_HELP = {
    "--device-bytes": "the card's memory, in place of the table's",
    "--in-use-bytes": "what others have in use of it",
    "--kv-cache-bytes": "bytes for the KV cache of one rank",
}


def _answer(line: str, own: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a line; `asked` has card and deadline, and keeps the first question's environment."""
    found = {"schema": SCHEMA, "status": "invalid"}
    try:
        question = arguments.checked(own | dict(json.loads(line)))
        environ, words = arguments.split(question.get("argv") or question.get("command") or "")
        if "environ" not in asked:
            process.import_vllm(asked["card"], environ, asked["deadline"])
        if asked.setdefault("environ", environ) != environ:
            return found | {"error": f"the environment was {asked['environ']}; another needs a process of its own"}
        return process.ask({**question, "words": words}, asked["card"], asked["deadline"])
    except arguments.InvalidError as error:
        return found | {"error": str(error)}
    except process.CannotBeAskedError as error:
        return found | {"status": "cannot_be_asked", "error": str(error), "help": None}
    except (ValueError, TypeError):
        why = f'the line {line[:80]!r} is no JSON object; must be like {{"command": "vllm serve MODEL"}}'
        return found | {"error": why}


def main(words: list[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser("python -m highwater_worker.plan", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="read a JSON question a line, write a JSON answer a line")
    parser.add_argument("--card", type=card_of, default="H100", help=f"{', '.join(CARDS)}, or a compute capability")
    for name, text in _HELP.items():
        parser.add_argument(name, type=int, help=text)
    text = "seconds for the import, and for an answer  [120]"
    parser.add_argument("--deadline", type=float, default=120.0, help=text)
    own = vars(parser.parse_args(words[:at]))
    asked, serves = {name: own.pop(name) for name in ("card", "deadline")}, own.pop("serve")
    if serves:  # in the middle of an answer it would not see that its input ended
        process.end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints too, and not JSON
    found = {}
    for line in sys.stdin if serves else [json.dumps({"argv": words[at + 1 :]})]:
        found = _answer(line, own, asked)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    return 0 if serves else STATUSES.get(found["status"], CANNOT_BE_ASKED)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ended = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(ended)  # vLLM's libraries have a lot to say of an end between two questions
