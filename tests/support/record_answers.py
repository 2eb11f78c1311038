"""Records what vLLM answers to the questions of `highwater plan`: `python -m tests.support.record_answers`.

Kept are the keys that the command reads; tests of the command then need no engine. What docs/plan.md shows is made
of them: `... record_answers screens` does that alone.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest.mock import patch

import click
from click.testing import CliRunner

from highwater.explain.command_line import Line
from highwater.explain.roads import Answer, VllmRoad
from highwater.terminal.demo.engine import DEFAULT_VERSION, ensure_environment
from highwater.terminal.plan import command
from highwater.terminal.plan.command import plan
from tests.engines import ALL_RECIPES
from tests.fakes.recorded_vllm import FILE, MODEL, key, write_python
from tests.support.asked_starts import model_folder
from tests.support.recorded_starts import LLAMA_8B

_CONFIG: Final = {
    "model": ("model", "max_model_len"),
    "cache": ("gpu_memory_utilization", "cache_dtype"),
    "parallel": ("tensor_parallel_size",),
}
_LEFT_OUT: Final = ("log", "seconds", "encoder", "at", "schema")
SCREENS: Final = Path(__file__).parents[2] / "docs" / "plan_screens.json"
# Those of docs/plan.md.
SHOWN: Final = {
    "fits": ("--device H100", "--max-model-len 32768"),
    "refused": ("--device L4", "--max-model-len 65536"),
}
# Of Llama 3.1 8B: the command's own options, and vLLM's flags.
COMMANDS: Final = (
    *SHOWN.values(),
    ("--device L4 --table", "--max-model-len 32768"),
    ("--device L4 --others 3GiB", "--max-model-len 8192"),
    ("--device 24GB", "--max-model-len 23840"),
    ("", "--max-model-len 32768"),
    ("--device L4", "-tp 3"),
    ("", "--no-such-flag 1"),
    ("--device L4", "--kv-cache-memory-bytes 5G --max-model-len 65536"),
    ("--device L4", "--kv-cache-memory-bytes 15G --max-model-len 8192"),
    ("--device H100 --wish '4 x 8k'", ""),
    ("--wish '4 x 8k'", ""),
)


def kept(answer: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in answer.items() if name not in _LEFT_OUT}
    if "config" in found:
        found["config"] = {part: {name: found["config"][part][name] for name in _CONFIG[part]} for part in _CONFIG}
    for name in ("pretended", "guessed", "not_counted"):
        found[name] = found.get(name, [])[:2]
    found["versions"] = {"vllm": found["versions"]["vllm"]}
    found["card"] = {"name": found["card"]["name"]}
    if "ranks" in found:
        found["ranks"] = [{"rank": rank["rank"], "weights": rank["weights"]} for rank in found["ranks"]]
    if "budget" in found:
        ranks = [
            {part: {"bytes": figure["bytes"]} for part, figure in rank.items()} for rank in found["budget"]["ranks"]
        ]
        found["budget"] = {**found["budget"], "ranks": ranks}
    if "kv_cache" in found:
        found["kv_cache"] = {name: value for name, value in found["kv_cache"].items() if name != "groups"}
    return found


class _Recording(VllmRoad):
    answers: ClassVar[dict[str, Any]] = {}

    def ask(self, line: Line, **question: Any) -> Answer:
        answer, model = super().ask(line, **question), line.argv[2]
        place = {**question, "argv": [*line.argv[:2], MODEL, *line.argv[3:]]}
        self.answers[key(self._card, place)] = json.loads(json.dumps(kept(dict(answer))).replace(model, MODEL))
        return answer


def recorded(python: Path, model: Path, commands: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return what the vLLM of a Python answers to every question of the commands, by card and question."""
    _Recording.answers.clear()
    with patch.object(command, "VllmRoad", _Recording):
        for own, flags in commands:
            words = shlex.split(f"{own} --engine-python {python} -- vllm serve {model} {flags}")
            result = CliRunner().invoke(plan, words)
            click.echo(f"{own} -- {flags}\n{result.stdout}{result.exit_code} {result.exception}")
    return dict(_Recording.answers)


def main() -> None:
    environment = ensure_environment(DEFAULT_VERSION, recipes=ALL_RECIPES, announce=print)
    with tempfile.TemporaryDirectory() as made:
        answers = recorded(environment.python, model_folder(Path(made), "llama", LLAMA_8B), COMMANDS)
    rows = [f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in sorted(answers.items())]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def screens() -> dict[str, str]:
    """Return what docs/plan.md shows, of the answers that are kept."""
    with tempfile.TemporaryDirectory() as made:
        python, shown = write_python(Path(made)), {}
        for name, (own, flags) in SHOWN.items():
            words = shlex.split(f"{own} --engine-python {python} -- /model {flags}")
            typed = f"$ highwater plan {own} -- vllm serve Llama-3.1-8B/ {flags}"
            shown[name] = f"{typed}\n{CliRunner().invoke(plan, words).stdout}"
    return shown


if __name__ == "__main__":
    if sys.argv[1:] != ["screens"]:
        main()
    SCREENS.write_text(json.dumps(screens(), indent=2) + "\n")
