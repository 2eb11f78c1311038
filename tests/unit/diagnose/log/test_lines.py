"""The engine's log: its end, the known messages in it, and nothing else of it."""

from __future__ import annotations

import os

import pytest

from highwater.diagnose.log.messages import KNOWN, merged
from highwater.diagnose.log.reader import TAIL_BYTES, read_tail
from highwater.diagnose.log.record import MAX_LINE_LENGTH
from highwater.process.untrusted import plain
from tests.unit.diagnose.log.prefixes import match

# As engines write them, wherever it was possible with what stands around them.
LINES = {
    "npu_workspace_out_of_memory": (
        "RuntimeError: NPU out of memory. NPUWorkspaceAllocator tried to allocate 180.00 MiB (NPU 1; 60.96 GiB total "
        "capacity; 86.81 MiB free)"
    ),
    "npu_out_of_memory": "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.96 GiB total)",
    "cuda_out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.",
    "memory_allocation_failure_el0004": "[ERROR] TBE: Memory_Allocation_Failure(EL0004): Failed to allocate memory.",
    "runtime_result_207001": "alloc device memory failed, runtime result = 207001[FUNC:ReportCallError]",
    "device_lost_507010": "RuntimeError: npuSynchronizeDevice:../torch_npu/csrc/core/npu/NPUStream.cpp:748 NPU "
    "function error: AclrtSynchronizeDeviceWithTimeout, error code is 507010",
    "pta_memory_error": "[ERROR] 2026-11-21-14:22:33 (PID:4242, Device:1, RankID:1) ERR00006 PTA memory error",
    "kv_cache_does_not_fit": (
        "ValueError: To serve at least one request with the models's max seq len (131072), (7.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (5.26 GiB)."
    ),
    "mm_cache_drift": "AssertionError: Expected a cached item for mm_hash='0e41b7d7a0aea479'",
    "encoder_cache_miss": "AssertionError: Encoder cache miss for 0e41b7d7a0aea479.",
    "broadcast_block_wait": (
        "(EngineCore_DP0 pid=9) INFO [shm_broadcast.py:466] No available shared memory broadcast block found in 60 "
        "seconds. This typically happens when some processes are hanging"
    ),
    "worker_died": "ERROR [multiproc_executor.py:231] Worker proc VllmWorker-0 died unexpectedly, shutting down.",
    "engine_core_failed": "EngineCore encountered a fatal error.",
    "engine_dead": "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "sampler_warm_up_out_of_memory": (
        "(VllmWorker rank=7 pid=10948) ERROR 03-16 06:12:38 [multiproc_executor.py:375] RuntimeError: CUDA out of "
        "memory occurred when warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs` or "
        "`gpu_memory_utilization` when initializing the engine."
    ),
    "library_out_of_memory": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "npu_host_memory_exhausted": (
        "torch.OutOfMemoryError: allocate_host_memory_slowpath:../torch_npu/csrc/core/npu/CachingHostAllocator.cpp:252 "
        "NPU function error: aclrtMallocHostWithCfg, error code is 207001"
    ),
    "npu_device_memory_exhausted": (
        "[PID: 542] 2026-01-16-04:52:41.266.655 Resource_Error_Insufficient_Device_Memory(EL0019): Failed to allocate "
        "2097152 bytes of device memory."
    ),
    "hccl_resource_exhausted": (
        "(Worker_TP3 pid=2322) ERROR 11-04 09:44:06 [multiproc_executor.py:824] RuntimeError: EI0007: [PID: 2322] "
        "2026-11-04-09:44:05.909.517 Failed to allocate resource[qp] with info [aicpu rank:7,localUserrank:7,"
        "localIpAddr: 10.1.0.8,deviceLogicId:3,send_cq_depth:32768]. Reason: Memory resources are exhausted."
    ),
    "npu_resources_insufficient": (
        "(EngineCore_0 pid=519998) ERROR 08-05 11:23:25 [core.py:632] EL0006: [PID: 519998] "
        "2025-08-05-11:23:25.691.093 The resources are insufficient."
    ),
    "npu_allocation_failed": (
        "(EngineCore_0 pid=519998) ERROR 08-05 11:23:25 [core.py:632] [Error]: Failed to apply for memory."
    ),
    "library_failed": "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "device_memory_retried": "(EngineCore pid=9) WARNING 11-28 01:02:03 [tuner.py:5] CUDA OOM, trying smaller",
    "hccl_buffer_out_of_memory": "[ERROR] HCCL(9,python): [Init][CCLBuffer]alloc device memory failed",
    "device_open_failed_507033": "open device 2 failed, runtime result = 507033.[FUNC:ReportCallError]",
    "device_not_free_at_start": (
        "(EngineCore_DP0 pid=9) ERROR 10-20 03:20:50 [core.py:718] ValueError: Free memory on device (20.1/23.6 GiB) "
        "on startup is less than desired GPU memory utilization (0.9, 21.2 GiB)."
    ),
    "memory_changed_while_profiling": (
        "AssertionError: Error in memory profiling. Initial free memory 60.1 GiB, current free memory 61.2 GiB."
    ),
    "no_room_for_kv_cache": (
        "(EngineCore_DP0 pid=1102) ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine."
    ),
    "killed_for_host_memory": "Memory cgroup out of memory: Killed process 412 (VLLM::EngineCor) total-vm:1kB",
    "bus_error": "Fatal Python error: Bus error",
    "worker_call_timed_out": "(EngineCore pid=9) ERROR [core.py:720] TimeoutError: RPC call to sample_tokens timed out",
    "collective_timed_out": (
        "(Worker_TP2 pid=577) [rank2]:[E1128 02:25:07.780240321 ProcessGroupNCCL.cpp:683] [Rank 2] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=88121, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600031"
    ),
    "engine_core_died": (
        "ERROR 01-16 17:16:49 [core_client.py:605] Engine core proc EngineCore_DP0 died unexpectedly, shutting down "
        "client."
    ),
    "server_process_died": ("RuntimeError: Process ApiServer_0 (PID: 412) died with exit code -9"),
    "configuration_refused": "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
    "engine_start_failed": (
        "(APIServer pid=963) RuntimeError: Engine core initialization failed. See root cause above."
    ),
}
LINES |= {
    "sleep_mode_out_of_memory": "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163",
    "kernel_out_of_memory": "RuntimeError: Triton Error [CUDA]: out of memory",
    "runtime_out_of_resources": (
        ":0:rocdevice.cpp            :2984: 841 us: [pid:1 tid:0x7f02] Callback: Queue 0x7f02 aborting with error : "
        "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources. Code: 0x1008"
    ),
    "external_weights_exceed_share": (
        "ValueError: Externally held weights on device cuda:0 (60.0/79.25 GiB) exceed the desired share"
    ),
    "ray_killed_for_host_memory": (
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
    ),
    "host_allocation_failed": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 42949672960 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "cpu_share_too_small": (
        "ValueError: The worker already uses 12.5 GiB (model weights and runtime), more than the 9.4 GiB of CPU memory "
        "reserved for it on node 0"
    ),
    "shm_too_small": (
        "RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in /dev/shm: 16384 MiB "
        "required, 7800 MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host)."
    ),
    "no_space_left": "OSError: [Errno 28] No space left on device: '/root/.cache/vllm/x'",
    "triton_missing": "ValueError: Model Runner V2 requires Triton.",
    "workers_failed": "RuntimeError: One or more workers failed",
    "wake_up_failed": "(EngineCore pid=418) ERROR 09-02 00:55:35 [core.py:1210] Invocation of wake_up method failed",
    "mm_cache_miss_retried": (
        "(EngineCore pid=9) WARNING 09-02 00:55:35 [core.py:2012] Multi-modal cache miss for request cmpl-1 "
        "(mm_hashes=['a']): P0/P1 cache drift; returning a retryable response"
    ),
    "stacks_dumped": (
        "(EngineCore pid=9) INFO 09-02 00:55:35 [watch_dog.py:96] [Watchdog]Dumped stack to /var/log/a.log due to quiet"
    ),
}
# Other forms of the same messages, as people have reported them.
OTHER_FORMS = {
    "OutOfMemoryError('CUDA out of memory. Tried to allocate 138.00 MiB. GPU 0 has": "cuda_out_of_memory",
    "ERROR 03-05 07:15:39 engine.py:387] NPU out of memory. Tried to allocate 22.00 MiB": "npu_out_of_memory",
    "RuntimeError: CUDA driver error: out of memory": "cuda_out_of_memory",
    "RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62": "sleep_mode_out_of_memory",
    "RuntimeError: aclrtMallocPhysical failed with acl error code: 207001(OOM: Out of Memory, allocation failed)": (
        "sleep_mode_out_of_memory"
    ),
    "RuntimeError: Triton Error [HIP]:  Code: 2, Messsage: out of memory": "kernel_out_of_memory",
    "RuntimeError: Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)": (
        "runtime_out_of_resources"
    ),
    "RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)": (
        "runtime_out_of_resources"
    ),
    "RuntimeError: level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)": (
        "host_allocation_failed"
    ),
    "RuntimeError: [enforce fail at alloc_cpu.cpp:83] data. DefaultCPUAllocator: not enough memory: you tried to": (
        "host_allocation_failed"
    ),
    "RuntimeError: unable to mmap 53687091200 bytes from file </m.safetensors>: Cannot allocate memory (12)": (
        "host_allocation_failed"
    ),
    "MemoryError": "host_allocation_failed",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 2.00 GiB for an array": "host_allocation_failed",
    "terminate called after throwing an instance of 'std::bad_alloc'": "host_allocation_failed",
    "  what():  std::bad_alloc": "host_allocation_failed",
    "OSError: [Errno 12] Cannot allocate memory": "host_allocation_failed",
    "OSError(12, 'Cannot allocate memory')": "host_allocation_failed",
    "ValueError: Available memory on node 0 (3/62 GiB) on kv cache allocation is less than requested memory for kv": (
        "cpu_share_too_small"
    ),
    "OSError: [Errno 28] No space left on device: '/psm_89c2b1'": "shm_too_small",
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)": (
        "shm_too_small"
    ),
    "RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)": "shm_too_small",
    "OSError: [Errno 28] No space left on device": "no_space_left",
    "safetensors_rust.SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)": (
        "no_space_left"
    ),
    "Memory on the node (IP: 10.45.33.204, ID: 3486) where the task (actor ID: 46c8) was running was 1GB / 2GB": (
        "ray_killed_for_host_memory"
    ),
    "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory.": (
        "ray_killed_for_host_memory"
    ),
    "(raylet) [2025-04-02 15:02:00,117 E 7 7] (raylet) node_manager.cc:3069: 1 Workers (tasks / actors) killed due to "
    "memory pressure (OOM), 0 Workers crashed due to other reasons": "ray_killed_for_host_memory",
    "h:392:494 [2] enqueue.cc:43 NCCL WARN HIP failure 'out of memory'": "library_out_of_memory",
    "h:392:494 [2] alloc.h:43 NCCL WARN Failed to CUDA calloc async 16777216 bytes": "library_out_of_memory",
    "torch.AcceleratorError: HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling": "library_out_of_memory",
    "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token.": (
        "no_room_for_kv_cache"
    ),
    "ValueError: Free memory on device cuda:0 (10.0/79.25 GiB) on startup is less than the engine's budget after "
    "excluding external process's weights (0.9, 3.0 GiB).": "device_not_free_at_start",
    "RuntimeError: Encoder cache miss for 0e41b7d7a0aea479.": "encoder_cache_miss",
    "RuntimeError: cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY": "library_out_of_memory",
    "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)": "cuda_out_of_memory",
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.": "cuda_out_of_memory",
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB.": "cuda_out_of_memory",
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB": "cuda_out_of_memory",
    "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 2 'out of memory'": (
        "library_out_of_memory"
    ),
    "RuntimeError: Engine core process EngineCore_DP0 died unexpectedly.": "engine_core_died",
    "[ERROR] aclrtMalloc failed, ret:207001": "runtime_result_207001",
    "        rtMalloc execute failed, reason=[driver error:out of memory][FUNC:FuncErrorReason]": (
        "runtime_result_207001"
    ),
    "        rtsMallocHost execution failed, reason=driver error:out of memory": "npu_host_memory_exhausted",
    "[PID: 9208] 2026-01-19-05:52:40.055.233 Allocation_Failure(EI0007): Failed to allocate resource[qp] with": (
        "hccl_resource_exhausted"
    ),
    "        Possible Cause: Failed to allocate memory or the Notify register due to resource insufficiency.": (
        "hccl_resource_exhausted"
    ),
    "Resource_Error(EI0007): Failed to allocate resource DeviceMemory with info size:209715200 Byte. Reason": (
        "npu_device_memory_exhausted"
    ),
    "EI0011: Failed to allocate [262144] bytes of NPU memory.": "npu_device_memory_exhausted",
    "RuntimeError: capture_begin:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:156 NPU function error: "
    "c10_npu::acl::AclmdlRICaptureBegin(capture_stream_, capture_mode), error code is 207005": (
        "npu_resources_insufficient"
    ),
    "(EngineCore pid=9) INFO 10-22 09:43:49 [gpu_worker.py:360] Available KV cache memory: -0.87 GiB": (
        "no_room_for_kv_cache"
    ),
    "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV "
    "cache (7344).": "kv_cache_does_not_fit",
    "ERROR 04-30 10:20:36 [core.py:396] EngineCore failed to start.": "engine_start_failed",
    "(EngineCore_DP0 pid=559) ERROR 10-20 03:20:50 [core.py:720] EngineCore encountered a fatal error.": (
        "engine_core_failed"
    ),
    "MultiModalCacheMissError: Expected a cached item for mm_hash='abc'": "mm_cache_drift",
    "bash: line 1:   412 Killed                  vllm serve": "killed_for_host_memory",
    # As the chart has vLLM log.
    "ERROR 11-22 05:32:10 [EngineCore_DP0 pid=7] [core.py:1510] EngineCore failed to start.": "engine_start_failed",
    "ERROR 11-22 05:32:10 [EngineCore pid=7] [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly": (
        "worker_died"
    ),
    "ERROR 11-22 05:32:10 [MainProcess pid=1] [core_client.py:600] Engine core proc EngineCore_DP0 died unexpectedly": (
        "engine_core_died"
    ),
    "ERROR 06-29 19:20:00 [core.py:515] Exception: WorkerProc initialization failed due to an exception in a": (
        "engine_start_failed"
    ),
    # vLLM 0.12.0's own file, colours and all.
    "\x1b[0;36m(APIServer pid=20084)\x1b[0;0m ERROR 11-22 05:34:05 [core_client.py:600] Engine core proc "
    "EngineCore_DP0 died unexpectedly, shutting down client.": "engine_core_died",
    "\x1b[0;36m(EngineCore_DP0 pid=7)\x1b[0;0m \x1b[31mERROR\x1b[0m 11-22 05:34:05 [core.py:720] RuntimeError: CUDA "
    "driver error: out of memory": "cuda_out_of_memory",
    "2026-11-21T14:22:33.123456789+00:00 stderr F RuntimeError: NPU out of memory. Tried": "npu_out_of_memory",
    '{"log":"AssertionError: Encoder cache miss for 0e41.\\n","stream":"stderr"}': "encoder_cache_miss",
}
HARMLESS = [
    "",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "(raylet) node_manager.cc:3069: 0 Workers (tasks / actors) killed due to memory pressure (OOM), 2 Workers crashed",
    "KeyError: 'std::bad_alloc'",
    "INFO 11-21 14:22:33 Engine 000: Avg prompt throughput: 207001.0 tokens/s",
    "INFO: 127.0.0.1:52000 - POST /v1/chat/completions HTTP/1.1 200 OK",
    "Graph capturing finished in 12 secs, took 0.30 GiB",
    "model_0004 loaded",
    # What a client wrote into a prompt is nobody's evidence.
    "INFO [logger.py:39] Received request cmpl-1: prompt: 'NPU out of memory', params: None",
    "INFO [logger.py:38] Request cmpl-1 details: prompt: 'Encoder cache miss CUDA out of memory', prompt_token_ids: []",
    "INFO [async_llm.py:1] Added request chatcmpl-1: CUDA out of memory",
    "INFO 10-22 09:43:49 [async_llm.py:1] CUDA out of memory",
    '(APIServer pid=1) INFO:     10.0.0.1:1 - "POST /v1/completions?x=cuda%20out%20of%20memory HTTP/1.1" 200 OK',
    "ERROR [serving_chat.py:1] Error in preprocessing prompt inputs: ValueError: my prompt says CUDA out of memory",
    "(APIServer pid=1) ERROR 10-22 09:43:49 [serving_chat.py:200] RuntimeError: CUDA out of memory",
    "(APIServer pid=1) NPU out of memory",
    "INFO:     NPU out of memory",
    "\x1b[0;36m(APIServer pid=1)\x1b[0;0m ERROR 11-22 05:34:05 [serving_chat.py:2] RuntimeError: CUDA out of memory",
    "ValueError: CUDA out of memory is what the client wrote",
    "the words NPU out of memory within a line",
    "ERROR 11-22 05:32:10 [MainProcess pid=1] [serving_chat.py:2] RuntimeError: CUDA out of memory",
    "ERROR 11-22 05:32:10 [ApiServer_0 pid=1] [serving_chat.py:2] RuntimeError: CUDA out of memory",
    "(EngineCore pid=9) INFO 10-22 09:43:49 [gpu_worker.py:360] Available KV cache memory: 44.30 GiB",
]


@pytest.mark.parametrize("name", [known.name for known in KNOWN])
def test_every_known_message_is_found(name):
    (message,) = match([*HARMLESS, LINES[name], *HARMLESS])
    assert (message.name, message.count, message.lines) == (name, 1, (LINES[name],))
    assert message.meaning.endswith(".")
    assert message.advice or message.name == "engine_start_failed"


@pytest.mark.parametrize("line", OTHER_FORMS)
def test_a_message_is_found_in_its_other_forms(line):
    assert [message.name for message in match([line])] == [OTHER_FORMS[line]]


def test_advice_begins_with_the_setting_that_the_message_names():
    """Who reads `try lowering max_num_seqs` must find it first."""
    (message,) = match([LINES["sampler_warm_up_out_of_memory"]])
    assert message.advice[0].setting == "--max-num-seqs"


@pytest.mark.parametrize("line", HARMLESS)
def test_other_lines_are_nobodys(line):
    assert match([line]) == ()


def test_case_does_not_matter():
    assert [message.name for message in match([LINES["encoder_cache_miss"].upper()])] == ["encoder_cache_miss"]


def test_causes_come_before_consequences():
    assert [message.name for message in match(reversed(LINES.values()))] == [known.name for known in KNOWN]


def test_of_many_lines_the_first_ones_and_the_last_are_kept():
    (message,) = match([f"Encoder cache miss for {number}" for number in range(50)])
    assert message.count == 50
    assert [line.split()[-1] for line in message.lines] == ["0", "1", "49"]


def test_a_line_is_cut_and_made_plain():
    (message,) = match(["Encoder cache miss \x1b[31m\x1b[0m \x07\x00\u202e<script>" + "y" * 5000])
    (line,) = message.lines
    assert line.startswith("Encoder cache miss")
    assert len(line) <= MAX_LINE_LENGTH + 1
    assert line.isprintable()


def test_messages_that_came_later_are_added():
    before, after = match([LINES["engine_dead"]]), match([LINES["engine_dead"]] * 3 + [LINES["npu_out_of_memory"]])
    both = merged(before, after)
    assert [(message.name, message.count) for message in both] == [("npu_out_of_memory", 1), ("engine_dead", 1)]


# --- the file ---


def test_the_end_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "engine.log"
    log.write_bytes(b"NPU out of memory\n" + b"a line\n" * 400_000 + LINES["engine_dead"].encode() + b"\n")
    lines, problem, is_cut = read_tail(log)
    assert (problem, is_cut) == (None, True)
    assert set(lines) == {"a line", LINES["engine_dead"]}
    assert sum(len(line) + 1 for line in lines) <= TAIL_BYTES + 1
    assert [message.name for message in match(lines)] == ["engine_dead"]


def test_a_short_log_is_read_whole(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("Encoder cache miss")
    assert read_tail(log) == (["Encoder cache miss"], None, False)


def test_one_endless_line_is_a_line(tmp_path):
    log = tmp_path / "engine.log"
    log.write_bytes(b"\r50%" * 1_000_000)
    assert read_tail(log) == ([], None, True)


def test_bytes_that_are_no_text_are_read_all_the_same(tmp_path):
    log = tmp_path / "engine.log"
    log.write_bytes(bytes(range(256)) + b"\nEncoder cache miss \xff\xfe\n")
    (message,) = match(read_tail(log)[0])
    assert message.lines[0].isprintable()


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real.log").write_text("Encoder cache miss")
    (tmp_path / "engine.log").symlink_to("real.log")
    assert read_tail(tmp_path / "engine.log") == (["Encoder cache miss"], None, False)


def test_what_cannot_be_read_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, why in [("none", "no such file"), ("pipe", "is not a file"), (".", "is not a file")]:
        lines, problem, _ = read_tail(tmp_path / name)
        assert lines == []
        assert why in problem
        assert problem.startswith("engine_log: ")


# --- plain text ---


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"),
        ("a\nb\rc\td\x00e", "a b c d e"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "]0;title after"),
        ("\u202eright to left\u2066", "right to left"),
        ("half \ud800 of a letter", "half   of a letter"),
        ("日本語 é", "日本語 é"),
        ("x" * 600, "x" * 499 + "…"),
        ("x" * 100_000, "x" * 499 + "…"),
        ("\x1b[31m" * 1000 + "deep", "…"),
    ],
)
def test_foreign_text_becomes_one_plain_line(given, shown):
    """Of bounded length, with nothing in it that a terminal would obey."""
    assert plain(given) == shown


CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    "lines",
    [
        [
            "2026-11-21T14:32:33.1Z stdout P INFO 11-21 14:32:33 [logger.py:39] Received request: prompt: 'aaa",
            f"2026-11-21T14:32:33.1Z stdout P {CUDA}",
            f"2026-11-21T14:32:33.1Z stdout F {CUDA}",
        ],
        [
            f'{{"log":"Received request: prompt: {"a" * 16384}","stream":"stderr","time":"2026-11-21T14:32:33.1Z"}}',
            f'{{"log":"{CUDA}\\n","stream":"stderr","time":"2026-11-21T14:32:33.1Z"}}',
        ],
    ],
    ids=["containerd", "docker"],
)
def test_a_piece_of_a_line_that_was_cut_is_no_message(tmp_path, lines):
    """Container runtimes cut at 16 KiB: what stands at a piece's beginning may be a client's prompt."""
    log = tmp_path / "engine.log"
    log.write_text("\n".join(lines) + "\n")
    assert match(read_tail(log)[0]) == ()
    whole = lines[-1]  # the same line, with none before it
    log.write_text(whole + "\n")
    assert [message.name for message in match(read_tail(log)[0])] == ["cuda_out_of_memory"]


def test_a_collectors_json_need_not_have_the_lines_end(tmp_path):
    """Only Docker's long ones are pieces."""
    log = tmp_path / "engine.log"
    log.write_text(f'{{"log":"a","stream":"stderr"}}\n{{"log":"{CUDA}","stream":"stderr"}}\n')
    assert [message.name for message in match(read_tail(log)[0])] == ["cuda_out_of_memory"]
