"""What one layer takes of a block."""

from __future__ import annotations

from kvplan.specs import FullAttention, MambaState, MlaAttention, SlidingWindow


def test_attention_takes_a_key_and_a_value_of_every_token_and_head() -> None:
    """2 x 16 tokens x 8 heads x 128 x 2 bytes."""
    assert FullAttention(block_size=16, kv_heads=8, head_size=128, element_bytes=2).page_bytes == 65536


def test_a_value_may_have_a_size_of_its_own() -> None:
    fields = {"block_size": 16, "kv_heads": 1, "head_size": 192, "element_bytes": 2}
    assert FullAttention(**fields, head_size_v=128).page_bytes == 16 * (192 + 128) * 2
    assert FullAttention(**fields, head_size_v=192) == FullAttention(**fields)


def test_mla_keeps_one_vector() -> None:
    """576 elements; 656 bytes in the packed format."""
    assert MlaAttention(block_size=32, kv_heads=1, head_size=576, element_bytes=1).page_bytes == 32 * 576
    packed = MlaAttention(block_size=64, kv_heads=1, head_size=576, element_bytes=1, token_head_bytes=656)
    assert packed.page_bytes == 64 * 656


def test_a_state_does_not_grow_with_its_block() -> None:
    state = MambaState(block_size=544, shapes=((3, 1024), (8, 64, 128)), element_bytes=(2, 4))
    assert state.page_bytes == 3 * 1024 * 2 + 8 * 64 * 128 * 4


def test_a_padded_page_is_what_a_layer_takes() -> None:
    window = SlidingWindow(block_size=16, kv_heads=1, head_size=80, element_bytes=2, window=512, page_bytes_padded=8192)
    assert (window.content_bytes, window.page_bytes) == (5120, 8192)
