# ruff: noqa: INP001 - Python imports this file by its folder; a package around it would never be found
"""Lets `import torchvision` succeed in the engine's processes, where torchvision and torch come from different builds.

pip installs torchvision as a CUDA build beside a CPU torch. Its C library then does not load, which torchvision
tolerates, but its Python part registers fake implementations for the operators `nms` and `qnms`, which the library
would have declared, and fails with `operator torchvision::nms does not exist`. The image processors of Qwen-VL need
torchvision's Python part only, so declaring the two schemas at the first import of torchvision is enough. If the C
library loads, nothing is declared: torch refuses a second declaration.

Python imports this module by its name from the engine's PYTHONPATH; it runs the `sitecustomize` that it hides, if there
is one. It uses nothing of Highwater: the engine's environment does not have it.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SCHEMAS = ("nms", "qnms")
_kept: list[object] = []  # torch drops the declarations with the Library object that made them


class TorchvisionFinder:
    """A meta path finder that finds nothing: it only notices the first import of torchvision."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname == "torchvision":
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not cls]
            spec = PathFinder.find_spec(fullname)
            if spec is not None and spec.origin is not None:
                declare_schemas(Path(spec.origin).parent)
        return None


def declare_schemas(torchvision_folder: Path) -> None:
    """Declare the operators that torchvision's Python part counts on, unless its own library does."""
    # torchvision would import it next; nothing before that may cost a torch import.
    import torch  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415 - the engine's, not ours

    try:
        torch.ops.load_library(str(torchvision_folder / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in SCHEMAS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


def run_hidden_sitecustomize() -> None:
    """Run the `sitecustomize` that Python would have found if this one were not first on the path."""
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.meta_path.insert(0, TorchvisionFinder)
run_hidden_sitecustomize()
