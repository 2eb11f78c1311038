"""vllm-ascend's platform on an NPU that is not there, without torch_npu and CANN."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from highwater_worker.plan import versions
from highwater_worker.plan.cards import Card
from highwater_worker.plan.platform import BASE_COMMUNICATOR, DEVICES, answering, of, pretend_device
from highwater_worker.plan.stand_ins import COMPILED, NPU, StandIns, anything, stand_in_for_operators
from highwater_worker.plan.told import PRETENDED, say


def pretend_npu(card: Card) -> None:
    """Make this process believe that it has such NPUs; to be called before vLLM is imported."""
    os.environ["VLLM_PLUGINS"] = ""  # its plugin would look for an NPU
    sys.meta_path.insert(0, StandIns(COMPILED + NPU))
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.utils.rename_privateuse1_backend("npu")
    npu: Any = ModuleType("torch.npu")
    npu.__getattr__ = lambda name: anything(name) if not name.startswith("__") else getattr(object, name)
    pretend_device(npu, card)
    torch.npu = sys.modules["torch.npu"] = npu
    pretend_device(torch.accelerator, card)
    torch.Tensor.npu = lambda self, *_: self.to("meta")
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = npu.Stream, npu.Event, npu.stream
    platforms: Any = importlib.import_module("vllm.platforms")
    fixed = {"get_device_communicator_cls": BASE_COMMUNICATOR, "get_device_total_memory": card.total_bytes}
    members: dict[str, Any] = {name: classmethod(answering(value)) for name, value in fixed.items()}
    base = importlib.import_module("vllm_ascend.platform").NPUPlatform
    kind: Any = type("PretendedNpu", (base,), {**members, "__getattr__": of(npu)})
    platforms._current_platform = kind()
    versions.pretend_packages(DEVICES)
    stand_in_for_operators(torch._ops._OpNamespace, {})
    kind.pre_register_and_update()
    importlib.import_module("vllm_ascend.utils").adapt_patch(is_global_patch=True)
    versions.patch_modules()
    say(PRETENDED, f"the NPU: {card.name}, without torch_npu")
