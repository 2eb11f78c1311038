"""Messages that engines are known to write: how each begins, what it means, what to change. Pure.

Each message names the versions that write it, and the file where one was read. Advice begins with the setting that the
message itself names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from highwater.findings import advice as known
from highwater.findings.finding import Advice

# How Python and torch write an exception's name before its text, as a line of a traceback or as a repr in a log line.
_MEMORY_ERROR = r"(?:(?:[\w.]*OutOfMemoryError|RuntimeError|torch\.AcceleratorError)(?:: |\(['\"]))?"
_VALUE_ERROR = r"(?:ValueError(?:: |\(['\"]))?"
# CANN's runtime writes its lines by itself, in forms of its own: the text stands somewhere near the beginning.
_CANN = r".{0,160}?"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMessage:
    """A message that engines are known to write.

    Attributes:
        name: A word for programs.
        pattern: What the line begins with, once its logger's prefix is taken off; letters in any case.
        title: A clause that can stand within a sentence.
        meaning: In plain words.
        advice: What can be changed.
        source: The versions that write it, and where it was read.
        by_api_server: The API server writes it, too. Its other lines are never looked at: clients' words stand there.
        part: ``cause`` says why; ``end`` only that something has ended, or that a start has failed; ``wait`` may pass
            by itself.
        at_start: Only a start writes it, never an engine that was ready.
    """

    name: str
    pattern: str
    title: str
    meaning: str
    advice: tuple[Advice, ...]
    source: str
    by_api_server: bool = False
    part: Literal["cause", "end", "wait"] = "cause"
    at_start: bool = False

    def begins(self, message: str) -> re.Match[str] | None:
        """Return where the message fits at the beginning of a line without its prefix."""
        return re.match(self.pattern, message, re.IGNORECASE)


# Causes before consequences; a line belongs to the first that fits it.
KNOWN: Final[tuple[KnownMessage, ...]] = (
    KnownMessage(
        name="npu_workspace_out_of_memory",
        pattern=_MEMORY_ERROR + r"(?:NPU out of memory\. )?NPUWorkspaceAllocator tried to allocate",
        title="an operator's workspace found no room on the NPU",
        meaning=(
            "An operator needed scratch memory, and the device had none. Workspaces are not PyTorch's: they stand "
            "under non_torch. PyTorch's allocator can hold gigabytes meanwhile that no tensor uses: in the measured "
            "run 59.38 of 60.96 GiB were reserved, at a peak of 54.77 allocated, when 180 MiB were asked for."
        ),
        advice=(
            known.GPU_MEMORY_UTILIZATION,
            known.NPU_EXPANDABLE_SEGMENTS,
            known.RELEASE,
            known.POLICY_EARLIER,
        ),
        source="torch_npu 2.7 to 2.10, csrc/core/npu/NPUWorkspaceAllocator.cpp",
    ),
    KnownMessage(
        name="npu_out_of_memory",
        pattern=_MEMORY_ERROR + r"NPU out of memory",
        title="PyTorch found no room on the NPU",
        meaning=(
            "PyTorch's allocator asked the device for more and got none, also after it had given back what it held "
            "in vain. Before this error alloc_retries rises: that is the best early warning on the NPU."
        ),
        advice=(
            known.GPU_MEMORY_UTILIZATION,
            known.NPU_EXPANDABLE_SEGMENTS,
            known.LIMIT_MM_PER_PROMPT,
            known.MAX_NUM_BATCHED_TOKENS,
        ),
        source="torch_npu 2.7 to 2.10, csrc/core/npu/NPUCachingAllocator.cpp; vllm-ascend issue 19",
    ),
    KnownMessage(
        name="sampler_warm_up_out_of_memory",
        pattern=_MEMORY_ERROR + r"\w+ out of memory occurred when warming up (?:sampler|pooler)",
        title="the device was full when the sampler was warmed up",
        meaning=(
            "The engine had sized its KV cache, and warming up the sampler or pooler with --max-num-seqs requests then "
            "found no room. It stops a start."
        ),
        advice=(known.MAX_NUM_SEQS, known.GPU_MEMORY_UTILIZATION, known.OTHER_PROCESSES),
        source="vLLM 0.12 to 0.32, v1/worker/gpu_model_runner.py (0.12.0:4161, 0.32.0:5991); issues 14452 and 27508",
        at_start=True,
    ),
    KnownMessage(
        name="cuda_out_of_memory",
        pattern=_MEMORY_ERROR + r"(?:CUDA|HIP|XPU) (?:driver )?(?:error: )?out of memory",
        title="PyTorch found no room on the GPU",
        meaning=(
            "PyTorch's allocator asked the device for more and got none. The message says how much is reserved and "
            "not allocated: where that is much, it is fragmentation; where it is little, the device is full."
        ),
        advice=(
            known.GPU_MEMORY_UTILIZATION,
            known.CUDA_EXPANDABLE_SEGMENTS,
            known.LIMIT_MM_PER_PROMPT,
            known.MAX_NUM_BATCHED_TOKENS,
        ),
        source="PyTorch, c10/cuda/CUDACachingAllocator.cpp, also for ROCm and XPU; vLLM csrc/cumem_allocator.cpp",
    ),
    KnownMessage(
        name="library_out_of_memory",
        pattern=(
            _MEMORY_ERROR
            + r"(?:CUDA error: )?(?:CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
            + r"|.{0,200}?Cuda failure (?:2 )?'out of memory')"
        ),
        title="a library below PyTorch (cuBLAS, cuDNN, NCCL) found no room on the GPU",
        meaning=(
            "Libraries take their workspaces and buffers from the device itself, not from PyTorch's allocator. They "
            "find none where the allocator keeps what nobody uses, or where the share given to vLLM leaves nothing."
        ),
        advice=(known.GPU_MEMORY_UTILIZATION, known.RELEASE, known.OTHER_PROCESSES),
        source="NVIDIA's libraries",
    ),
    KnownMessage(
        name="hccl_buffer_out_of_memory",
        pattern=_CANN + r"\[CCLBuffer\]\s*alloc device memory failed",
        title="a collective's buffer found no room on the NPU",
        meaning=(
            "HCCL takes buffers of HCCL_BUFFSIZE for each communicator from the device itself, and there was no room."
        ),
        advice=(known.HCCL_BUFFSIZE, known.GPU_MEMORY_UTILIZATION, known.OTHER_PROCESSES),
        source="CANN's runtime, HCCL",
    ),
    KnownMessage(
        name="memory_allocation_failure_el0004",
        pattern=_CANN + r"\bEL0004\b",
        title="the NPU's runtime could not allocate (EL0004)",
        meaning=(
            "Memory_Allocation_Failure: the runtime below PyTorch could not get device memory. It comes with the "
            "message of the one who asked, and says the same."
        ),
        advice=(known.GPU_MEMORY_UTILIZATION, known.OTHER_PROCESSES, known.HCCL_BUFFSIZE),
        source="CANN's runtime, an error code",
    ),
    KnownMessage(
        name="runtime_result_207001",
        pattern=_CANN + r"(?:runtime result ?= ?|\bret ?[:=] ?|error code(?: is)?[ :=]{1,3})207001\b",
        title="the NPU's runtime could not allocate (207001)",
        meaning=(
            "The driver's own number for: no device memory. It comes with the message of the one who asked, and says "
            "the same."
        ),
        advice=(known.GPU_MEMORY_UTILIZATION, known.OTHER_PROCESSES, known.HCCL_BUFFSIZE),
        source="CANN's runtime, ACL_ERROR_RT_MEMORY_ALLOCATION",
    ),
    KnownMessage(
        name="device_open_failed_507033",
        pattern=_CANN + r"runtime result ?= ?507033\b",
        title="the NPU could not be opened (507033)",
        meaning=(
            "The runtime could not set up the device for this process. Seen right after memory had run out, and where "
            "another process still holds the device."
        ),
        advice=(known.OTHER_PROCESSES, known.RESTART),
        source="CANN's runtime, ACL_ERROR_RT_DEV_SETUP_ERROR",
    ),
    KnownMessage(
        name="pta_memory_error",
        pattern=_CANN + r"\bERR00006\b",
        title="torch_npu reports a memory error (ERR00006)",
        meaning="torch_npu's number for its memory errors. The line with `tried to allocate` says who asked for what.",
        advice=(known.GPU_MEMORY_UTILIZATION, known.NPU_EXPANDABLE_SEGMENTS),
        source="torch_npu 2.7 to 2.10, csrc/core/npu/NPUException.h",
    ),
    KnownMessage(
        name="device_not_free_at_start",
        pattern=_VALUE_ERROR + r"Free memory on device .{0,80}? is less than desired GPU memory utilization",
        title="the engine refused to start: less of the device is free than its share",
        meaning=(
            "Something else holds the device: another process, or one of an earlier start that has not ended. The "
            "message names what is free and what was wanted."
        ),
        advice=(known.OTHER_PROCESSES, known.GPU_MEMORY_UTILIZATION),
        source="vLLM 0.12 to 0.32, v1/worker/gpu_worker.py (0.12.0:243), later v1/worker/utils.py (0.32.0:766)",
        at_start=True,
    ),
    KnownMessage(
        name="memory_changed_while_profiling",
        pattern=r"(?:AssertionError(?:: |\(['\"]))?Error in memory profiling\.",
        title="the engine refused to start: another process gave device memory back while it was profiling",
        meaning=(
            "vLLM measures what it needs by what is free before and after. More was free afterwards, so the measure is "
            "worth nothing: another process on the device was ending meanwhile."
        ),
        advice=(known.OTHER_PROCESSES, known.RESTART),
        source="vLLM 0.12 to 0.32, v1/worker/gpu_worker.py (0.12.0:333, 0.32.0:720)",
        at_start=True,
    ),
    KnownMessage(
        name="no_room_for_kv_cache",
        pattern=_VALUE_ERROR + r"No available memory for the cache blocks|Available KV cache memory: -",
        title="the engine refused to start: nothing is left for the KV cache",
        meaning=(
            "Weights and what profiling found take all of the share that vLLM was given. A negative size of the KV "
            "cache in the log says by how much it is too small."
        ),
        advice=(known.MORE_FOR_THE_KV_CACHE, known.MAX_NUM_BATCHED_TOKENS, known.OTHER_PROCESSES),
        source="vLLM 0.12 to 0.32, v1/core/kv_cache_utils.py (0.12.0:687, 0.32.0:1011); vllm-ascend issue 9372",
        at_start=True,
    ),
    KnownMessage(
        name="kv_cache_does_not_fit",
        pattern=(
            _VALUE_ERROR
            + r"(?:To serve at least one request with the model.{0,200}? KV cache is needed, which is larger than"
            + r"|The model's max seq len \(\d+\) is larger than the maximum number of tokens that can be stored in KV)"
        ),
        title="the engine refused to start: one request of full length does not fit into the KV cache",
        meaning=(
            "What is left for the KV cache after weights and profiling is less than one request of --max-model-len "
            "needs. This stops a start; where it follows a death, look whether something else holds the device now."
        ),
        advice=(known.MAX_MODEL_LEN, known.OTHER_PROCESSES),
        source="vLLM 0.12 to 0.32, v1/core/kv_cache_utils.py (0.12.0:710, 0.32.0:1033); older ones as in issue 2418",
        at_start=True,
    ),
    KnownMessage(
        name="mm_cache_drift",
        pattern=r"(?:[\w.]*(?:AssertionError|MissError)(?:: |\(['\"]))?Expected a cached item for mm_hash",
        title="the processor caches of API server and engine had drifted apart",
        meaning=(
            "The API server believed an image to be in the engine's processor cache, and it was not. Up to vLLM 0.13 "
            "the thread that takes requests in dies of it: every request hangs for ever, /health stays 200. It "
            "follows a /reset_mm_cache under traffic, and has been seen without one."
        ),
        advice=(known.RESTART, known.NEVER_RESET_MM_CACHE, known.UPGRADE_MM_CACHE, known.MM_PROCESSOR_CACHE),
        source="vLLM 0.12 to 0.32, multimodal/cache.py (0.12.0:363), later multimodal/cache/base.py (0.32.0:428)",
    ),
    KnownMessage(
        name="encoder_cache_miss",
        pattern=r"(?:AssertionError(?:: |\(['\"]))?Encoder cache miss",
        title="a worker lacked an encoder output that the scheduler believed to be there",
        meaning=(
            "The scheduler and a worker disagreed about the encoder cache, and the engine ends. It happens at once "
            "when the workers' cache is cleared and the scheduler's is not."
        ),
        advice=(known.RESTART, known.NEVER_CLEAR_ONE_SIDE),
        source="vLLM 0.12 to 0.32, v1/worker/gpu_model_runner.py (0.12.0:2220, 0.32.0:3063)",
    ),
    KnownMessage(
        name="killed_for_host_memory",
        pattern=(
            r".{0,60}?(?:Memory cgroup out of memory|Out of memory): Killed process"
            r"|.{0,40}?\bKilled\s+(?:vllm|python)"
        ),
        title="the kernel killed a process because host memory had run out",
        meaning=(
            "Host memory, not the device's: the container's limit, or the machine's memory without one. A process that "
            "is killed so leaves no last words of its own."
        ),
        advice=(known.MEMORY_LIMIT, known.MM_PROCESSOR_CACHE, known.TRIM_HOST_BUDGET),
        source="Linux, mm/oom_kill.c; shells' own word for a child that was killed",
    ),
    KnownMessage(
        name="bus_error",
        pattern=r"Fatal Python error: Bus error|Bus error\b",
        title="a process was ended by a bus error: /dev/shm was full, most likely",
        meaning=(
            "A write into mapped memory found no page behind it. vLLM's processes share data through /dev/shm, whose "
            "size is 64 MiB in a container without another setting."
        ),
        advice=(known.SHM_SIZE,),
        source="CPython, Modules/faulthandler.c; shells",
    ),
    KnownMessage(
        name="broadcast_block_wait",
        pattern=r"No available (?:shared memory broadcast )?block found in",
        title="a process of the engine waited for another in vain",
        meaning=(
            "One process of the engine has something for the workers, and one of them does not take it: it hangs, is "
            "gone, or is in something very long, such as a compilation. Repeated, with no step in between, it is a "
            "hang; /health does not see it."
        ),
        advice=(known.LOOK_AT_RANKS, known.RESTART),
        source="vLLM 0.12 to 0.32, distributed/device_communicators/shm_broadcast.py (0.12.0:54, 0.32.0:109)",
        part="wait",
    ),
    KnownMessage(
        name="worker_call_timed_out",
        pattern=r"(?:TimeoutError(?:: |\(['\"]))?RPC call to \w+ timed out",
        title="a worker did not answer in time, and the engine ends",
        meaning=(
            "A step, or another call, took longer than vLLM waits for its workers: one of them hangs, or the call "
            "really is that long."
        ),
        advice=(known.LOOK_AT_RANKS, known.RESTART, known.VLLM_TIMEOUT),
        source="vLLM 0.12 to 0.32, v1/executor/multiproc_executor.py (0.12.0:342, 0.32.0:442)",
    ),
    KnownMessage(
        name="worker_died",
        pattern=r"Worker proc .{1,80}? died unexpectedly",
        title="a worker's process ended",
        meaning=(
            "A worker is gone, and the engine ends with it. Its own last words stand above this line; where there are "
            "none, look at host memory: what the kernel kills says nothing."
        ),
        advice=(known.WHO_KILLED, known.MEMORY_LIMIT),
        source="vLLM 0.12 to 0.32, v1/executor/multiproc_executor.py (0.12.0:234, 0.32.0:316)",
        part="end",
    ),
    KnownMessage(
        name="engine_core_died",
        pattern=r"(?:RuntimeError(?:: |\(['\"]))?Engine core proc(?:ess)? .{1,80}? died unexpectedly",
        title="the engine core's process ended",
        meaning=(
            "With one worker the engine core is the worker: the device's and the host's memory are both where to look. "
            "Its own last words stand above this line; where there are none, it was killed."
        ),
        advice=(known.WHO_KILLED, known.MEMORY_LIMIT),
        source="vLLM 0.12 to 0.32, v1/engine/core_client.py (0.12.0:601), later v1/utils.py (0.32.0:593)",
        by_api_server=True,
        part="end",
    ),
    KnownMessage(
        name="configuration_refused",
        pattern=(
            r"(?:pydantic\S{0,60}\.)?ValidationError: \d+ validation errors? for "
            r"(?:Attention|Cache|Compilation|Load|LoRA|Model|MultiModal|Parallel|Scheduler|Speculative|Vllm)Config\b"
        ),
        title="the engine refused its configuration",
        meaning="vLLM did not take its own command line; the lines below this one in the log name the option.",
        advice=(known.COMMAND_LINE,),
        source="vLLM 0.12 to 0.32, vllm/config, checked by pydantic",
        by_api_server=True,
        at_start=True,
    ),
    KnownMessage(
        name="server_process_died",
        pattern=r"(?:RuntimeError: )?Process .{1,60}? \(PID: \d+\) died with exit code",
        title="a process of the API server ended",
        meaning="With several API server processes the end of one ends the server. Its own last words stand above.",
        advice=(known.WHO_KILLED, known.MEMORY_LIMIT),
        source="vLLM 0.12 to 0.32, v1/utils.py (0.12.0:277, 0.32.0:588)",
        by_api_server=True,
        part="end",
    ),
    KnownMessage(
        name="engine_start_failed",
        pattern=(
            r"(?:RuntimeError(?:: |\(['\"]))?Engine core initialization failed"
            r"|EngineCore failed to start"
            r"|(?:Exception(?:: |\(['\"]))?WorkerProc (?:failed to start|initialization failed)"
        ),
        title="the engine did not start",
        meaning="A consequence: what stopped the start stands above it in the log.",
        advice=(known.RESTART,),
        source="vLLM 0.12 to 0.32, v1/engine/core.py (0.12.0:843, 0.32.0:1510), v1/engine/utils.py (0.32.0:1432)",
        by_api_server=True,
        at_start=True,
        part="end",
    ),
    KnownMessage(
        name="engine_dead",
        pattern=(
            r"(?:[\w.]*EngineDeadError(?:: |\(['\"]|$))|EngineCore encountered (?:an issue|a fatal error)"
            r"|AsyncLLM output_handler failed"
        ),
        title="the API server found its engine dead",
        meaning="A consequence, never a cause: what ended the engine stands above it in the log.",
        advice=(known.RESTART,),
        source="vLLM 0.12 to 0.32, v1/engine/exceptions.py (0.12.0:13, 0.32.0:16), v1/engine/core.py (0.32.0:1512)",
        by_api_server=True,
        part="end",
    ),
)

# Those that say that memory was short, whatever the readings say: one large piece fits between two of them.
OF_MEMORY: Final = frozenset(
    {
        "npu_workspace_out_of_memory",
        "npu_out_of_memory",
        "sampler_warm_up_out_of_memory",
        "cuda_out_of_memory",
        "library_out_of_memory",
        "hccl_buffer_out_of_memory",
        "memory_allocation_failure_el0004",
        "runtime_result_207001",
        "pta_memory_error",
        "device_not_free_at_start",
        "no_room_for_kv_cache",
        "kv_cache_does_not_fit",
        "killed_for_host_memory",
    }
)
