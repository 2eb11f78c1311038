"""The activation peak: vLLM's own profiling run on tensors that hold nothing, where kernels do nothing."""

from __future__ import annotations

import gc
import importlib
import traceback
import weakref
from contextlib import suppress
from typing import Any

from highwater_worker.plan.told import NOT_COUNTED, say

torch: Any = importlib.import_module("torch")
tree_leaves: Any = importlib.import_module("torch.utils._pytree").tree_leaves
_DispatchMode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
_ROUND = 512  # to which PyTorch's allocator rounds up


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
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: Any) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // _ROUND) * _ROUND
        if key not in self._known:
            self._known.add(key)
            self.held_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            weakref.finalize(storage, self._release, key, size).atexit = False

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
