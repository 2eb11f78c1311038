"""Stands for the interpreter of `--engine-python`: answers as vLLM 0.32.0 did, for a model wherever it is.

tests/support/record_answers.py asks again and writes the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).with_name("recorded_vllm.json")
MODEL: Final = "/model"


def key(card: str, question: dict[str, Any]) -> str:
    return f"{card} {json.dumps(question, sort_keys=True)}"


def write_python(folder: Path) -> Path:
    """Return an executable that takes the command line of the kept process."""
    python = folder / "python"
    root = Path(__file__).parents[2]
    python.write_text(f'#!/bin/sh\ncd {root} && PYTHONPATH= exec {sys.executable} -m tests.fakes.recorded_vllm "$@"\n')
    python.chmod(0o755)
    return python


def main() -> None:
    answers, card = json.loads(FILE.read_text()), sys.argv[sys.argv.index("--card") + 1]
    for line in sys.stdin:
        question = json.loads(line)
        question["argv"][2] = MODEL
        unknown = {"status": "cannot_be_asked", "error": f"not recorded: {key(card, question)}", "help": "record it"}
        sys.stdout.write(json.dumps({"schema": 1} | answers.get(key(card, question), unknown)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
