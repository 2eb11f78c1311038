"""The kept process that is asked: progress, its end, and what is said where it gives no answer."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path

import pytest

from highwater.plan import roads
from highwater.plan.command_line import read_line
from highwater.plan.roads import BuiltInRoad, CannotBeAskedError, VllmRoad
from kvplan.errors import PlanError
from tests.fakes.recorded_vllm import write_python
from tests.patience import LIMIT_SECONDS

LINE = read_line(["vllm serve /model --max-model-len 32768"])


def script(folder: Path, text: str) -> str:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)
    return str(python)


def test_one_process_answers_many_questions_and_ends(tmp_path: Path) -> None:
    python = write_python(tmp_path)
    with VllmRoad(str(python), "H100", lambda _: None) as road:
        pid = road._process.pid
        answers = [road.ask(LINE, activation=False) for _ in range(2)]
    assert [answer["status"] for answer in answers] == ["not_known"] * 2
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_its_children_end_with_it(tmp_path: Path) -> None:
    python = script(
        tmp_path, f'sleep 1000 & echo $! > {tmp_path}/pid; read line; echo \'{{"schema": 1, "status": "fits"}}\'; wait'
    )
    with VllmRoad(python, "H100", lambda _: None) as road:
        road.ask(LINE)
        child = os.pidfd_open(int((tmp_path / "pid").read_text()))
    assert select.select([child], [], [], LIMIT_SECONDS)[0]  # it has ended
    os.close(child)


def test_waiting_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roads, "_FIRST_WORD_SECONDS", 0.0)
    said: list[str] = []
    with VllmRoad(script(tmp_path, 'read line; echo \'{"schema": 1, "status": "fits"}\''), "H100", said.append) as road:
        road.ask(LINE)
    assert said == ["asking vLLM: 0 s"]


def test_a_vllm_that_cannot_be_asked_says_why_and_what_helps(tmp_path: Path) -> None:
    answer = '{"schema": 1, "status": "cannot_be_asked", "error": "no tokenizer", "help": "copy tokenizer.json"}'
    with (
        VllmRoad(script(tmp_path, f"read line; echo '{answer}'"), "H100", lambda _: None) as road,
        pytest.raises(CannotBeAskedError, match=r"this vLLM cannot be asked: no tokenizer. copy tokenizer.json"),
    ):
        road.ask(LINE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo no module >&2; exit 1", "did not answer: no module"),
        ("exit 0", "did not answer: it said nothing"),
        ("setsid sleep 20 & exit 0", "did not answer: it said nothing"),
        ("read line; echo '[1]'", r"did not answer: it said \[1\]"),
        ("read line; echo '{}'", "did not answer: it said {}"),
    ],
)
def test_a_process_that_ends_is_quoted(tmp_path: Path, text: str, said: str) -> None:
    with (
        VllmRoad(script(tmp_path, text), "H100", lambda _: None) as road,
        pytest.raises(CannotBeAskedError, match=said),
    ):
        road.ask(LINE)


def test_a_process_without_an_answer_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roads, "_GRACE_SECONDS", -2 * roads.DEADLINE_SECONDS)
    with (
        VllmRoad(script(tmp_path, "exec sleep 1000"), "H100", lambda _: None) as road,
        pytest.raises(CannotBeAskedError, match="it said nothing"),
    ):
        road.ask(LINE)


def test_an_interpreter_that_is_none_is_named() -> None:
    with pytest.raises(PlanError, match="--engine-python: /nowhere/python could not be started"):
        VllmRoad("/nowhere/python", "H100", lambda _: None).__enter__()


def test_only_the_worker_package_goes_onto_the_path_beside_the_shim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/operator")
    python = script(tmp_path, 'read line; ls "${PYTHONPATH%%:*}" >&2; echo "$PYTHONPATH" >&2')
    with VllmRoad(python, "H100", lambda _: None) as road, pytest.raises(CannotBeAskedError) as raised:
        road.ask(LINE)
    worker, shim, given = str(raised.value).rpartition(" ")[2].split(":")
    assert (worker != shim, shim.endswith("demo/shim"), given) == (True, True, "/of/the/operator")


@pytest.mark.parametrize("ask", [lambda: BuiltInRoad(None).ask(read_line(["vllm serve m --cpu-offload-gb 4"]))])
def test_what_the_built_in_refuses_comes_with_the_command_that_asks_a_vllm(ask: Callable[[], object]) -> None:
    with pytest.raises(PlanError, match=r"highwater plan --engine-python PATH -- vllm serve m --cpu-offload-gb 4$"):
        ask()
