"""The engine's budget is what stands in the worker's attributes: null where this version lacks one, never a guess."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from highwater_worker.errors import Notes, UnreadableError
from highwater_worker.memory.engine_budget import read_budget, read_engine_budget
from highwater_worker.memory.storages import MAX_KINDS, describe_layers, describe_spec
from tests.fakes.started import BF16, GIB, full, gemma, qwen3_next, story
from tests.unit.worker_ext.fakes import ask, fake_worker


def test_the_start_of_the_story_is_read_to_the_byte():
    budget = read_engine_budget(story(), None)
    memory = budget["memory"]
    gib = {name: round(memory[name] / GIB, 2) for name in memory if isinstance(memory[name], int)}
    assert gib == {
        "total_bytes": 60.96,
        "init_free_bytes": 60.61,
        "init_non_torch_bytes": 0.35,
        "requested_bytes": 57.91,
        "weights_bytes": 9.19,
        "peak_activation_bytes": 3.86,
        "non_torch_bytes": 0.56,
        "available_bytes": 44.30,
    }
    assert budget["encoder"]["max_tokens_per_item"] == {"image": 16_384}
    assert budget["notes"] == []


def test_a_worker_of_another_world_is_null_all_over():
    """Nothing there, nothing raised, and no figure that would be 0."""
    budget = read_engine_budget(SimpleNamespace(), None)
    assert set(budget["memory"].values()) == {None}
    assert (budget["encoder"], budget["kv_cache"]["layers"], budget["kv_cache"]["groups"]) == (None, None, None)
    json.dumps(budget, allow_nan=False)


def test_the_version_of_vllm_ascend_is_its_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm_ascend", SimpleNamespace())
    assert read_engine_budget(SimpleNamespace(), None)["ascend_version"] is None
    assert "ascend_version" in {note["name"] for note in read_engine_budget(SimpleNamespace(), None)["notes"]}
    installed = tmp_path / "vllm_ascend-0.30.0rc2.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-ascend\nVersion: 0.30.0rc2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert read_engine_budget(SimpleNamespace(), None)["ascend_version"] == "0.30.0rc2"
    monkeypatch.delitem(sys.modules, "vllm_ascend")
    assert read_engine_budget(SimpleNamespace(), None)["ascend_version"] is None


@pytest.mark.parametrize(
    ("version", "ascend", "given"),
    [("0.18.0", True, None), ("0.19.1rc1", True, 10**9), ("0.12.0", False, 10**9), ("main", True, 10**9)],
)
def test_bytes_that_vllm_ascend_ignores_are_not_given(version, ascend, given, monkeypatch: pytest.MonkeyPatch):
    """Before 0.19 the share sizes the KV cache all the same, and is what was requested."""
    worker = story()
    worker.vllm_config.cache_config.kv_cache_memory_bytes = 10**9
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    if ascend:
        monkeypatch.setitem(sys.modules, "vllm_ascend", SimpleNamespace())
    assert read_engine_budget(worker, None)["kv_cache"]["given_bytes"] == given
    requested = read_budget(worker, Notes())["requested_bytes"]
    assert requested == (worker.requested_memory if given is None else None)


def test_an_attribute_that_raises_costs_only_itself():
    class Odd(SimpleNamespace):
        @property
        def requested_memory(self) -> int:
            raise RuntimeError("no device")

    budget = read_engine_budget(Odd(non_torch_memory=5), None)
    assert (budget["memory"]["requested_bytes"], budget["memory"]["non_torch_bytes"]) == (None, 5)
    assert budget["notes"] == [{"name": "requested_bytes", "reason": "RuntimeError: no device"}]


@pytest.mark.parametrize(("make", "kinds", "layers"), [(story, 1, 36), (gemma, 2, 62), (qwen3_next, 2, 48)])
def test_layers_are_described_in_runs(make, kinds, layers):
    described = describe_layers(make().specs)
    assert len(described["kinds"]) == kinds
    assert sum(count for _, count in described["runs"]) == layers


def test_layers_that_were_not_seen_are_read_of_the_groups():
    layers = read_engine_budget(story(), None)["kv_cache"]["layers"]
    assert (layers["are_grouped"], layers["runs"]) == (True, [[0, 36]])


def test_a_field_that_nobody_knows_is_described_too():
    spec = SimpleNamespace(
        block_size=64, dtype=BF16, dtypes=(BF16, BF16), shapes=((3, 4), (5,)), tokens_per_state=Fraction(1, 4),
        cache_dtype_str="fp8_ds_mla", window=None, nested={"a": 1}, is_new=True,
    )  # fmt: skip
    assert describe_spec(spec) == {
        "kind": "SimpleNamespace",
        "page_bytes": None,
        "block_size": 64,
        "dtype_bytes": 2,
        "dtypes_bytes": [2, 2],
        "shapes": [[3, 4], [5]],
        "tokens_per_state": "1/4",
        "cache_dtype_str": "fp8_ds_mla",
        "is_new": True,
    }


def test_layers_that_all_differ_are_refused():
    with pytest.raises(UnreadableError, match="differ too often"):
        describe_layers({str(n): full(n + 1, 64, 16) for n in range(MAX_KINDS + 1)})


def test_only_listed_variables_are_read(monkeypatch):
    monkeypatch.setattr("os.environ", {"HF_TOKEN": "secret", "TASK_QUEUE_ENABLE": "2"})
    assert ask(fake_worker(), "budget")["engine_budget"]["environment"] == {"TASK_QUEUE_ENABLE": "2"}


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([{"size": 5}, {"size": 7}], 12),
        ([{"size": 5, "block_stride": 0}, {"size": 7, "block_stride": 0}], 12),
        ([{"size": 9, "block_stride": 3}, {"size": 9, "block_stride": 3}], 9),
        ([{"size": 9, "block_stride": 3}, {"size": 90, "block_stride": 3, "host_resident": True}], 9),
        ([{"size": 9}, {}], None),
        ([], None),
    ],
)
def test_tensors_of_one_allocation_count_once(tensors, expected):
    worker = story()
    worker.model_runner.kv_cache_config.kv_cache_tensors = [SimpleNamespace(**tensor) for tensor in tensors]
    assert read_engine_budget(worker, None)["kv_cache"]["tensor_bytes"] == expected


@pytest.mark.parametrize(("device", "weights"), [("cpu", None), ("npu", -5)])
def test_on_a_cpu_the_machines_growth_is_not_taken_for_weights(device, weights):
    """Model runner V2 keeps it; it is negative where another process ends meanwhile."""
    worker = story()
    worker.model_runner.model_memory_usage, worker.device_config = -5, SimpleNamespace(device_type=device)
    assert read_engine_budget(worker, None)["memory"]["weights_bytes"] == weights
