"""Layers to groups, as each version of vLLM divides them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan import PlanError
from kvplan.flags import Limits
from kvplan.generations import generation_of
from kvplan.grouping import group_layers, merge_workers
from kvplan.specs import CrossAttention, FullAttention, LayerSpec, MambaState, MlaAttention, SlidingWindow

LIMITS = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256)
FULL = FullAttention(block_size=16, kv_heads=4, head_size=128, element_bytes=2)
SLIDING = SlidingWindow(block_size=16, kv_heads=4, head_size=128, element_bytes=2, window=1024)
MLA = MlaAttention(block_size=16, kv_heads=1, head_size=576, element_bytes=2)


def groups_of(version: str, *parts: tuple[int, LayerSpec], hybrid_manager: bool = True) -> list[tuple[str, int, int]]:
    """Return each group's kind, layers and block size."""
    specs = [spec for count, spec in parts for _ in range(count)]
    layers = {f"layers.{place}": spec for place, spec in enumerate(specs)}
    made = group_layers(layers, replace(LIMITS, hybrid_manager=hybrid_manager), generation_of(version))
    return [(group.kind, len(group.layers), group.spec.block_size) for group in made]


def test_equal_layers_are_one_group() -> None:
    assert groups_of("0.19.0", (32, FULL)) == [("full", 32, 16)]


def test_layers_of_one_type_and_several_sizes_are_one_mixed_group() -> None:
    assert groups_of("0.19.0", (61, MLA), (1, FULL)) == [("mixed", 62, 16)]


def test_windows_are_cut_into_groups_of_the_rarer_layers() -> None:
    """gemma-3-27b: 52 sliding layers beside 10 full ones."""
    assert groups_of("0.19.0", (52, SLIDING), (10, FULL)) == [("sliding", 9, 16)] * 4 + [("sliding", 8, 16)] * 2 + [
        ("full", 10, 16)
    ]


def test_a_drafters_layer_more_pads_the_other_group() -> None:
    """12 sliding and 13 full layers."""
    assert groups_of("0.12.0", (12, SLIDING), (13, FULL)) == [("sliding", 12, 16), ("full", 13, 16)]


def test_the_threshold_of_padding_grew_with_0_18() -> None:
    """10 and 13 layers: 1.3 times as many."""
    assert len(groups_of("0.17.1", (10, SLIDING), (13, FULL))) == 3
    assert len(groups_of("0.18.0", (10, SLIDING), (13, FULL))) == 2


def test_the_smaller_page_gets_larger_blocks() -> None:
    """gemma-4: its full layers have half the page, so that they get 32 tokens a block."""
    assert groups_of("0.19.0", (10, SLIDING), (10, replace(FULL, kv_heads=2))) == [
        ("sliding", 10, 16),
        ("full", 10, 32),
    ]


def test_pages_that_do_not_divide_are_padded_by_newer_versions_only() -> None:
    """0.24 asks the kernel, 0.29 pads all but MLA; the refusal names the layer and the bytes."""
    odd = replace(FULL, head_size=80)
    for version in ("0.12.0", "0.23.0", "0.24.0"):
        with pytest.raises(PlanError, match=r"layer layers\.1: .* 20480 bytes"):
            groups_of(version, (1, SLIDING), (1, odd))
    by_stride = replace(odd, indexes_by_block_stride=True)
    assert groups_of("0.24.0", (1, SLIDING), (1, by_stride)) == [("sliding", 1, 16), ("full", 1, 16)]
    assert groups_of("0.29.0", (1, SLIDING), (1, odd)) == [("sliding", 1, 16), ("full", 1, 16)]


def test_a_state_is_padded_to_the_largest_page_from_0_26_on() -> None:
    """Its size comes from its shapes, so that larger blocks would not help."""
    state = MambaState(block_size=16, shapes=((64, 4),), element_bytes=(2,))
    with pytest.raises(PlanError, match=r"layer layers\.1"):
        groups_of("0.25.1", (1, FULL), (1, state))
    assert groups_of("0.26.0", (1, FULL), (1, state)) == [("full", 1, 16), ("mamba", 1, 16)]


def test_without_the_hybrid_manager_windows_are_kept_whole() -> None:
    assert groups_of("0.19.0", (10, SLIDING), (2, FULL), hybrid_manager=False) == [("full", 12, 16)]
    state = MambaState(block_size=16, shapes=((64, 4),), element_bytes=(2,))
    with pytest.raises(PlanError, match="disable_hybrid_kv_cache_manager"):
        groups_of("0.19.0", (1, state), (2, FULL), hybrid_manager=False)


def test_two_windows_need_the_hybrid_manager() -> None:
    """vLLM ends with a ValueError of its own."""
    with pytest.raises(PlanError, match=r"sliding_window: layers with windows of \[512, 1024\] tokens"):
        groups_of("0.19.0", (1, SLIDING), (1, replace(SLIDING, window=512)), (1, FULL), hybrid_manager=False)


def test_windows_that_cannot_share_pages_with_mla_are_kept_whole_from_0_27_on() -> None:
    with pytest.raises(PlanError, match="equal to the largest"):
        groups_of("0.26.0", (4, MLA), (1, SLIDING))
    assert groups_of("0.27.0", (4, MLA), (1, SLIDING)) == [("mixed", 5, 16)]


def test_mla_layers_of_two_sizes_were_taken_as_one_before_0_27() -> None:
    indexer = replace(MLA, head_size=132, element_bytes=1)
    assert groups_of("0.26.0", (4, MLA), (4, indexer)) == [("mla", 8, 16)]
    assert groups_of("0.27.0", (4, MLA), (4, indexer)) == [("mixed", 8, 16)]


def test_an_encoder_decoder_has_a_group_for_each() -> None:
    cross = CrossAttention(block_size=16, kv_heads=4, head_size=128, element_bytes=2)
    assert groups_of("0.19.0", (32, FULL), (32, cross)) == [("full", 32, 16), ("cross", 32, 16)]


def test_workers_that_disagree_on_a_layer_are_refused_by_its_name() -> None:
    with pytest.raises(PlanError, match=r"layer layers\.0: "):
        merge_workers([{"layers.0": FULL}, {"layers.0": SLIDING}])
    assert list(merge_workers([{"a": FULL}, {"b": FULL}, {"a": FULL}])) == ["a", "b"]
