"""Whatever is asked, and whatever breaks inside, one JSON object comes back."""

from __future__ import annotations

import gc
import json
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from highwater_worker import MemoryExtension, extension
from highwater_worker.operations import OPERATIONS, Operation
from highwater_worker.recorder import end_recorder
from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import HEAD, fake_runner, fake_worker

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
# What vLLM's worker classes, wrapper and instances have had, over all versions and platforms (vllm/v1/worker).
TAKEN = """
    add_lora adjust_rank annotate_profile apply_model check_health checkpoint_prepare checkpoint_restore
    compile_or_warm_up_model compute_weight_checksums determine_available_memory determine_num_available_blocks discard
    elastic_ep_execute execute_dummy_batch execute_method execute_model finish_weight_update get_cache_block_size_bytes
    get_compilation_match_table get_draft_model get_encoder_timing_stats get_kv_cache_spec
    get_kv_connector_handshake_metadata get_model get_model_inspection get_simple_cpu_offload_num_cpu_blocks
    get_supported_kv_cache_layouts get_supported_pooling_tasks get_supported_tasks handle_ft_command init_device
    init_weight_transfer_engine init_worker initialize_cache initialize_from_config list_loras load_model
    log_memory_stats pin_lora profile profile_prefill_latency randomize_dummy_inputs reinitialize_distributed
    release_late_interaction_query_cache reload_weights remove_lora reset_encoder_cache reset_mm_cache reset_weights
    sample_tokens save_sharded_state save_tensorized_model set_kv_cache_layout shutdown shutdown_weight_transfer_engine
    sleep sleep_mode_backend start_draft_weight_update start_weight_update start_worker_execution_loop
    supports_draft_weight_updates synchronize_device take_draft_token_ids uninstall_static_kernel update_config
    update_environment_variables update_max_model_len update_weights vocab_size wake_up xpu_get_mem_info
    available_kv_cache_memory_bytes cache_config cache_dtype compilation_config cudagraph_memory_estimate
    current_platform device device_config distributed_init_method elastic_ep_executor global_rank init_gpu_memory
    init_npu_memory init_snapshot is_driver_worker kv_cache_spec kv_transfer_config load_config local_omp_cpuid
    local_rank lora_config mm_receiver_cache model_config model_runner non_torch_memory npugraph_memory_bytes
    observability_config original_parallel_config parallel_config peak_activation_memory profile_dir profiler
    profiler_config rank requested_cpu_memory requested_memory rpc_rank scheduler_config sleep_wakeup_manager
    speculative_config torch_allocated torch_reserved total_consumed use_spmd use_v2_model_runner vllm_config
    weight_transfer_engine worker worker_sentinel xlite_runner init_worker_extension
    """.split()  # noqa: SIM905 - a list of 120 quoted names would take a page


class Broken:
    """Every attribute raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, name: str) -> object:
        raise self._error


def parsed(text: object) -> dict[str, object]:
    assert isinstance(text, str)
    assert text.isascii()
    answer = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(answer) >= HEAD
    return answer


def test_the_class_has_two_public_names():
    """The call, and a hook of newer engines. vLLM asserts that a worker has none of them: each may fail a start."""
    names = [name for name in dir(MemoryExtension) if not name.startswith("__")]
    assert [name for name in names if not name.startswith("_highwater_")] == [
        "destroy_worker_extension",
        "highwater_rpc",
    ]


def test_no_name_is_one_of_a_worker():
    ours = {name for name in dir(MemoryExtension) if not name.startswith("__")} | {"_highwater_state"}
    assert ours.isdisjoint(TAKEN)


def test_the_class_is_plain():
    """It is appended to the bases of a live class: its layout and metaclass must be object's."""
    assert type(MemoryExtension) is type
    assert MemoryExtension.__bases__ == (object,)
    assert "__init__" not in vars(MemoryExtension)
    assert "__slots__" not in vars(MemoryExtension)


def test_a_subclass_of_two_extensions_can_be_loaded():
    """vLLM takes one extension class; one that inherits from ours and another is injected as a whole."""

    class Other:
        def other_rpc(self) -> str:
            return "other"

    class Both(MemoryExtension, Other):
        pass

    worker = fake_worker()
    bases = type(worker).__bases__
    type(worker).__bases__ = (*bases[:-1], Both)
    assert worker.other_rpc() == "other"
    assert parsed(worker.highwater_rpc("nothing"))["rank"] == 3


def test_an_unknown_op_names_the_known_ones():
    """A newer sidecar beside an older worker gets a reason, not an exception."""
    error = parsed(fake_worker().highwater_rpc("shrink"))["error"]
    assert error == {
        "code": "unknown_op",
        "message": "op 'shrink' is unknown; known: budget, encoder_cache, memory, record_stacks, "
        "recorder_start, recorder_stop, release, restore, snapshot, trim",
    }


@pytest.mark.parametrize("arguments", [((), {}), ((None,), {}), (("budget", "{}", 3), {}), (("budget",), {"color": 1})])
def test_a_call_that_does_not_fit_is_answered(arguments):
    """A TypeError at the call itself would desynchronise the ranks like any other."""
    positional, named = arguments
    assert parsed(fake_worker().highwater_rpc(*positional, **named))["ok"] is False


class OddError(BaseException):
    """Nobody's: neither an ordinary exception nor a call to end."""


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError(), GeneratorExit(), OddError()])
@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_whatever_is_raised_inside_is_answered(op, error):
    worker = fake_worker(device=Broken(error), model_runner=Broken(error), vllm_config=Broken(error))
    parsed(worker.highwater_rpc(op))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("op", ["memory", "release", "restore", "snapshot", "trim"])
def test_a_call_to_end_the_process_passes(op, error):
    """No operation raises it: whoever does wants the process to end, and may not ask twice."""
    worker = fake_worker(device=Broken(error), model_runner=Broken(error), vllm_config=Broken(error))
    with pytest.raises(type(error)):
        worker.highwater_rpc(op, '{"dry_run": true}' if op == "snapshot" else "{}")


def test_sigterm_in_an_operation_ends_the_worker(monkeypatch):
    """vLLM's handler raises for the first signal only (v1/executor/multiproc_executor.py): it must not be lost."""
    asked = []

    def handler(*_: object) -> None:
        if not asked:
            asked.append(True)
            raise SystemExit

    def busy(*_: object) -> dict[str, object]:
        signal.raise_signal(signal.SIGTERM)
        return {}

    monkeypatch.setitem(OPERATIONS, "budget", Operation(busy))
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit):
            fake_worker().highwater_rpc("budget")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_worker_that_tells_nothing_still_answers():
    class Bare(MemoryExtension):
        pass

    answer = parsed(Bare().highwater_rpc("memory"))
    assert answer["ok"] is True
    assert (answer["rank"], answer["weights_bytes"], answer["total_bytes"]) == (None, None, None)
    assert {"device", "weights_bytes", "total_bytes"} <= {note["name"] for note in answer["notes"]}


@pytest.mark.parametrize("error", [RuntimeError("no"), OddError()])
def test_the_last_guard_is_a_constant(monkeypatch, error):
    """When even the error's answer cannot be made, what remains is a text that cannot fail."""

    monkeypatch.setattr(extension, "_text", raising(error))
    assert fake_worker().highwater_rpc("budget") == extension.UNANSWERABLE
    assert parsed(extension.UNANSWERABLE)["error"]["code"] == "failed"


def test_not_a_number_never_leaves(monkeypatch):
    """NaN is no JSON: vLLM's server would answer 500 in our place."""
    monkeypatch.setattr("time.time", lambda: float("nan"))
    assert parsed(fake_worker().highwater_rpc("budget"))["op"] is None


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_no_operation_overwrites_the_head(op, torch_device, tmp_path):
    torch_device("npu")
    worker, given = fake_worker(), {"directory": str(tmp_path), "instance": "0123456789abcdef", "name": "one"}
    body = OPERATIONS[op].run(
        worker, {key: given.get(key, field.default) for key, field in OPERATIONS[op].fields.items()}
    )
    assert not HEAD & set(body)
    assert end_recorder(worker)


@settings(max_examples=3 * settings.default.max_examples, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    op=st.sampled_from([*OPERATIONS, "", "budget "]) | ANYTHING,
    payload=ANYTHING | ANYTHING.map(json.dumps),
)
def test_any_op_and_payload_get_one_ascii_object(op, payload):
    runner = fake_runner("cpu", encoder_cache={"\ud800": None}, model_memory_usage=float("nan"), get_model=lambda: 1)
    answer = parsed(fake_worker("cpu", None, model_runner=runner).highwater_rpc(op, payload))
    assert answer["ok"] is True or answer["error"]["code"] in {"unknown_op", "bad_payload", "unavailable"}


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_does_not_run_by_itself_meanwhile(enabled, monkeypatch):
    """A full collection would stop the engine for 100 ms; afterwards it is as the engine had it."""
    seen = []

    def look(*_: object) -> dict[str, object]:
        seen.append(gc.isenabled())
        raise OddError

    monkeypatch.setitem(OPERATIONS, "budget", Operation(look))
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        fake_worker().highwater_rpc("budget")
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_an_exception_that_cannot_be_printed_is_answered(monkeypatch):
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise OddError

    broken = Operation(raising(Unprintable))
    monkeypatch.setitem(OPERATIONS, "budget", broken)
    error = parsed(fake_worker().highwater_rpc("budget"))["error"]
    assert error == {"code": "failed", "message": "Unprintable"}
