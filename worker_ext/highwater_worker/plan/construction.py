"""vLLM's own model runner, as any rank of any world, and its profiling run, on a device that holds nothing."""

from __future__ import annotations

import gc
import importlib
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from highwater_worker.plan import NOT_COUNTED, say, versions
from highwater_worker.plan.cards import ROUND_BYTES, CachingAllocator

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
tree_leaves: Any = importlib.import_module("torch.utils._pytree").tree_leaves
_FunctionMode: Any = importlib.import_module("torch.overrides").TorchFunctionMode
_DispatchMode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
_META, _HOST = torch.device("meta"), torch.device("cpu")
_CARDS = ("cuda", "npu")
_MAPPED_BYTES = 32 << 20


class OnMeta(_FunctionMode):  # type: ignore[misc] # torch is not there to be checked
    """Whatever is asked of the card is made on `meta`; large host buffers stay untouched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return args[0]
        if name == "is_pinned":
            return True
        if name in _CARDS and isinstance(args[0], torch.Tensor):
            return args[0].to(_META)
        if "device" in kwargs:
            kwargs["device"] = _META if isinstance(kwargs["device"], int) else _mapped(kwargs["device"])
        if func is torch.tensor:  # constants may be read back
            kwargs["device"] = _HOST
        if name in ("to", "new_empty", "new_zeros", "device"):
            args = tuple(map(_mapped, args))
        wanted = [str(one) for one in (*args[1:], kwargs.get("device"))] if name in ("to", "zeros") else []
        if name == "zeros" and wanted[-1] in ("None", "cpu"):
            return _zeroed(torch.empty(*args, **kwargs))
        is_meta = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if is_meta and (name == "cpu" or (name == "to" and "cpu" in wanted)):
            return _zeroed(torch.empty(args[0].shape, dtype=args[0].dtype, device=_HOST))
        return func(*args, **kwargs)


def _zeroed(made: Any) -> Any:
    """Return a tensor of zeros; one for which the C library always maps new pages has them, untouched."""
    return made if made.nbytes > _MAPPED_BYTES else made.zero_()


def _mapped(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _META if value.type in _CARDS else value
    return _META if isinstance(value, str) and value.partition(":")[0] in _CARDS else value


@contextmanager
def as_rank(config: Any, rank: int) -> Iterator[None]:
    """Let vLLM make its process groups on PyTorch's fake backend: one process is one rank of a replica's world."""
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    parallel, new_group = config.parallel_config, dist.new_group
    parallel.rank = rank
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    queue = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").MessageQueue
    queue.create_from_process_group = staticmethod(lambda *_, **__: None)
    state.in_the_same_node_as = lambda *_, **__: [True] * parallel.world_size
    at = rank + parallel.world_size * (getattr(parallel, "data_parallel_rank", 0) or 0)
    world = parallel.world_size * (parallel.data_parallel_size or 1)
    dist.init_process_group(backend="fake", store=store, rank=at, world_size=world)
    try:
        with importlib.import_module("vllm.config").set_current_vllm_config(config):
            yield
    finally:
        for end in (state.destroy_model_parallel, dist.destroy_process_group):
            with suppress(Exception):
                end()
        state._WORLD = None  # what vLLM asks before it makes a new one
        dist.new_group = new_group


def make_worker(config: Any, rank: int) -> Any:
    """Return vLLM's own worker with its model runner, before it loads."""
    loader = importlib.import_module("vllm.model_executor.model_loader.base_loader")
    initialize = loader.initialize_model

    def load_model(_loader: object, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        options = {"prefix": prefix} if prefix else {}
        with versions.default_dtype(model_config.dtype), _META:
            model = initialize(vllm_config=vllm_config, model_config=model_config, **options).eval()
            _after_loading(model, model_config.dtype)
        return model

    loader.BaseModelLoader.load_model = load_model
    config.load_config.load_format = "dummy"
    module, _, name = config.parallel_config.worker_cls.rpartition(".")
    worker = getattr(importlib.import_module(module), name)(
        vllm_config=config, local_rank=rank, rank=rank, distributed_init_method="env://", is_driver_worker=True
    )
    worker.init_device()
    return worker


def models_of(runner: Any) -> list[Any]:
    drafts = (getattr(getattr(runner, name, None), "model", None) for name in ("drafter", "speculator"))
    return [runner.model, *(one for one in drafts if isinstance(one, torch.nn.Module))]


def weights_of(models: list[Any]) -> tuple[int, int]:
    """Return the bytes of all tensors on the device, each storage once; and as the allocator counts them."""
    allocator = CachingAllocator()
    held: list[Any] = []
    for module in (module for model in models for module in model.modules()):
        parameters = (one for one in module._parameters.values() if one is not None)
        held += (one for one in parameters if not getattr(one, "_vllm_is_uva_offloaded", False))
        for one in (*module._buffers.values(), *vars(module).values()):
            held += one if isinstance(one, (tuple, list)) else (one,)  # adapters keep tuples of tensors
    storages = (one.untyped_storage() for one in held if isinstance(one, torch.Tensor) and one.is_meta)
    sizes = {storage._cdata: storage.nbytes() for storage in storages if storage.nbytes()}
    for size in sizes.values():
        allocator.allocate(size)
    return sum(sizes.values()), allocator.allocated_bytes


def _after_loading(model: Any, dtype: Any) -> None:
    """Let attention absorb weights, and weights be quantized that come unquantized.

    Other methods repack weights of about the same size, by kernels that are not there.
    """
    failed: set[str] = set()
    for module in list(model.modules()):
        method: Any = getattr(module, "quant_method", None)
        quantizes = getattr(method, "uses_meta_device", False)
        is_mla = hasattr(module, "kv_b_proj") and hasattr(module, "process_weights_after_loading")
        if not quantizes and not is_mla:
            continue
        before = dict(module._parameters), dict(module._buffers), dict(module._modules)
        try:
            if quantizes:
                method.process_weights_after_loading(module)
            else:
                module.process_weights_after_loading(dtype)
        except Exception as error:  # noqa: BLE001 - a kernel that is not there, or a value that is none
            module._parameters, module._buffers, module._modules = before
            failed.add(f"{type(module).__name__} ({type(error).__name__}: {str(error)[:80]})")
    for name in sorted(failed):
        say(NOT_COUNTED, f"what loading makes of the weights of {name}")


# --- the profiling run: the activation peak, where kernels do nothing ---


class Ledger(_DispatchMode):  # type: ignore[misc] # torch is not there to be checked
    """While it is entered, it counts the bytes of the storages on `meta` that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except NotImplementedError:
            if func._schema.returns:
                raise
            return None  # it writes into what it is given
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, -(-storage.nbytes() // ROUND_BYTES) * ROUND_BYTES
            if key not in self._known:
                self._known.add(key)
                self.held_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.held_bytes)
                weakref.finalize(storage, self._release, key, size).atexit = False
        return result

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held_bytes -= size


def build_eager(config: Any) -> None:
    """Let the model be built for running operator by operator, each with its kernel.

    Compiled code cannot run on `meta`. Neither the KV cache nor the weights depend on it.
    """
    compilation = config.compilation_config
    compilation.mode = 0 if compilation.mode is None else type(compilation.mode)(0)
    compilation.cudagraph_mode = type(compilation.cudagraph_mode)["NONE"]
    compilation.custom_ops = ["all"]


def activation_peak(runner: Any, models: list[Any], ledger: Ledger) -> int:
    """Return the bytes of the peak over what is held before. Raises RuntimeError: it ended before the model's end."""
    _no_kernels(models)
    gc.collect()
    held = ledger.peak_bytes = ledger.held_bytes
    with torch.inference_mode():
        try:
            runner.profile_run()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = f"{frames[-1].filename.rpartition('-packages/')[2]}:{frames[-1].lineno}"
            ended = f"{type(error).__name__}: {str(error)[:160]} ({where})"
            if not any("sampl" in frame.name for frame in frames):
                raise RuntimeError(f"the profiling run ended with {ended}") from error
            say(NOT_COUNTED, f"sampling after its first step, in the activation peak: it ended with {ended}")
    return ledger.peak_bytes - held


def _no_kernels(models: list[Any]) -> None:
    """Let Triton's kernels do nothing, and quantized layers return a result without one."""
    generator = torch.Generator
    torch.Generator = lambda *_arguments, **_options: generator()  # there is none on meta
    with suppress(ImportError):
        jit, tuner = (importlib.import_module(f"triton.runtime.{name}") for name in ("jit", "autotuner"))
        for kind in (jit.JITFunction, tuner.Autotuner, tuner.Heuristics):
            kind.run = lambda *_arguments, **_options: None
    for module in (module for model in models for module in model.modules()):
        method, width = getattr(module, "quant_method", None), getattr(module, "output_size_per_partition", None)
        width = getattr(module, "output_size", None) if width is None else width
        if isinstance(width, int) and method is not None and "Unquantized" not in type(method).__name__:
            module.quant_method = _Output(method, width)


class _Output:
    """A quantization method whose layer returns so many columns; what its kernel takes meanwhile is not seen."""

    def __init__(self, method: Any, width: int) -> None:
        self._method, self._width = method, width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def apply(self, _layer: object, x: Any, *_arguments: object, **_options: object) -> Any:
        say(NOT_COUNTED, "what the kernels of quantized layers take, in the activation peak")
        return x.new_empty((*x.shape[:-1], self._width))
