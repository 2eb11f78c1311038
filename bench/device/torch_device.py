"""The device under test, through PyTorch: cuda, npu or cpu by one interface, and what identifies it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from highwater_worker.devices import FAMILIES

MIB, GIB = 1024**2, 1024**3
TOOL_SECONDS = 30.0
NO_DEVICE = "needs an accelerator, and this run is on a CPU"
SIMULATED = "a simulated device computes at once, has no speed of its own and no graphs"
# torch is not where this file is checked: its values have no types here.
Tensor: TypeAlias = Any
Torch: TypeAlias = Any


@dataclass(frozen=True)
class Sizes:
    """The sizes of the steps' tensors: as an engine's on a device, small on a CPU."""

    hidden: int
    layers: int
    tokens: int
    """Of one image."""
    width: int
    images: int
    kv_bytes: int
    temporary_bytes: int
    operations: int
    """Under load."""
    pieces: int
    """Tensors that fragment the allocator, of 15 MiB on average."""


# An image of 4096 x 4096 for Qwen3-VL-8B: 16,384 tokens with the deepest features and three deepstack sets, 512 MiB.
ON_DEVICE = Sizes(4096, 8, 16384, 4096 * (1 + 3), 8, 2 * GIB, 256 * MIB, 200, 240)
ON_CPU = Sizes(256, 4, 256, 512 * (1 + 3), 8, 16 * MIB, 4 * MIB, 40, 60)
# Each pair of images has a segment of the allocator to itself, as large ones do.
ON_SIMULATED = Sizes(256, 4, 1024, 2048 * (1 + 3), 4, 256 * MIB, 16 * MIB, 40, 24)


class TorchDevice:
    """One device.

    Args:
        name: `cuda:0`, `npu:0` or `cpu`; None for the first accelerator that is there, else the CPU.

    Raises:
        RuntimeError: It is not there.
    """

    def __init__(self, name: str | None = None) -> None:
        self.torch: Torch = import_module("torch")
        if importlib.util.find_spec("torch_npu") is not None:
            import_module("torch_npu")  # it makes torch.npu
        self.device: Any = self.torch.device(name or self._present())
        if self.device.type not in ("cuda", "npu", "cpu"):
            raise RuntimeError(f"--device {name}: the steps know cuda, npu and cpu")
        if not self.is_cpu:
            self.device = self.torch.device(self.device.type, self.device.index or 0)
            self.module.set_device(self.device)

    @property
    def type(self) -> str:
        """`cuda`, `npu` or `cpu`."""
        return str(self.device.type)

    @property
    def index(self) -> int | None:
        """Its number; None for the CPU."""
        return None if self.is_cpu else int(self.device.index)

    @property
    def is_cpu(self) -> bool:
        """True where there is no device of its own."""
        return bool(self.device.type == "cpu")

    @cached_property
    def is_simulated(self) -> bool:
        """True where the vendor's library is the tests' stand-in (tests/fakes/cann/device.c)."""
        return self.type == "npu" and hasattr(ctypes.CDLL("libascendcl.so"), "highwater_simulates")

    @property
    def module(self) -> Any:  # noqa: ANN401 - torch.cuda or torch.npu
        """The interface of its type in torch."""
        return getattr(self.torch, self.type)

    @property
    def sizes(self) -> Sizes:
        """The sizes of tensors here."""
        if self.is_cpu:
            return ON_CPU
        return ON_SIMULATED if self.is_simulated else ON_DEVICE

    @property
    def dtype(self) -> Any:  # noqa: ANN401 - torch's
        """The numbers that a model has here: bfloat16 as in an engine; on a CPU those that every CPU computes alike."""
        return self.torch.float32 if self.is_cpu else self.torch.bfloat16

    def wait(self) -> None:
        """Wait for all streams."""
        if not self.is_cpu:
            self.module.synchronize(self.index)

    def space(self) -> tuple[int, int]:
        """Return free and total bytes as the driver sees them; on a CPU zeros, for there is no driver."""
        if self.is_cpu:
            return 0, 0
        free, total = self.module.mem_get_info(self.index)
        return int(free), int(total)

    def empty(self, nbytes: int) -> Tensor:
        """Return a tensor of so many bytes, not written."""
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)

    def randn(self, *shape: int) -> Tensor:
        """Return random numbers of the model's kind."""
        return self.torch.randn(*shape, device=self.device, dtype=self.dtype)

    @contextmanager
    def pins(self, pins: bool) -> Iterator[None]:
        """Let the worker package copy through pinned host memory, or not."""
        family = next(family for family in FAMILIES if family.type == self.type)
        before = family.pins_host_memory
        family.pins_host_memory = pins
        try:
            yield
        finally:
            family.pins_host_memory = before

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture a computation as a graph with a private pool; return its replay, and its output.

        On a simulated device there are no graphs: a private pool is filled as theirs is, and a replay computes anew.

        Args:
            compute: Reads tensors that stay where they are, and returns its output.
        """
        if self.is_simulated:
            pool = self.module.MemPool()
            with self.module.use_mem_pool(pool):
                computed = compute()

            def compute_anew(_: object = pool) -> None:
                with self.torch.inference_mode():
                    computed.copy_(compute())

            return compute_anew, computed
        name = "NPUGraph" if self.type == "npu" else "CUDAGraph"
        graph = getattr(self.module, name)()
        side = self.module.Stream()
        side.wait_stream(self.module.current_stream())
        with self.module.stream(side):
            compute()  # libraries make their handles and workspaces outside of the graph
        self.module.current_stream().wait_stream(side)
        self.wait()
        with self.module.graph(graph):
            output = compute()
        return graph.replay, output

    def keep_busy(self, rounds: int = 400) -> Tensor:
        """Put some 0.5 s of work on the current stream, and return its result, all ones, without waiting for it."""
        size = 128 if self.is_cpu or self.is_simulated else 8192
        value = self.torch.ones(size, size, device=self.device, dtype=self.dtype)
        for _ in range(rounds):
            value = value @ value / size
        return value

    def driver_allocation(self, nbytes: int) -> DriverAllocation:
        """Take memory from the driver itself, past torch's allocator, as libraries take their workspaces.

        Raises:
            RuntimeError: The driver has none left.
        """
        return DriverAllocation(self, nbytes)

    def description(self) -> dict[str, Any]:
        """Return the device, its driver and its memory, for the head of a result."""
        total = self.space()[1] if not self.is_cpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name = _cpu_model() if self.is_cpu else str(self.module.get_device_name(self.index))
        shown = {"type": self.type, "name": name, "total_bytes": total, "driver": self.driver()}
        return shown | {"name": f"{name}, simulated", "is_simulated": True} if self.is_simulated else shown

    def driver(self) -> str | None:
        """Return the driver's version as the vendor's own tool, or the kernel, shows it."""
        if self.type == "cuda":
            found = tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", str(self.index))
            return found or (_first_line(Path("/proc/driver/nvidia/version")) or None)
        if self.is_simulated:
            return "tests/fakes/cann"
        if self.type == "npu":
            info = _first_line(Path("/usr/local/Ascend/driver/version.info"))
            return info or tool("npu-smi", "-v")
        return None

    def versions(self) -> dict[str, str]:
        """Return the versions of Python, torch and what torch was built with."""
        found = {"python": platform.python_version(), "torch": str(self.torch.__version__)}
        if self.type == "cuda":
            found["cuda"] = str(self.torch.version.cuda or self.torch.version.hip)
        if self.type == "npu":
            found["torch_npu"] = str(import_module("torch_npu").__version__)
        return found

    def _present(self) -> str:
        kinds = (kind for kind in ("npu", "cuda") if hasattr(self.torch, kind))
        return next((kind for kind in kinds if getattr(self.torch, kind).is_available()), "cpu")


class DriverAllocation:
    """Memory of the driver's, until it is given back.

    Args:
        on: The device.
        nbytes: How much.

    Raises:
        RuntimeError: The driver has none left; the message is the one that a library would log.
    """

    def __init__(self, on: TorchDevice, nbytes: int) -> None:
        self._pointer = ctypes.c_void_p()
        self._is_npu = on.type == "npu"
        if self._is_npu:
            self._library = ctypes.CDLL("libascendcl.so")
            status = self._library.aclrtMalloc(ctypes.byref(self._pointer), ctypes.c_size_t(nbytes), 0)
        else:
            self._library = ctypes.CDLL("libcuda.so.1")
            status = self._library.cuMemAlloc_v2(ctypes.byref(self._pointer), ctypes.c_size_t(nbytes))
        if status != 0:
            said = f"runtime result = {status}" if self._is_npu else f"Cuda failure {status} 'out of memory'"
            raise RuntimeError(f"a workspace of {nbytes} bytes: {said}")

    def give_back(self) -> None:
        """Return it to the driver."""
        (self._library.aclrtFree if self._is_npu else self._library.cuMemFree_v2)(self._pointer)


def tool(*command: str) -> str | None:
    """Return what a vendor's tool prints, None where it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
