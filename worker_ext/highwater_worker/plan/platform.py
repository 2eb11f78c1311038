"""The pretended platform: vLLM's own for the card, PyTorch's functions of it, and Triton's driver, of no card.

Compiled modules and operators that are absent, or that fail to load where there is no driver, have stand-ins.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from highwater_worker.plan import PRETENDED, say, versions
from highwater_worker.plan.cards import Card

_DEVICES = 1024  # more than any command line wants: vLLM refuses a world that is larger than the machine
_COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
_NOTHING = (
    *("synchronize", "empty_cache", "set_device", "set_device_index", "reset_peak_memory_stats", "set_rng_state"),
    *("set_stream", "init", "_lazy_init", "manual_seed_all", "manual_seed"),
)
_ZERO = ("max_memory_allocated", "memory_allocated", "memory_reserved", "max_memory_reserved", "current_device")
# The capability that vLLM's compiled predicates ask of a card (csrc: scaled_mm_entry.cu); 89 is 8.9.
_SINCE = {
    "cutlass_scaled_mm_supports_fp8": 89,
    "cutlass_scaled_mm_supports_block_fp8": 90,
    "cutlass_sparse_scaled_mm_supported": 90,
    "cutlass_scaled_mm_supports_fp4": 100,
    "mxfp4_experts_quant_supported": 100,
}
_SHARED_BYTES, _REGISTERS = 227 << 10, 1 << 16  # of a multiprocessor
COMPILED = (
    r"vllm\.(_[A-Za-z0-9_]*C(_stable_libtorch)?|cumem_allocator|vllm_flash_attn(\..*)?"
    r"|third_party\.flashmla\.flash_mla_interface)"
    r"|(flashinfer|deep_gemm|tilelang|cutlass|cuda|quack|humming|cutlass_library)(\..*)?"
)
"""vLLM's compiled modules, and the packages of an engine's image that need a card."""
NPU = r"|(torch_npu|acl|torchair|cloudpickle_npu|triton\.language\.extra\.cann|fla_npu)(\..*)?|vllm_ascend\..*_C"
_NO_PACKAGE = re.compile(r"vllm.*(_C(_stable_libtorch)?|cumem_allocator|flash_mla_interface)")
# Functions whose result has the shape of their first argument, or a number for each of its rows.
_SHAPED = {"apply_rotary_emb", "flash_attn_varlen_func"}
_ROWS = re.compile(r"(top_k_|top_p_)*sampling_from_(logits|probs)")


def pretend(card: Card) -> None:
    """Make this process believe that it has such cards; to be called before vLLM is imported."""
    sys.meta_path.insert(0, StandIns(COMPILED + NPU if card.is_npu else COMPILED))
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.Event = torch.Stream = anything("Event")
    _pretend_device(torch.accelerator, card)
    device, base, members = (_npu if card.is_npu else _cuda)(torch, card)
    members |= {"get_device_communicator_cls": _COMMUNICATOR, "get_device_total_memory": card.total_bytes}
    platform: Any = type("Pretended", (base,), {name: classmethod(_always(value)) for name, value in members.items()})
    platform.__getattr__ = lambda _self, name: None if name.startswith("__") else getattr(device, name, None)
    importlib.import_module("vllm.platforms")._current_platform = platform()  # type: ignore[attr-defined]
    versions.pretend_packages(_DEVICES)
    number = card.capability[0] * 10 + card.capability[1]
    can = {name: number >= least for name, least in _SINCE.items()}
    can["cutlass_group_gemm_supported"] = number in (90, 100)
    stand_in_for_operators(torch._ops._OpNamespace, can)
    if card.is_npu:
        platform.pre_register_and_update()
        importlib.import_module("vllm_ascend.utils").adapt_patch(is_global_patch=True)
    versions.patch_modules(anything)
    say(PRETENDED, f"the card: {card.name}{', without torch_npu' * card.is_npu}")


def pretend_memory(total_bytes: int, in_use_bytes: int) -> None:
    """Let the card have so much memory, of which others use some."""
    torch: Any = importlib.import_module("torch")
    for module in (torch.cuda, torch.accelerator, getattr(torch, "npu", torch.cuda)):
        module.mem_get_info = module.get_memory_info = _always((total_bytes - int(in_use_bytes), total_bytes))


def _always(value: object) -> Any:
    return lambda *_arguments, **_options: value


def _pretend_device(module: Any, card: Card, **more: object) -> None:
    """Let a module such as torch.cuda answer for such cards, and let nothing of it reach a driver."""
    known = {"is_available": True, "device_count": _DEVICES, "current_device_index": 0, "get_device_name": card.name}
    known |= {"memory_stats": {}, "current_stream": anything("Stream")()}
    known |= {"default_stream": known["current_stream"], **dict.fromkeys(_NOTHING), **dict.fromkeys(_ZERO, 0), **more}
    for name, value in known.items():
        setattr(module, name, _always(value))
    module.Stream, module.Event, module.stream = anything("Stream"), anything("Event"), anything("stream")


def _cuda(torch: Any, card: Card) -> tuple[Any, Any, dict[str, Any]]:
    properties = SimpleNamespace(
        name=card.name, major=card.capability[0], minor=card.capability[1], gcnArchName="", warp_size=32,
        total_memory=card.total_bytes, multi_processor_count=card.processors, is_integrated=False,
        shared_memory_per_block_optin=_SHARED_BYTES, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=_REGISTERS, L2_cache_size=50 << 20,
    )  # fmt: skip
    known = {"get_device_capability": card.capability, "get_device_properties": properties, "graph_pool_handle": (0, 0)}
    _pretend_device(torch.cuda, card, **known, get_rng_state=torch.zeros(16, dtype=torch.uint8))
    torch.version.cuda = torch.version.cuda or "12.9"
    with suppress(ImportError):  # without Triton vLLM has stand-ins of its own
        # A target: modules of kernels ask Triton for it when they are imported.
        number = card.capability[0] * 10 + card.capability[1]
        target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", number, 32)
        sizes = {"max_shared_mem": _SHARED_BYTES, "multiprocessor_count": card.processors, "max_num_regs": _REGISTERS}
        driver = anything("Driver")()
        driver.get_current_target, driver.is_active = _always(target), _always(value=True)
        driver.get_current_device = driver.get_current_stream = _always(0)
        driver.get_device_capability = _always(card.capability)
        driver.utils = SimpleNamespace(get_device_properties=_always({**sizes, "warpSize": 32}))
        importlib.import_module("triton.runtime").driver.set_active(driver)
    capability = importlib.import_module("vllm.platforms.interface").DeviceCapability(*card.capability)
    silent = ("log_warnings", "import_kernels", "get_device_numa_node", "get_all_device_numa_nodes")
    members = {"get_device_capability": capability, "get_device_name": card.name, "get_device_uuid": "GPU-0"}
    members |= {"device_count": _DEVICES, "num_compute_units": card.processors, "get_current_memory_usage": 0.0}
    members |= {"is_arch_support_pdl": card.capability >= (9, 0), "is_fully_connected": True}
    members |= {"is_integrated_gpu": False, **dict.fromkeys(silent)}
    return torch.cuda, importlib.import_module("vllm.platforms.cuda").CudaPlatformBase, members


def _npu(torch: Any, card: Card) -> tuple[Any, Any, dict[str, Any]]:
    os.environ["VLLM_PLUGINS"] = ""  # its plugin would look for an NPU
    torch.utils.rename_privateuse1_backend("npu")
    npu: Any = ModuleType("torch.npu")
    npu.__getattr__ = lambda name: anything(name) if not name.startswith("__") else getattr(object, name)
    _pretend_device(npu, card)
    torch.npu = sys.modules["torch.npu"] = npu
    torch.Tensor.npu = lambda self, *_: self.to("meta")
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = npu.Stream, npu.Event, npu.stream
    importlib.import_module("vllm.platforms")
    return npu, importlib.import_module("vllm_ascend.platform").NPUPlatform, {}


# --- stand-ins ---


class _AnyClass(type):
    """A class that has every class attribute, so that it can be named in annotations and tables."""

    def __getattr__(cls, name: str) -> Any:
        return _member(name)

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __iter__(cls) -> Any:  # else it would be tried item by item, without an end
        return iter(())

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__


def anything(name: str) -> Any:
    """Return what can be held, called, entered, subclassed and used as a decorator."""
    members = {
        "__init__": lambda *_arguments, **_options: None,
        "__call__": lambda self, *given, **_options: given[0] if given and callable(given[0]) else self,
        "__getattr__": lambda _self, other: _member(other),
        "__enter__": lambda self: self,
        "__exit__": lambda *_: None,
    }
    return _AnyClass(name, (), members)


def _member(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if _ROWS.fullmatch(name):
        return lambda first, *_arguments, **_options: first.new_empty(first.shape[:1]).int()
    if name in _SHAPED:
        return lambda *given, q=None, **_options: (given[0] if given else q).new_empty((given[0] if given else q).shape)
    return anything(name)


class StandIns(MetaPathFinder, Loader):
    """Looks for the modules of a pattern first: the real ones where they can be imported, and stands in where not."""

    def __init__(self, pattern: str) -> None:
        self._names = re.compile(pattern)
        self._found: dict[str, ModuleSpec | None] = {}  # None: being looked for

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002 - importlib's
        if not self._names.fullmatch(fullname) or fullname in self._found:
            return self._found.get(fullname)
        self._found[fullname], why = None, "absent"
        spec = ModuleSpec(fullname, self, is_package=not _NO_PACKAGE.fullmatch(fullname))
        try:
            module = importlib.import_module(fullname)
            if getattr(module, "__file__", None):  # else a folder without a module in it
                spec, why = ModuleSpec(fullname, self, loader_state=(module, module.__spec__)), ""
        except Exception as error:  # noqa: BLE001 - whatever a library without its driver raises
            if not isinstance(error, ModuleNotFoundError) or not fullname.startswith(error.name or fullname):
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        is_package = why == "absent" and "vllm" not in fullname
        if why:
            say(PRETENDED, f"{fullname.partition('.')[0] if is_package else fullname} is a stand-in: {why}")
        self._found[fullname] = spec
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return spec.loader_state[0] if spec.loader_state else None

    def exec_module(self, module: ModuleType) -> None:
        if (state := getattr(module.__spec__, "loader_state", None)) is not None:
            module.__spec__ = state[1]
        else:
            module.__dict__.setdefault("__getattr__", _member)


class _MissingOperator:
    """An operator of the card's build. It may be called: what it would write into holds nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_arguments: object, **_options: object) -> int | None:
        if not self._name.startswith("get_"):
            return None
        say(PRETENDED, f"the operator {self._name} answered 0")
        return 0


def stand_in_for_operators(namespace: Any, predicates: dict[str, bool]) -> None:
    """Let torch.ops find operators that are not compiled; `predicates` are those that say what a card can do."""
    look_up = namespace.__getattr__

    def operator(self: Any, name: str) -> Any:
        if name in predicates:
            return lambda *_: predicates[name]
        try:
            return look_up(self, name)
        except AttributeError:
            if name.startswith("__") or not re.match(r"_[A-Za-z0-9_]*C(_|$)", self.name):
                raise
            return _MissingOperator(name)

    namespace.__getattr__ = operator
