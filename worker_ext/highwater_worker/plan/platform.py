"""The pretended platform: vLLM's own CUDA platform, PyTorch's CUDA functions and Triton's driver, of one card."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from highwater_worker.plan import versions
from highwater_worker.plan.cards import Card
from highwater_worker.plan.stand_ins import COMPILED, StandIns, anything, stand_in_for_operators
from highwater_worker.plan.told import PRETENDED, say

DEVICES = 1024
"""More cards than any command line wants: vLLM refuses a world that is larger than the machine."""
BASE_COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
_NOTHING = (
    *("synchronize", "empty_cache", "set_device", "set_device_index", "reset_peak_memory_stats", "set_rng_state"),
    *("set_stream", "init", "_lazy_init"),
)
_BLACKWELL, _SHARED_BYTES = 100, 227 << 10
_ZERO = ("max_memory_allocated", "memory_allocated", "memory_reserved", "max_memory_reserved")


def answering(value: object) -> Any:
    """Return a function that takes anything and returns this."""
    return lambda *_arguments, **_options: value


def pretend_device(module: Any, card: Card, **more: object) -> None:
    """Let a module such as torch.cuda answer for such cards, and let nothing of it reach a driver."""
    answers: dict[str, Any] = {
        **dict.fromkeys(_NOTHING),
        **dict.fromkeys(_ZERO, 0),
        "is_available": True,
        "device_count": DEVICES,
        "current_device": 0,
        "current_device_index": 0,
        "get_device_name": card.name,
        "mem_get_info": (card.total_bytes, card.total_bytes),
        "current_stream": anything("Stream")(),
        "default_stream": anything("Stream")(),
        **more,
    }
    for name, value in answers.items():
        setattr(module, name, answering(value))
    module.Stream, module.Event, module.stream = anything("Stream"), anything("Event"), anything("stream")


def pretend_cuda(card: Card) -> None:
    """Make this process believe that it has such cards; to be called before vLLM is imported."""
    sys.meta_path.insert(0, StandIns(COMPILED))
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    properties = SimpleNamespace(name=card.name, major=card.capability[0], minor=card.capability[1], gcnArchName="")
    properties.total_memory, properties.multi_processor_count = card.total_bytes, card.processors
    properties.is_integrated, properties.warp_size, properties.L2_cache_size = False, 32, 50 << 20
    properties.shared_memory_per_block_optin = _SHARED_BYTES
    properties.max_threads_per_multi_processor, properties.regs_per_multiprocessor = 2048, 1 << 16
    known = {"get_device_capability": card.capability, "get_device_properties": properties}
    random = torch.zeros(16, dtype=torch.uint8)
    pretend_device(torch.cuda, card, **known, graph_pool_handle=(0, 0), get_rng_state=random)
    pretend_device(torch.accelerator, card)
    torch.version.cuda = torch.version.cuda or "12.9"
    with suppress(ImportError):  # without Triton vLLM has stand-ins of its own
        _pretend_triton(card)
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    fixed = {
        "get_device_capability": importlib.import_module("vllm.platforms.interface").DeviceCapability(*card.capability),
        "get_device_name": card.name,
        "get_device_uuid": "GPU-0",
        "get_device_total_memory": card.total_bytes,
        "is_fully_connected": True,
        "device_count": DEVICES,
        "num_compute_units": card.processors,
        "is_arch_support_pdl": card.capability >= (9, 0),
        "get_current_memory_usage": 0.0,
        "is_integrated_gpu": False,
        "get_device_communicator_cls": BASE_COMMUNICATOR,
        **dict.fromkeys(("log_warnings", "import_kernels", "get_device_numa_node", "get_all_device_numa_nodes")),
    }
    members: dict[str, Any] = {name: classmethod(answering(value)) for name, value in fixed.items()}
    cuda.CudaPlatform = type("PretendedCuda", (cuda.CudaPlatformBase,), {**members, "__getattr__": of(torch.cuda)})
    platforms._current_platform = cuda.CudaPlatform()
    versions.pretend_packages(DEVICES)
    stand_in_for_operators(torch._ops._OpNamespace, _what_the_card_can(card.capability[0] * 10 + card.capability[1]))
    versions.patch_modules()
    say(PRETENDED, f"the card: {card.name}")


def of(module: Any) -> Any:
    """Return a `__getattr__` that looks into a module; what that has not is None."""

    def look(_self: object, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(module, name, None)

    return look


def _pretend_triton(card: Card) -> None:
    """Name a target: modules of kernels ask Triton when they are imported."""
    number = card.capability[0] * 10 + card.capability[1]
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", number, 32)
    sizes = {
        "max_shared_mem": 227 << 10,
        "multiprocessor_count": card.processors,
        "max_num_regs": 65536,
        "warpSize": 32,
    }
    driver = anything("Driver")()
    driver.get_current_target, driver.is_active = answering(target), answering(value=True)
    driver.get_current_device = driver.get_current_stream = answering(0)
    driver.get_device_capability = answering(card.capability)
    driver.utils = SimpleNamespace(get_device_properties=answering({**sizes, "warpSize": 32}))
    importlib.import_module("triton.runtime").driver.set_active(driver)


def _what_the_card_can(number: int) -> dict[str, bool]:
    """Return the answers of vLLM's compiled predicates (csrc: scaled_mm_entry.cu); 89 is a capability of 8.9."""
    since = {"scaled_mm_supports_fp8": 89, "scaled_mm_supports_block_fp8": 90, "sparse_scaled_mm_supported": 90}
    found = {f"cutlass_{name}": number >= least for name, least in {**since, "scaled_mm_supports_fp4": 100}.items()}
    exact = number in (90, 100)
    return {**found, "cutlass_group_gemm_supported": exact, "mxfp4_experts_quant_supported": number >= _BLACKWELL}
