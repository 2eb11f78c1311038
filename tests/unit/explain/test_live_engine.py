"""A running engine is planned from its own layers, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.explain.live_engine import LiveWorker, available_bytes, layer_of, live_engine
from kvplan import PlanError
from kvplan.generations import generation_of
from kvplan.pool import plan_pool
from kvplan.specs import ChunkedLocal, CrossAttention, FullAttention, MambaState, MlaAttention, SlidingWindow
from tests.unit.explain.readings import GEMMA, LARGER, QWEN3_NEXT, STORY, rank


def worker(budget, number: int = 0, stage: int = 0, kind: str = "npu") -> LiveWorker:
    return LiveWorker(rank(number, kind=kind, pp_rank=stage, total=None), budget)


@pytest.mark.parametrize(
    ("budget", "blocks", "tokens"),
    [(STORY, 5_040, 645_120), (LARGER, 1_283, 164_224), (GEMMA, 15_997, None), (QWEN3_NEXT, 7_162, 973_760)],
)
def test_live_layers_are_sized_as_the_engine_sized_them(budget, blocks, tokens):
    engine = live_engine([worker(budget)])
    pool = plan_pool(engine.layers, engine.available_bytes, engine.limits, generation_of(engine.version))
    assert pool.blocks == blocks
    assert tokens in (None, pool.tokens)


def test_ranks_of_a_stage_share_their_layers_and_stages_do_not():
    engine = live_engine([worker(STORY, 0, 0), worker(STORY, 1, 0), worker(STORY, 2, 1)])
    assert engine.layers[0].keys() == engine.layers[1].keys()
    assert not engine.layers[0].keys() & engine.layers[2].keys()


def test_its_flags_are_the_engines():
    flags = live_engine([worker(STORY)]).flags
    assert (flags.platform, flags.max_model_len, flags.tensor_parallel_size) == ("ascend", 65_536, 2)
    assert (flags.gpu_memory_utilization, flags.dtype, flags.block_size) == (0.95, "bfloat16", 128)


@pytest.mark.parametrize(
    ("kind", "words"), [("xpu", "rank 0 runs on xpu: how vLLM counts"), (None, "rank 0 does not name its device: how")]
)
def test_a_device_that_is_not_known_is_taken_for_no_other(kind, words):
    with pytest.raises(PlanError, match=words):
        live_engine([worker(STORY, kind=kind)])


ATTENTION = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype_bytes": 2}


@pytest.mark.parametrize(
    ("described", "kind"),
    [
        ({"kind": "FullAttentionSpec", "page_bytes": 65_536}, FullAttention),
        ({"kind": "SlidingWindowSpec", "page_bytes": 65_536, "sliding_window": 1_024}, SlidingWindow),
        ({"kind": "ChunkedLocalAttentionSpec", "page_bytes": 65_536, "attention_chunk_size": 8_192}, ChunkedLocal),
        ({"kind": "CrossAttentionSpec", "page_bytes": 65_536}, CrossAttention),
        ({"kind": "MLAAttentionSpec", "page_bytes": 32_768}, MlaAttention),
    ],
)
def test_every_kind_of_attention_has_its_layer(described, kind):
    layer = layer_of(ATTENTION | described)
    assert isinstance(layer, kind)
    assert layer.page_bytes == described["page_bytes"]


def test_a_packed_format_is_exact_by_its_token():
    """fp8_ds_mla: 656 bytes a token, which no product of its fields is."""
    described = {"kind": "MLAAttentionSpec", "block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype_bytes": 1,
                 "cache_dtype_str": "fp8_ds_mla", "page_bytes": 64 * 656}  # fmt: skip
    layer = layer_of(described)
    assert (layer.token_head_bytes, layer.page_bytes, layer.cache_dtype) == (656, 64 * 656, "fp8_ds_mla")


def test_a_padded_page_stays_padded():
    described = {"kind": "MambaSpec", "block_size": 512, "shapes": [[3, 4], [5]], "dtypes_bytes": [2, 4],
                 "page_size_padded": 100, "page_bytes": 100}  # fmt: skip
    layer = layer_of(described)
    assert isinstance(layer, MambaState)
    assert (layer.content_bytes, layer.page_bytes) == (44, 100)


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (ATTENTION | {"kind": "CircularBufferSpec"}, "kind CircularBufferSpec, which is not known"),
        (ATTENTION | {"kind": "FullAttentionSpec", "head_size": None}, "with head_size None"),
        (ATTENTION | {"kind": "SlidingWindowSpec"}, "with sliding_window None"),
        (
            ATTENTION | {"kind": "FullAttentionSpec", "page_bytes": 65_537},
            "takes 65537 bytes; its fields come to 65",
        ),
        ({"kind": "MambaSpec", "block_size": 16}, "without its shapes"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(described, words):
    with pytest.raises(PlanError, match=f"^rank 3 reports a layer .*{words}"):
        layer_of(described, "rank 3")


def test_what_is_not_reported_is_refused_by_name():
    with pytest.raises(PlanError, match="no worker has reported"):
        live_engine([])
    for changes, words in (
        ({"kv_cache": replace(STORY.kv_cache, layers=None)}, "the layers of its KV cache"),
        ({"memory": replace(STORY.memory, available_bytes=None)}, "the bytes for its KV cache"),
        ({"limits": None}, "max_model_len"),
        ({"vllm_version": None}, "vLLM's version"),
    ):
        with pytest.raises(PlanError, match=f"rank 0 does not report {words}"):
            live_engine([worker(replace(STORY, **changes))])


def test_a_given_size_counts_before_what_a_profile_would_have_found():
    assert available_bytes(replace(STORY, kv_cache=replace(STORY.kv_cache, given_bytes=7))) == 7


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**62) | st.text(max_size=5), lambda one: st.lists(one, max_size=3)
)
FIELDS = (
    *("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype_bytes", "page_bytes", "page_size_padded"),
    *("sliding_window", "attention_chunk_size", "shapes", "dtypes_bytes", "num_speculative_blocks"),
)
KINDS = (
    *("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "CrossAttentionSpec"),
    *("MLAAttentionSpec", "MambaSpec", "Else"),
)


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_whatever_a_file_says_is_a_layer_or_refused(kind, fields):
    """Nothing else is raised, and no layer takes nothing."""
    try:
        layer = layer_of({"kind": kind} | fields)
    except PlanError:
        return
    assert layer.page_bytes >= layer.content_bytes > 0


@pytest.mark.parametrize("runs", [((0, 2**62),), ((1, 1),), ((-1, 1),), ((0, 0),)])
def test_no_number_of_layers_makes_much_work(runs):
    layers = replace(STORY.kv_cache.layers, runs=runs)
    with pytest.raises(PlanError, match="rank 0 reports"):
        live_engine([worker(replace(STORY, kv_cache=replace(STORY.kv_cache, layers=layers)))])
