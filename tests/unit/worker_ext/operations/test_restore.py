"""`restore` brings everything back, as far as there is room."""

from __future__ import annotations

import pytest

from highwater_worker.encoder_cache.spilling_dict import Spilled
from tests.unit.worker_ext.fakes import FakeTensor, ask, fake_runner, fake_worker


@pytest.fixture
def npu(torch_device):
    return torch_device("npu")


@pytest.fixture
def worker(npu):
    """Four entries of 100 bytes in host memory; b was used last."""
    cache = {name: FakeTensor(50, content=name) for name in "abcd"}
    made = fake_worker(model_runner=fake_runner(encoder_cache=cache))
    del cache
    ask(made, "trim", '{"free_bytes": 0}')
    made.model_runner.encoder_cache.get("b")
    ask(made, "trim")
    npu.calls.clear()
    return made


def test_everything_comes_back(worker, npu):
    cache = worker.model_runner.encoder_cache
    uses = [cache.last_use(key) for key in "abcd"]
    answer = ask(worker, "restore")
    assert (answer["restored_entries"], answer["restored_bytes"], answer["left_entries"]) == (4, 400, 0)
    assert (answer["encoder_cache"]["device_bytes"], answer["encoder_cache"]["host_bytes"]) == (400, 0)
    assert answer["encoder_cache"]["restores"] == 4
    assert [value.device.type for value in dict.values(cache)] == ["npu"] * 4
    assert [cache.last_use(key) for key in "abcd"] == uses


def test_what_was_used_last_comes_back_first_and_a_full_device_ends_it(worker, npu):
    """To fill it to the last byte would take what the next step needs. What is left is there all the same."""
    npu.copy_errors = [None, RuntimeError("out of memory"), RuntimeError("out of memory")]
    answer = ask(worker, "restore")
    assert (answer["restored_entries"], answer["left_entries"]) == (1, 3)
    assert answer["notes"] == [{"name": "left_entries", "reason": "RuntimeError: out of memory"}]
    cache = worker.model_runner.encoder_cache
    assert [key for key, value in dict.items(cache) if type(value) is Spilled] == ["a", "c", "d"]
    assert [value.content for value in cache.values()] == list("abcd")


@pytest.mark.parametrize("cache", [None, {}, {"a": FakeTensor(5)}])
def test_nothing_to_bring_back_is_no_error(cache, npu):
    worker = fake_worker(model_runner=fake_runner(encoder_cache=cache))
    answer = ask(worker, "restore")
    assert (answer["restored_entries"], answer["restored_bytes"], answer["left_entries"]) == (0, 0, 0)
    assert [note["name"] for note in answer["notes"]] == ["restored_entries"]
    assert worker.model_runner.encoder_cache is cache
