"""What vLLM loads in every process: workers get our method, an account of their start, and a recorder."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from highwater_worker import plugin
from highwater_worker.memory.start_phases import MAX_PHASES
from highwater_worker.memory.storages import Residency
from highwater_worker.recorder import DIRECTORY, end_recorder, instance_of, options_from, running_recorder
from highwater_worker.state import state_of
from highwater_worker.wire import KEPT_STARTS
from tests.fakes.started import story
from tests.unit.worker_ext.fakes import FakeTensor, ask, fake_runner, fake_worker, imported_as
from tests.unit.worker_ext.ring_bytes import parse, records, table

NAMES = ["before", "init", "weights", "profile", "kv_cache", "graphs", "warm_up"]


class EngineWorker:
    """Knows the five phases of a start, and fails in one where it is told to."""

    made: ClassVar[list[Any]] = []
    failing: str | None = None

    def init_device(self) -> str:
        self._fail("init_device")
        runner = fake_runner("cpu")
        runner.capture_model = lambda: 5
        vars(self)["model_runner"] = runner
        return "device"

    def load_model(self, *, load_dummy_weights: bool = False) -> bool:
        self._fail("load_model")
        return load_dummy_weights

    def determine_available_memory(self) -> int:
        return 7

    def initialize_from_config(self, config: object) -> object:
        return config

    def compile_or_warm_up_model(self) -> int:
        return vars(self)["model_runner"].capture_model()

    def execute_model(self, plan: object) -> object:
        return plan

    def _fail(self, name: str) -> None:
        if self.failing == name:
            raise RuntimeError("out of memory")


@pytest.fixture
def vllm():
    """The worker class of a vLLM, new for each test; its workers' recorders are stopped afterwards."""

    class WorkerBase(EngineWorker):
        made: ClassVar[list[Any]] = []

        def __init__(self, rank: int = 0) -> None:
            parts = vars(fake_worker("cpu", None, rank=rank))
            config = SimpleNamespace(**vars(parts.pop("vllm_config")), instance_id="a1b2c")
            vars(self).update(parts, vllm_config=config, model_runner=None)
            self.made.append(self)

    module = ModuleType("vllm.v1.worker.worker_base")
    module.WorkerBase = WorkerBase  # type: ignore[attr-defined]
    with imported_as("vllm.v1.worker.worker_base", module):
        yield WorkerBase
        for worker in WorkerBase.made:
            assert end_recorder(worker)


@pytest.fixture
def worker(vllm):
    """One that the plugin was loaded before."""
    plugin.register()
    return vllm()


@pytest.fixture(autouse=True)
def _written_at_once(monkeypatch):
    monkeypatch.setattr("highwater_worker.recorder.is_in_memory", lambda _: True)
    monkeypatch.delenv(DIRECTORY, raising=False)
    # tests/unit/worker_ext/processes has it: its thread would write into these tests' folders.
    monkeypatch.setattr(plugin, "start_process_file", lambda _: None)


def start(worker) -> list[object]:
    """All phases in the engine's order, and what they return."""
    return [
        worker.init_device(),
        worker.load_model(load_dummy_weights=True),
        worker.determine_available_memory(),
        worker.initialize_from_config({"blocks": 3}),
        worker.compile_or_warm_up_model(),
    ]


def written(folder) -> dict[str, Any]:
    """The head of the table in the only file."""
    (path,) = folder.iterdir()
    head, _ = table(path)
    return head


def test_a_worker_gets_our_method_without_an_extension_class(vllm, worker):
    assert json.loads(worker.highwater_rpc("memory"))["ok"]
    assert not hasattr(vllm, "highwater_rpc")


def test_an_extension_class_of_anybodys_stays(vllm):
    """Ours under the same name would be another one's answers."""
    vllm.highwater_rpc = lambda _: "theirs"
    plugin.register()
    assert vllm().highwater_rpc() == "theirs"


def test_the_start_is_followed_and_changed_in_nothing(worker):
    assert start(worker) == ["device", True, 7, {"blocks": 3}, 5]
    phases = state_of(worker).start.phases
    assert [phase["name"] for phase in phases] == NAMES
    assert all(phase["rss_bytes"] > 0 and phase["seconds"] >= 0 and phase["error"] is None for phase in phases)
    assert state_of(worker).start.is_over


def test_without_a_folder_nothing_is_recorded(worker):
    """The package may be installed for its method alone."""
    start(worker)
    assert running_recorder(worker) is None


def test_with_a_folder_the_recorder_runs_from_before_the_model_is_loaded(vllm, tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    plugin.register()
    worker = vllm(rank=1)
    worker.init_device()
    assert [phase["name"] for phase in written(tmp_path)["start"]] == ["before", "init"]
    worker.load_model()
    assert [phase["name"] for phase in written(tmp_path)["start"]] == ["before", "init", "weights"]
    (path,) = tmp_path.iterdir()
    identity, _ = parse(path)
    assert (identity["rank"], identity["instance"]) == (1, instance_of(worker))
    assert path.name == f"highwater-{identity['instance']}-{os.getpid()}.ring"


def test_each_phase_is_followed_by_a_sample_of_what_it_has_made(worker, tmp_path, monkeypatch):
    # The fakes' pages are nowhere: all of them count as resident.
    monkeypatch.setattr(Residency, "total", lambda _, storages: sum(storage.nbytes for storage in storages))
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    worker.init_device()
    worker.model_runner.kv_caches = []
    worker.load_model()
    worker.model_runner.kv_caches = [FakeTensor(400, device="cpu")]
    worker.initialize_from_config({})
    (path,) = tmp_path.iterdir()
    sizes = [record["memory"]["kv_cache_bytes"] for record in records(path) if record["kind"] == "sample"]
    assert sizes[-2:] == [0, 800]


@pytest.mark.parametrize(("method", "kept"), [("init_device", NAMES[:2]), ("load_model", NAMES[:3])])
def test_a_start_that_fails_leaves_its_reason_in_the_file(worker, tmp_path, monkeypatch, method, kept):
    """And fails as it would have without us."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    worker.failing = method
    with pytest.raises(RuntimeError, match="out of memory"):
        start(worker)
    phases = written(tmp_path)["start"]
    assert [phase["name"] for phase in phases] == kept
    assert phases[-1]["error"] == "RuntimeError: out of memory"


def test_all_workers_of_an_engine_share_a_name_and_another_engine_has_another(vllm):
    one, copy, other = vllm(), vllm(), vllm()
    copy.vllm_config.instance_id += "_dp3"
    other.vllm_config.instance_id = "fffff"
    assert instance_of(one) == instance_of(copy) != instance_of(other)
    assert len(instance_of(one)) == 16


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"HIGHWATER_RECORDER_DIR": "relative"}, "HIGHWATER_RECORDER_DIR is 'relative'"),
        ({"HIGHWATER_RECORDER_DIR": "/x", "HIGHWATER_RECORDER_RATE": "1e9"}, "HIGHWATER_RECORDER_RATE is '1e9'"),
        ({"HIGHWATER_RECORDER_DIR": "/x", "HIGHWATER_RECORDER_SECONDS": "long"}, "a number from 10 to 3600"),
    ],
)
def test_a_setting_that_is_wrong_is_named_once_and_costs_the_recorder_alone(vllm, monkeypatch, caplog, environ, named):
    plugin.register()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    worker = vllm()
    with caplog.at_level(logging.WARNING, "vllm"):
        start(worker)
    (message,) = [record.getMessage() for record in caplog.records]
    assert named in message
    assert running_recorder(worker) is None


@pytest.mark.parametrize("obstacle", ["no folder", "no room", "another machine"])
def test_a_folder_that_cannot_be_used_costs_the_recorder_alone(worker, tmp_path, monkeypatch, caplog, obstacle):
    folder = tmp_path / "rings"
    monkeypatch.setenv(DIRECTORY, str(folder))
    if obstacle == "no folder":
        folder.write_text("")
    elif obstacle == "no room":
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    else:
        monkeypatch.setattr("highwater_worker.recorder.file_system_of", lambda _: "nfs4")
    with caplog.at_level(logging.WARNING, "vllm"):
        assert start(worker)[1:] == [True, 7, {"blocks": 3}, 5]
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(folder) in message
    assert running_recorder(worker) is None
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_a_folder_that_becomes_usable_is_used_from_then_on(worker, tmp_path, monkeypatch):
    """An earlier engine may still have held its room; the phases until then are in the file all the same."""
    folder = tmp_path / "rings"
    folder.write_text("")
    monkeypatch.setenv(DIRECTORY, str(folder))
    worker.init_device()
    folder.unlink()
    worker.load_model()
    assert [phase["name"] for phase in written(folder)["start"]] == NAMES[:3]


def test_a_crash_loop_leaves_its_last_starts(vllm, tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    plugin.register()
    for number in range(KEPT_STARTS + 3):
        worker = vllm()
        worker.vllm_config.instance_id = f"start {number}"
        worker.failing = "load_model"
        with pytest.raises(RuntimeError):
            start(worker)
        assert end_recorder(worker)
        for path in tmp_path.iterdir():
            at = path.stat().st_mtime - 100.0
            os.utime(path, (at, at))
    heads = [table(path)[0]["start"][-1] for path in tmp_path.iterdir()]
    assert len(heads) == KEPT_STARTS + 1
    assert {head["error"] for head in heads} == {"RuntimeError: out of memory"}


def test_a_start_without_room_takes_that_of_starts_that_are_over(vllm, tmp_path, monkeypatch):
    """A folder in memory has a size: a crash loop is recorded in it to its last start."""
    over = tmp_path / f"highwater-{1:016x}-7.ring"
    over.write_bytes(b"")
    os.utime(over, (0, 0))
    allocate = os.posix_fallocate

    def full_until_it_is_gone(descriptor: int, offset: int, length: int) -> None:
        if over.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_until_it_is_gone)
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    plugin.register()
    vllm().init_device()
    assert [phase["name"] for phase in written(tmp_path)["start"]] == NAMES[:2]


def test_settings_of_the_environment_are_taken(tmp_path):
    environ = {
        "HIGHWATER_RECORDER_RATE": "5",
        "HIGHWATER_RECORDER_SECONDS": "",
    }
    options = options_from(environ, tmp_path, "0" * 16)
    assert (options.directory, options.rate, options.seconds) == (tmp_path, 5.0, 120.0)


def test_it_is_registered_once(vllm):
    """vLLM calls it again in a process that was forked from another."""
    plugin.register()
    wrapped = vllm.__init__
    plugin.register()
    assert vllm.__init__ is wrapped


def test_a_vllm_without_the_class_starts_as_ever(caplog):
    with imported_as("vllm.v1.worker.worker_base", ModuleType("worker_base")):
        plugin.register()
    assert "changes nothing" in caplog.text


def test_a_worker_that_cannot_be_attached_to_comes_up(vllm, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "watch_sleep", lambda *_: 1 / 0)
    plugin.register()
    assert vllm().init_device() == "device"
    assert "leaves it alone" in caplog.text


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        (
            {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056},
            None,
            (14, 2, 3136, 12845056),
        ),
        (
            {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
            {"max_pixels": 1003520},
            (16, 2, 65536, 1003520),
        ),
        ({"patch_size": 14}, None, None),  # no processor of that kind
        (None, None, None),  # a version that does not keep it
    ],
)
def test_the_processors_rule_of_pixels_is_read_where_it_is_known(worker, config, given, expected):
    worker.init_device()
    model = SimpleNamespace(
        hf_image_processor_config=config, multimodal_config=SimpleNamespace(mm_processor_kwargs=given)
    )
    vars(worker)["model_runner"] = SimpleNamespace(mm_budget=BUDGET)
    vars(worker)["vllm_config"] = SimpleNamespace(model_config=model)
    found = ask(worker, "budget")["engine_budget"]["encoder"]["image_rule"]
    names = ("patch_size", "merge_size", "min_pixels", "max_pixels")
    assert found == (None if expected is None else dict(zip(names, expected, strict=True)))


def test_an_engine_that_loads_its_weights_again_and_again_fills_nothing(worker):
    for _ in range(MAX_PHASES + 5):
        worker.load_model()
    assert len(state_of(worker).start.phases) == MAX_PHASES


def test_nothing_keeps_a_worker_alive(vllm):
    plugin.register()
    worker = vllm()
    start(worker)
    vllm.made.clear()
    reference = weakref.ref(worker)
    del worker
    gc.collect()
    assert reference() is None


def phases_of(worker) -> dict[str, dict[str, Any]]:
    return {phase["name"]: phase for phase in state_of(worker).start.phases}


def test_what_was_in_use_before_the_start_is_the_engines_own_look(worker):
    """Others on the card, and what it takes to use a card at all: no driver is asked before the engine does."""
    worker.device_config = SimpleNamespace(device_type="npu")
    worker.init_snapshot = SimpleNamespace(free_memory=900, total_memory=1_000)
    worker.init_device()
    before = phases_of(worker)["before"]
    assert (before["total_bytes"], before["free_bytes"], before["used_bytes"]) == (1_000, 900, 100)
    assert (before["seconds"], before["error"]) == (0.0, None)


def test_an_engine_that_finds_its_card_full_leaves_how_full_it_was(worker):
    worker.device_config = SimpleNamespace(device_type="npu")
    worker.init_snapshot = SimpleNamespace(free_memory=100, total_memory=1_000)
    worker.failing = "init_device"
    with pytest.raises(RuntimeError):
        worker.init_device()
    phases = phases_of(worker)
    assert (phases["before"]["used_bytes"], phases["init"]["error"]) == (900, "RuntimeError: out of memory")
    assert "used_bytes" not in phases["init"]


def test_on_a_cpu_what_was_in_use_before_the_start_is_the_process(worker):
    worker.device_config = SimpleNamespace(device_type="cpu")
    worker.init_device()
    before = phases_of(worker)["before"]
    assert before["used_bytes"] == before["rss_bytes"] > 0


def test_graphs_have_a_phase_of_their_own_within_the_last(worker):
    start(worker)
    phases = phases_of(worker)
    assert phases["graphs"]["at"] >= phases["warm_up"]["at"]
    assert phases["graphs"]["seconds"] <= phases["warm_up"]["seconds"]
    assert "__wrapped__" not in vars(vars(worker)["model_runner"].capture_model)


def test_the_budget_of_a_start_is_in_the_file(vllm, tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    vllm.get_kv_cache_spec = lambda _: story().specs
    plugin.register()
    worker = vllm()
    start(worker)
    assert worker.get_kv_cache_spec() == story().specs
    running_recorder(worker).start_changed()
    budget = written(tmp_path)["engine_budget"]
    assert (budget["memory"]["returned_bytes"], budget["memory"]["graphs_bytes"]) == (7, 5)
    assert budget["kv_cache"]["layers"]["runs"] == [[0, 36]]
    assert "are_grouped" not in budget["kv_cache"]["layers"]


BUDGET = SimpleNamespace(
    encoder_compute_budget=1024,
    encoder_cache_size=1024,  # one item is more than the 512 tokens of a batch
    mm_max_toks_per_item={"image": 1024},
    mm_max_items_per_prompt={"image": 4},
    mm_max_items_per_batch={"image": 1},
)


class EncoderRunner:
    """Model runner V2's, as far as a start uses it."""

    hidden_size = 2048

    def __init__(self) -> None:
        self.failing = False

    def profile_encoder_cache(self, dummy_mm_inputs: object, budget: object) -> object:
        if self.failing:
            raise RuntimeError("out of memory")
        return dummy_mm_inputs, budget


def load_v2(vllm, profile):
    """Start a worker with model runner V2 as far as its model is loaded; `profile` is what its profile does."""
    plugin.register()
    vllm.determine_available_memory = lambda self: profile(vars(self)["model_runner"].model_state.encoder_runner)
    worker = vllm()
    worker.init_device()
    runner = vars(worker)["model_runner"]
    vars(runner).update(
        mm_budget=None,
        encoder_cache=SimpleNamespace(encoder_outputs={}, mm_features={}),
        model_state=SimpleNamespace(encoder_runner=EncoderRunner()),
    )
    worker.load_model()
    return worker


def encoder_and_capacity(worker) -> tuple[dict[str, Any], int | None]:
    budget = json.loads(worker.highwater_rpc("budget"))["engine_budget"]
    capacities = {
        json.loads(worker.highwater_rpc("encoder_cache"))["capacity_embeds"],
        json.loads(worker.highwater_rpc("memory"))["encoder_cache"]["capacity_embeds"],
    }
    assert len(capacities) == 1
    return budget, capacities.pop()


@pytest.mark.parametrize(
    "profile",
    [
        lambda encoder: encoder.profile_encoder_cache(["input"], BUDGET),
        lambda encoder: encoder.profile_encoder_cache(dummy_mm_inputs=["input"], budget=BUDGET),
    ],
)
def test_the_encoders_budget_is_the_one_that_model_runner_v2_profiles(vllm, profile):
    worker = load_v2(vllm, profile)
    assert worker.determine_available_memory() == (["input"], BUDGET)
    budget, capacity = encoder_and_capacity(worker)
    assert budget["notes"] == []
    assert {name: budget["encoder"][name] for name in budget["encoder"] if name.startswith("max")} == {
        "max_tokens_per_item": {"image": 1024},
        "max_items_per_prompt": {"image": 4},
        "max_items_per_batch": {"image": 1},
    }
    assert (budget["encoder"]["compute_budget"], budget["encoder"]["embed_width"], capacity) == (1024, 2048, 1024)


def test_without_a_profile_the_encoders_budget_is_not_known(vllm):
    """The scheduler's configuration has a number too, which may be less than the cache's."""
    worker = load_v2(vllm, profile=lambda _: 7)
    assert worker.determine_available_memory() == 7
    budget, capacity = encoder_and_capacity(worker)
    assert (budget["encoder"]["cache_size"], budget["encoder"]["max_tokens_per_item"], capacity) == (None, None, None)
    assert [note["name"] for note in budget["notes"]] == ["encoder"]


def test_a_profile_of_the_encoder_that_fails_leaves_its_budget(vllm):
    worker = load_v2(vllm, profile=lambda encoder: encoder.profile_encoder_cache(["input"], BUDGET))
    vars(worker)["model_runner"].model_state.encoder_runner.failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.determine_available_memory()
    assert encoder_and_capacity(worker)[1] == 1024


def test_a_budget_of_another_kind_costs_the_engine_nothing(vllm):
    """What cannot be read is not known."""

    class Odd:
        @property
        def encoder_compute_budget(self) -> int:
            raise RuntimeError("no budget")

    worker = load_v2(vllm, profile=lambda encoder: len(encoder.profile_encoder_cache("inputs", Odd())))
    assert worker.determine_available_memory() == 2
    assert encoder_and_capacity(worker)[1] is None
