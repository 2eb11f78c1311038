"""The contract as it is written is the contract as it is spoken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import highwater_worker
from highwater_worker.operations import OPERATIONS
from highwater_worker.recorder import end_recorder
from tests.fakes.started import story
from tests.unit.worker_ext.fakes import HEAD, FakeTensor, ask, fake_runner, fake_worker

FOLDER = Path(highwater_worker.__file__).parents[1]
EXAMPLES = json.loads((FOLDER / "responses.json").read_text(encoding="utf-8"))


def keys(value: object) -> object:
    if isinstance(value, dict):
        return {key: keys(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [keys(value[0])] if value and isinstance(value[0], dict) else []
    return None


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_every_operation_has_an_example_with_its_very_keys(op, torch_device, tmp_path, monkeypatch):
    torch_device("npu")
    worker = fake_worker(
        model_runner=fake_runner(encoder_cache={"a": FakeTensor(5), "b": FakeTensor(5)}), execute_model=print
    )
    if op == "budget":
        vars(worker).update(vars(story()))
        monkeypatch.setattr("os.environ", {"ASCEND_RT_VISIBLE_DEVICES": "2,3"})
    start = json.dumps({"directory": str(tmp_path), "instance": "0123456789abcdef"})
    if op == "restore":
        ask(worker, "trim")
    if op == "recorder_stop":
        ask(worker, "recorder_start", start)
    stop = json.dumps({"instance": "0123456789abcdef"})
    payloads = {
        "recorder_start": start,
        "recorder_stop": stop,
        "snapshot": json.dumps({"directory": str(tmp_path), "name": "one"}),
    }
    whole = ask(worker, op, payloads.get(op, "{}"))
    answer = {key: value for key, value in whole.items() if key not in HEAD}
    assert keys(EXAMPLES[op]) == keys(answer)
    assert end_recorder(worker)


def test_every_operation_has_a_section_and_an_example():
    told = re.findall(r"^## `(\w+)`$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(told) == set(EXAMPLES) == set(OPERATIONS)
