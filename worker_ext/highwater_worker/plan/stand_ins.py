"""Stand-ins for compiled modules and operators that are absent, or that fail to load where there is no driver."""

from __future__ import annotations

import importlib
import re
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from highwater_worker.plan.told import PRETENDED, say

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
        is_whole = why == "absent" and "vllm" not in fullname
        if why:
            say(PRETENDED, f"{fullname.partition('.')[0] if is_whole else fullname} is a stand-in: {why}")
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
