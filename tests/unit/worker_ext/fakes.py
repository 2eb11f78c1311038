"""Stand-ins for tensors, torch and a vLLM worker: the attributes that the extension reads, and no more."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

from highwater_worker import MemoryExtension
from highwater_worker.devices import HostMemory

T = TypeVar("T")
HOST = HostMemory(
    rss_bytes=1, cgroup_used_bytes=0, cgroup_limit_bytes=None, node_total_bytes=1 << 40, node_available_bytes=1 << 30
)
"""A host with room enough."""
_ADDRESSES = itertools.count(1 << 20, 1 << 20)
# What every answer of a worker begins with (worker_ext/README.md).
HEAD = {
    *("schema", "ok", "op", "rank", "local_rank", "dp_rank", "tp_rank", "pp_rank", "host", "pid", "pid_started"),
    "taken_at",
}
STATS = {
    "allocated_bytes.all.current": 600,
    "reserved_bytes.all.current": 900,
    "allocated_bytes.all.peak": 700,
    "inactive_split_bytes.all.current": 40,
    "active.all.current": 7,
    "inactive_split.all.current": 2,
    "segment.all.current": 4,
    "num_alloc_retries": 3,
    "num_ooms": 1,
}


class FakeStorage:
    def __init__(self, nbytes: int, pointer: int | None = None) -> None:
        self._nbytes = nbytes
        self._pointer = next(_ADDRESSES) if pointer is None else pointer

    def nbytes(self) -> int:
        return self._nbytes

    def data_ptr(self) -> int:
        return self._pointer


class FakeTensor:
    """Metadata, and a `content` in place of elements; a copy has the same content on a storage of its own.

    As with torch's, nothing stands in its `__dict__` but what somebody hung on it.
    """

    __slots__ = (
        *("__dict__", "__weakref__", "_storage"),
        *("content", "copy_", "device", "dtype", "is_pinned", "layout", "shape"),
    )

    def __init__(
        self, *shape: int, device: str = "npu", storage: FakeStorage | None = None, content: Any = None
    ) -> None:
        self.shape = shape
        self.device = SimpleNamespace(type=device)
        self.dtype = "torch.bfloat16"
        self.layout = "torch.strided"
        self.content = content
        self.is_pinned = False
        self._storage = storage or FakeStorage(self.numel() * self.element_size())

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return 2

    def untyped_storage(self) -> FakeStorage:
        return self._storage


class FakeModel:
    """A model of `layers` tensors of 100 bytes, with one buffer of 20."""

    def __init__(self, layers: int = 3, device: str = "npu") -> None:
        self._parameters = [FakeTensor(50, device=device) for _ in range(layers)]
        self._buffers = [FakeTensor(10, device=device)]
        self.layers: list[Any] = []

    def parameters(self) -> Any:
        return iter(self._parameters)

    def buffers(self) -> Any:
        return iter(self._buffers)

    def modules(self) -> Any:
        return iter([self, *self.layers])


class FakeDeviceModule(ModuleType):
    """`torch.npu` or `torch.cuda`: it keeps every call, and refuses one without a device index."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"torch.{kind}")
        self.calls: list[tuple[str, Any]] = []
        self.free = 1_000
        self.stats: dict[str, object] = dict(STATS)
        self.pin_error: Exception | None = None
        self.copy_errors: list[Exception | None] = []
        """What the next copies raise, one each; None lets one pass."""
        self.snapshot: object = {"segments": [], "device_traces": []}
        self.segments: list[dict[str, object]] = []
        self.looks = 0
        self.properties: dict[str, object] = {"total_memory": 5_000, "uuid": f"{kind}-0001"}
        self.history: list[dict[str, object]] = []
        self.memory = SimpleNamespace(
            _snapshot=self._take_snapshot, _record_memory_history=lambda **given: self.history.append(given)
        )

    def _called(self, name: str, index: object) -> None:
        assert isinstance(index, int), f"{name} without a device index makes a context on device 0"
        self.calls.append((name, index))

    def mem_get_info(self, index: object = None) -> tuple[int, int]:
        self._called("mem_get_info", index)
        return self.free, 5_000

    def memory_stats(self, index: object = None) -> dict[str, object]:
        self._called("memory_stats", index)
        return self.stats

    def get_device_name(self, index: object = None) -> str:
        self._called("get_device_name", index)
        return "Fake 9000"

    def get_device_properties(self, index: object = None) -> SimpleNamespace:
        self._called("get_device_properties", index)
        return SimpleNamespace(**self.properties)

    def set_device(self, index: object = None) -> None:
        self._called("set_device", index)

    def synchronize(self, index: object = None) -> None:
        self._called("synchronize", index)

    def memory_snapshot(self) -> object:
        self.looks += 1
        return self.segments

    def Event(self) -> SimpleNamespace:  # noqa: N802 - torch's
        return SimpleNamespace(record=lambda: None, query=lambda: True)

    def _take_snapshot(self, device: object = None) -> object:
        self._called("_snapshot", device)
        return self.snapshot

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache", None))
        self.free += 250
        self.stats["reserved_bytes.all.current"] = 650


class FakeTorch(ModuleType):
    """It keeps every copy as (from, to) in the device module's calls, and fails as it is told to."""

    Tensor = FakeTensor
    strided = "torch.strided"
    uint8 = "torch.uint8"

    def __init__(self, kind: str) -> None:
        super().__init__("torch")
        self.__version__ = "2.9.0+fake"
        self.device_module = FakeDeviceModule(kind)
        setattr(self, kind, self.device_module)
        self.inference_mode = nullcontext
        self._C = SimpleNamespace(**{f"_{kind}_isHistoryEnabled": lambda: False})

    def empty_like(self, tensor: FakeTensor, device: Any, pin_memory: bool = False) -> FakeTensor:
        if pin_memory and self.device_module.pin_error:
            raise self.device_module.pin_error
        made = FakeTensor(*tensor.shape)
        made.device = SimpleNamespace(type="cpu") if device == "cpu" else device
        made.is_pinned = pin_memory
        made.copy_ = lambda source, non_blocking: self._copy(source, made, non_blocking)
        return made

    def empty(self, nbytes: int, dtype: str, device: str) -> FakeTensor:
        assert dtype == self.uint8
        kind, _, index = device.partition(":")
        assert index.isdecimal(), f"a block on {device} may be on another device than the worker's"
        made = FakeTensor(0, device=kind, storage=FakeStorage(nbytes))
        self.device_module.calls.append(("block", nbytes))
        return made

    def _copy(self, source: FakeTensor, made: FakeTensor, non_blocking: bool) -> FakeTensor:
        assert not non_blocking or source.is_pinned, "only what is pinned is read while Python goes on"
        module = self.device_module
        module.calls.append(("copy", (source.device.type, made.device.type)))
        error = module.copy_errors.pop(0) if module.copy_errors else None
        if error is not None:
            raise error
        made.content = source.content
        del made.copy_
        return made


class FakeWorkerBase:
    """Only a base that the extension can be added to: a class that has `object` alone cannot take another."""


def fake_worker(kind: str = "npu", index: int | None = 1, **attributes: Any) -> Any:
    """Return a worker as vLLM makes one: the extension added to the bases of a class that knows nothing of it."""

    class FakeWorker(FakeWorkerBase):
        pass

    FakeWorker.__bases__ += (MemoryExtension,)
    worker = FakeWorker()
    parallel = SimpleNamespace(
        data_parallel_rank=0,
        data_parallel_index=2,
        data_parallel_size=3,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        prefill_context_parallel_size=1,
    )
    values = {
        "rank": 3,
        "local_rank": 1,
        "device": SimpleNamespace(type=kind, index=index),
        "model_runner": fake_runner(kind),
        "parallel_config": parallel,
        "vllm_config": SimpleNamespace(
            parallel_config=parallel,
            cache_config=SimpleNamespace(gpu_memory_utilization=0.9, kv_cache_memory_bytes=None),
            scheduler_config=SimpleNamespace(encoder_cache_size=8192),
            compilation_config=SimpleNamespace(static_forward_context={}),
        ),
        "requested_memory": 4_500.0,
        "init_snapshot": SimpleNamespace(free_memory=4_800),
    }
    vars(worker).update(values | attributes)
    return worker


class FakeRunner(SimpleNamespace):
    """A model runner; a class of its own, for weak references."""


def fake_runner(kind: str = "npu", **attributes: Any) -> FakeRunner:
    """Return a model runner V1 with an empty encoder cache and two layers of KV cache."""
    values = {
        "encoder_cache": {},
        "supports_mm_inputs": True,
        "mm_budget": SimpleNamespace(encoder_cache_size=16384),
        "requests": {},
        "kv_caches": [FakeTensor(400, device=kind), FakeTensor(400, device=kind)],
        "model_memory_usage": 12_345,
    }
    return FakeRunner(**values | attributes)


@contextmanager
def imported_as(name: str, module: ModuleType) -> Iterator[None]:
    """Let `import name` find this module. `mock.patch.dict` would take out what is imported meanwhile, too."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


def ask(worker: Any, op: str, payload: str = "{}") -> dict[str, Any]:
    """Return a good answer; fail on any other. A move has time enough on any machine, unless the payload says else."""
    if op in {"trim", "restore"}:
        payload = json.dumps({"max_seconds": 60} | json.loads(payload))
    answer = json.loads(worker.highwater_rpc(op, payload))
    assert answer["ok"], answer
    return answer


def refusal(worker: Any, op: str, payload: str = "{}") -> str:
    """Return the reason for which an operation is refused; fail on any other answer."""
    answer = json.loads(worker.highwater_rpc(op, payload))
    assert answer.get("error", {}).get("code") == "refused", answer
    return answer["error"]["message"]


def in_a_thread(work: Callable[[], T]) -> T:
    """Return what another thread than the main one gets."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def wanted(*names: str) -> list[SimpleNamespace]:
    """Return what a request wants of the encoder: images of ten tokens each, one after the other."""
    return [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=10 * place, length=10))
        for place, name in enumerate(names)
    ]
