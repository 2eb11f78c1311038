"""Layers to groups, as each version of vLLM divides them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan import Limits, PlanError
from kvplan.generations import generation_of
from kvplan.grouping import group_layers, merge_workers
from kvplan.specs import CrossAttention, FullAttention, LayerSpec, MambaState, MlaAttention, SlidingWindow

LIMITS = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256)
FULL = FullAttention(block_size=16, kv_heads=4, head_size=128, element_bytes=2)
SLIDING = SlidingWindow(block_size=16, kv_heads=4, head_size=128, element_bytes=2, window=1024)
MLA = MlaAttention(block_size=16, kv_heads=1, head_size=576, element_bytes=2)
INDEXER = replace(MLA, head_size=132, element_bytes=1)
CROSS = CrossAttention(block_size=16, kv_heads=4, head_size=128, element_bytes=2)
STATE = MambaState(block_size=16, shapes=((64, 4),), element_bytes=(2,))
ODD = replace(FULL, head_size=80)  # a page that does not divide that of the others
BY_STRIDE = replace(ODD, indexes_by_block_stride=True)


def groups_of(version: str, *parts: tuple[int, LayerSpec], hybrid_manager: bool = True) -> list[tuple[str, int, int]]:
    """Return each group's kind, layers and block size."""
    specs = [spec for count, spec in parts for _ in range(count)]
    layers = {f"layers.{place}": spec for place, spec in enumerate(specs)}
    made = group_layers(layers, replace(LIMITS, hybrid_manager=hybrid_manager), generation_of(version))
    return [(group.kind, len(group.layers), group.spec.block_size) for group in made]


SHARED = [("sliding", 1, 16), ("full", 1, 16)]


@pytest.mark.parametrize(
    ("version", "parts", "groups"),
    [
        pytest.param("0.19.0", [(32, FULL)], [("full", 32, 16)], id="equal layers are one"),
        pytest.param("0.19.0", [(61, MLA), (1, FULL)], [("mixed", 62, 16)], id="of one type and two sizes: mixed"),
        pytest.param(
            "0.19.0", [(52, SLIDING), (10, FULL)],
            [("sliding", 9, 16)] * 4 + [("sliding", 8, 16)] * 2 + [("full", 10, 16)],
            id="gemma-3-27b: cut to the rarer layers",
        ),
        pytest.param(
            "0.12.0", [(12, SLIDING), (13, FULL)], [("sliding", 12, 16), ("full", 13, 16)],
            id="a drafter's layer more pads the other",
        ),
        pytest.param(
            "0.17.1", [(10, SLIDING), (13, FULL)], [("sliding", 10, 16), ("full", 7, 16), ("full", 6, 16)],
            id="1.3 times as many are cut up to 0.17",
        ),
        pytest.param(
            "0.18.0", [(10, SLIDING), (13, FULL)], [("sliding", 10, 16), ("full", 13, 16)], id="and padded since",
        ),
        pytest.param(
            "0.19.0", [(10, SLIDING), (10, replace(FULL, kv_heads=2))], [("sliding", 10, 16), ("full", 10, 32)],
            id="gemma-4: the smaller page gets larger blocks",
        ),
        pytest.param("0.24.0", [(1, SLIDING), (1, BY_STRIDE)], SHARED, id="0.24 pads where the kernel reads it"),
        pytest.param("0.29.0", [(1, SLIDING), (1, ODD)], SHARED, id="0.29 pads all but MLA"),
        pytest.param("0.26.0", [(1, FULL), (1, STATE)], [("full", 1, 16), ("mamba", 1, 16)], id="0.26 pads states"),
        pytest.param("0.27.0", [(4, MLA), (1, SLIDING)], [("mixed", 5, 16)], id="0.27 keeps windows beside MLA whole"),
        pytest.param("0.26.0", [(4, MLA), (4, INDEXER)], [("mla", 8, 16)], id="two sizes of MLA taken as one"),
        pytest.param("0.27.0", [(4, MLA), (4, INDEXER)], [("mixed", 8, 16)], id="and told apart since 0.27"),
        pytest.param("0.19.0", [(32, FULL), (32, CROSS)], [("full", 32, 16), ("cross", 32, 16)], id="encoder-decoder"),
    ],
)  # fmt: skip
def test_layers_are_divided_as_the_version_divides_them(
    version: str, parts: list[tuple[int, LayerSpec]], groups: list[tuple[str, int, int]]
) -> None:
    assert groups_of(version, *parts) == groups


@pytest.mark.parametrize(
    ("version", "parts", "said"),
    [
        *((version, [(1, SLIDING), (1, ODD)], r"layer layers\.1: .* 20480 bytes")
          for version in ("0.12.0", "0.23.0", "0.24.0")),
        ("0.25.1", [(1, FULL), (1, STATE)], r"layer layers\.1"),
        ("0.26.0", [(4, MLA), (1, SLIDING)], "equal to the largest"),
    ],
)  # fmt: skip
def test_pages_that_a_version_cannot_make_equal_are_refused(
    version: str, parts: list[tuple[int, LayerSpec]], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        groups_of(version, *parts)


def test_without_the_hybrid_manager_windows_are_kept_whole_where_vllm_can() -> None:
    assert groups_of("0.19.0", (10, SLIDING), (2, FULL), hybrid_manager=False) == [("full", 12, 16)]
    with pytest.raises(PlanError, match="disable_hybrid_kv_cache_manager"):
        groups_of("0.19.0", (1, STATE), (2, FULL), hybrid_manager=False)
    with pytest.raises(PlanError, match=r"sliding_window: layers with windows of \[512, 1024\] tokens"):
        groups_of("0.19.0", (1, SLIDING), (1, replace(SLIDING, window=512)), (1, FULL), hybrid_manager=False)


def test_workers_that_disagree_on_a_layer_are_refused_by_its_name() -> None:
    with pytest.raises(PlanError, match=r"layer layers\.0: "):
        merge_workers([{"layers.0": FULL}, {"layers.0": SLIDING}])
    assert list(merge_workers([{"a": FULL}, {"b": FULL}, {"a": FULL}])) == ["a", "b"]
