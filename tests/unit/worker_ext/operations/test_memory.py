"""`memory` tells what it could read, and names what it could not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import FakeModel, FakeTensor, ask, fake_runner, fake_worker


def noted(answer):
    return {note["name"] for note in answer["notes"]}


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_an_accelerators_memory_is_told_in_full(kind, torch_device):
    torch_device(kind)
    answer = ask(fake_worker(kind), "memory")
    uuid = "GPU-cuda-0001" if kind == "cuda" else f"{kind}-0001"
    assert answer["device"] == {"type": kind, "index": 1, "physical_index": 1, "name": "Fake 9000", "uuid": uuid}
    assert (answer["total_bytes"], answer["free_bytes"], answer["used_bytes"]) == (5_000, 1_000, 4_000)
    assert answer["torch"] == {
        "allocated_bytes": 600,
        "reserved_bytes": 900,
        "peak_allocated_bytes": 700,
        "inactive_split_bytes": 40,
        "alloc_retries": 3,
        "ooms": 1,
    }
    assert answer["releasable_bytes"] == 900 - 600 - 40
    assert answer["host_memory"]["pinned_bytes"] is None
    assert (answer["weights_bytes"], answer["kv_cache_bytes"], answer["kv_cache_reserved_bytes"]) == (
        12_345,
        1_600,
        1_600,
    )
    assert answer["budget"] == {"gpu_memory_utilization": 0.9, "requested_bytes": 4_500, "init_free_bytes": 4_800}
    assert answer["notes"] == []


def test_a_missing_figure_is_null_and_named(torch_device):
    """Another version of torch may tell fewer keys."""
    del torch_device("npu").stats["num_ooms"]
    answer = ask(fake_worker("npu"), "memory")
    assert answer["torch"]["ooms"] is None
    assert answer["torch"]["reserved_bytes"] == 900
    assert noted(answer) == {"torch.ooms"}


def test_a_negative_figure_is_shown_as_zero_and_named(torch_device):
    """Sleep mode's allocator frees past torch's counters."""
    torch_device("cuda").stats["reserved_bytes.all.current"] = -4096
    answer = ask(fake_worker("cuda"), "memory")
    assert answer["torch"]["reserved_bytes"] == 0
    assert noted(answer) == {"torch.reserved_bytes"}


@pytest.mark.parametrize(
    ("function", "nulls"),
    [
        ("mem_get_info", ["total_bytes"]),
        ("memory_stats", ["torch", "releasable_bytes"]),
        ("memory_snapshot", ["releasable_bytes"]),
        ("get_device_name", ["device.name"]),
        ("get_device_properties", ["device.uuid"]),
        ("host_memory_stats", ["host_memory.pinned_bytes"]),
    ],
)
def test_a_function_that_raises_costs_only_its_own_values(function, nulls, torch_device, monkeypatch):
    monkeypatch.setattr(type(torch_device("npu")), function, raising(RuntimeError("driver says no")), raising=False)
    answer = ask(fake_worker(), "memory")
    assert answer["notes"] == [{"name": name, "reason": "RuntimeError: driver says no"} for name in nulls]
    assert answer["weights_bytes"] == 12_345


def test_an_unknown_device_leaves_the_host_readable():
    answer = ask(fake_worker("hpu"), "memory")
    assert answer["device"] == {"type": "hpu", "index": 1, "physical_index": 1, "name": None, "uuid": None}
    assert answer["total_bytes"] is None
    assert answer["host_memory"]["rss_bytes"] > 0
    assert {"device", "total_bytes", "torch", "weights_bytes", "kv_cache_bytes"} <= noted(answer)


def test_a_text_model_has_no_encoder_cache(torch_device):
    """Null, without a note: nothing is missing. V1 keeps the dict all the same, V2 has None."""
    torch_device("npu")
    for runner in (fake_runner(supports_mm_inputs=False), fake_runner(encoder_cache=None)):
        answer = ask(fake_worker(model_runner=runner), "memory")
        assert (answer["encoder_cache"], answer["notes"]) == (None, [])


def multimodal(**attributes):
    worker = fake_worker(model_runner=fake_runner(encoder_cache=None, **attributes))
    worker.vllm_config.model_config = SimpleNamespace(is_multimodal_model=True)
    worker.rank = 0
    return worker


def test_a_multimodal_model_without_an_encoder_cache_is_odd(torch_device):
    """An engine may have moved it elsewhere, which nothing else would tell."""
    torch_device("npu")
    (note,) = [note for note in ask(multimodal(), "memory")["notes"] if note["name"] == "encoder_cache"]
    assert note["reason"].startswith("the model is multimodal, but no encoder cache was found")


@pytest.mark.parametrize(
    ("attributes", "rank"), [({"supports_mm_inputs": False}, 0), ({"is_first_pp_rank": False}, 0), ({}, 2)]
)
def test_a_multimodal_model_need_not_have_an_encoder_cache(attributes, rank, torch_device):
    torch_device("npu")
    worker = multimodal(**attributes)
    worker.rank = rank
    assert ask(worker, "memory")["notes"] == []


def test_an_empty_encoder_cache_is_there(torch_device):
    torch_device("npu")
    assert ask(fake_worker(), "memory")["encoder_cache"] == {
        "entries": 0,
        "device_bytes": 0,
        "host_bytes": 0,
        "host_entries": 0,
        "capacity_embeds": 16384,
        "embeds": 0,
        "oldest_age_seconds": None,
        "restore_reserve_bytes": 0,
        "spills": 0,
        "restores": 0,
        "restore_seconds": 0.0,
    }


def test_embeddings_are_the_rows_of_every_entry(torch_device):
    torch_device("npu")
    rows = {"a": FakeTensor(256, 8192), "b": [FakeTensor(100, 8192), FakeTensor(2, 50, 8192)]}
    answer = ask(fake_worker(model_runner=fake_runner(encoder_cache=rows)), "memory")
    assert answer["encoder_cache"]["embeds"] == 256 + 100 + 2 * 50


def test_an_encoder_cache_of_an_unknown_kind_is_named(torch_device):
    torch_device("npu")
    answer = ask(fake_worker(model_runner=fake_runner(encoder_cache=object())), "memory")
    assert (answer["encoder_cache"], answer["trimmable_bytes"]) == (None, None)
    assert [note["name"] for note in answer["notes"]] == ["encoder_cache"]


def test_a_given_kv_cache_size_leaves_no_requested_bytes(torch_device):
    """vLLM computes its share then and does not use it."""
    torch_device("npu")
    worker = fake_worker()
    worker.vllm_config.cache_config.kv_cache_memory_bytes = 1 << 30
    assert ask(worker, "memory")["budget"]["requested_bytes"] is None


def test_an_older_ascend_worker_kept_only_the_free_bytes(torch_device):
    """vllm-ascend up to 0.13."""
    torch_device("npu")
    worker = fake_worker(init_snapshot=None, init_npu_memory=4_700)
    assert ask(worker, "memory")["budget"]["init_free_bytes"] == 4_700


def test_a_cpu_workers_memory_is_its_process(monkeypatch):
    monkeypatch.setattr("highwater_worker.memory.storages.resident_bytes", lambda _pointer, nbytes: nbytes // 4)
    runner = fake_runner("cpu", get_model=lambda: FakeModel(device="cpu"))
    answer = ask(fake_worker("cpu", None, model_runner=runner), "memory")
    assert answer["used_bytes"] == answer["host_memory"]["rss_bytes"]
    assert (answer["kv_cache_bytes"], answer["kv_cache_reserved_bytes"]) == (400, 1_600)
    assert answer["weights_bytes"] == 320
    assert set(answer["torch"].values()) == {None}
    assert answer["notes"] == []


def test_weights_without_a_measurement_are_counted(torch_device):
    """vllm-ascend up to 0.13 does not keep the number; a drafter's weights belong to them."""
    torch_device("npu")
    model, draft = FakeModel(3), FakeModel(2)
    runner = fake_runner(model_memory_usage=0, get_model=lambda: model, drafter=SimpleNamespace(model=draft))
    answer = ask(fake_worker(model_runner=runner), "memory")
    assert answer["weights_bytes"] == 320 + 220
    assert noted(answer) == {"weights_bytes"}
    assert "parameters and buffers were counted" in answer["notes"][0]["reason"]


def test_weights_are_counted_once(torch_device, monkeypatch):
    torch_device("npu")
    model = FakeModel()
    worker = fake_worker(model_runner=fake_runner(model_memory_usage=None, get_model=lambda: model))
    first = ask(worker, "memory")["weights_bytes"]
    monkeypatch.setattr(model, "parameters", lambda: iter(()))
    assert ask(worker, "memory")["weights_bytes"] == first
    worker.model_runner.get_model = lambda: FakeModel(1)
    assert ask(worker, "memory")["weights_bytes"] == 120


def test_weights_packed_by_the_cpu_backend_are_counted():
    packed, handle = FakeTensor(100, device="cpu"), SimpleNamespace(k=30, n=20, handler_tensor=object())
    weight = SimpleNamespace(dtype=SimpleNamespace(itemsize=2))
    model = FakeModel(0, device="cpu")
    model.layers = [
        SimpleNamespace(cpu_linear=lambda x: (packed, x), weight=weight),
        SimpleNamespace(cpu_linear=lambda x: (handle, x), weight=weight),
        SimpleNamespace(cpu_linear=print, weight=weight),
    ]
    runner = fake_runner("cpu", get_model=lambda: model)
    assert ask(fake_worker("cpu", None, model_runner=runner), "memory")["weights_bytes"] == 20 + 200 + 1200


def test_kv_caches_are_found_in_every_form_and_counted_once(torch_device):
    torch_device("npu")
    key, value, state, lonely, spilled = (FakeTensor(50) for _ in range(5))
    spilled.device.type = "cpu"
    worker = fake_worker(model_runner=fake_runner(kv_caches=[(key, value), [state, [key]], key, None, spilled]))
    layers = {"a": SimpleNamespace(kv_cache=[lonely]), "b": SimpleNamespace(kv_cache=state), "c": SimpleNamespace()}
    worker.vllm_config.compilation_config.static_forward_context = layers
    assert ask(worker, "memory")["kv_cache_bytes"] == 400


def test_no_trace_of_a_kv_cache_is_named(torch_device):
    torch_device("npu")
    worker = fake_worker(model_runner=fake_runner(kv_caches=[]))
    assert ask(worker, "memory")["kv_cache_bytes"] == 0
    worker.model_runner.kv_caches = worker.vllm_config.compilation_config = None
    answer = ask(worker, "memory")
    assert answer["kv_cache_bytes"] is None
    assert noted(answer) == {"kv_cache_bytes"}


class _UnprofiledRunner(SimpleNamespace):
    """A runner whose budget cannot be read before its profile."""

    @property
    def mm_budget(self):
        raise RuntimeError("not profiled yet")


def test_a_property_of_the_engine_that_raises_costs_one_figure(torch_device):
    torch_device("npu")
    runner = _UnprofiledRunner(
        encoder_cache={}, supports_mm_inputs=True, requests={}, kv_caches=(), model_memory_usage=5
    )
    answer = ask(fake_worker("npu", model_runner=runner), "memory")
    assert answer["ok"]
    assert answer["encoder_cache"] is None
    assert answer["weights_bytes"] == 5
    assert "encoder_cache" in noted(answer)
