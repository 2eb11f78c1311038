"""Stand-ins are for what is absent or fails to load, and for nothing that works; blocks as an allocator counts them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from highwater_worker.plan import PRETENDED
from highwater_worker.plan.cards import CachingAllocator
from highwater_worker.plan.platform import (
    StandIns,
    anything,
    stand_in_for_operators,
)

MIB = 1 << 20


@pytest.fixture
def finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    PRETENDED.clear()
    found = StandIns(r"kernels_\w+(\..*)?")
    monkeypatch.setattr(sys, "meta_path", [found, *sys.meta_path])
    return found


def test_what_is_absent_has_a_stand_in(finder: StandIns) -> None:
    assert importlib.util.find_spec("kernels_absent") is not None
    module = importlib.import_module("kernels_absent.ops")
    assert isinstance(module.Kernel[int] | None, type)
    assert list(module.Kernel) == []  # and not item by item, without an end
    assert module.decorator()(len) is len
    assert PRETENDED == ["kernels_absent is a stand-in: absent"]


def test_what_works_is_left_alone(finder: StandIns, tmp_path: Path) -> None:
    (tmp_path / "kernels_whole.py").write_text("value = 3\n")
    assert importlib.import_module("kernels_whole").value == 3
    assert PRETENDED == []


def test_what_fails_to_load_has_a_stand_in_with_the_reason(finder: StandIns, tmp_path: Path) -> None:
    (tmp_path / "kernels_broken.py").write_text("raise ImportError('libcuda.so.1: cannot open')\n")
    assert importlib.import_module("kernels_broken").launch() is not None
    assert PRETENDED == ["kernels_broken is a stand-in: ImportError: libcuda.so.1: cannot open"]


def test_an_operator_can_be_held_and_called() -> None:
    class Namespace:
        name = "_C"

        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    PRETENDED.clear()
    stand_in_for_operators(Namespace, {"supports_fp8": True})
    operators = Namespace()
    assert operators.supports_fp8(90) is True
    assert operators.rms_norm.default() is None
    assert operators.get_workspace_size() == 0
    assert PRETENDED == ["the operator get_workspace_size answered 0"]
    Namespace.name = "aten"
    with pytest.raises(AttributeError):
        operators.rms_norm.default()


def test_a_sampler_gives_a_number_for_each_row() -> None:
    rows = SimpleNamespace(shape=(7, 5), new_empty=lambda shape: SimpleNamespace(shape=shape, int=lambda: shape))
    assert anything("flashinfer").sampling.top_k_top_p_sampling_from_logits(rows, None) == (7,)


@pytest.mark.parametrize(
    ("sizes", "counted"),
    [
        ([1], 512),
        ([MIB, MIB], 2 * MIB),
        ([9 * MIB, 11 * MIB], 20 * MIB),  # 11 remain and are taken whole
        ([19 * MIB + 1], 20 * MIB),  # 1 MiB or less is not split off
        ([18 * MIB], 18 * MIB),
        ([33 * MIB], 34 * MIB),
    ],
)
def test_a_block_counts_whole_where_little_would_remain(sizes: list[int], counted: int) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    assert allocator.allocated_bytes == counted
