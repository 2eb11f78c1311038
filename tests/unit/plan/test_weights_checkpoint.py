"""Parameters that a config.json implies: as many as each published checkpoint has."""

from __future__ import annotations

from typing import Any

import pytest

from highwater.plan.checkpoint import architecture, whole
from highwater.plan.implied import implied_tensors
from kvplan.errors import PlanError

# The parameters that the model"s page shows, and the keys of its public config.json that decide them.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "gemma-2-9b": (
        9_241_705_984,
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "vocab_size": 256000,
        },
    ),
    "gemma-2-27b": (
        27_227_128_320,
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "hidden_size": 4608,
            "intermediate_size": 36864,
            "num_hidden_layers": 46,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "vocab_size": 256000,
        },
    ),
    "gemma-7b": (
        8_537_680_896,
        {
            "architectures": ["GemmaForCausalLM"],
            "model_type": "gemma",
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "vocab_size": 256000,
        },
    ),
    "gemma-3-1b": (
        999_885_952,
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
        },
    ),
    "phi3-mini": (
        3_821_079_552,
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "tie_word_embeddings": False,
        },
    ),
    "phi-4": (
        14_659_507_200,
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "vocab_size": 100352,
            "tie_word_embeddings": False,
        },
    ),
    "mistral-7b-v0.3": (
        7_248_023_552,
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32768,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-0.6b": (
        596_049_920,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2-7b": (
        7_298_617_344,
        {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100352,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek-v3": (
        671_026_419_200,
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "topk_method": "noaux_tc",
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-next-80b": (
        79_674_391_296,
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "vocab_size": 151936,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "decoder_sparse_step": 1,
            "tie_word_embeddings": False,
        },
    ),
    "gpt2": (
        124_439_808,
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "vocab_size": 50257,
            "n_positions": 1024,
        },
    ),
    "opt-125m": (
        125_239_296,
        {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        },
    ),
    "pythia-6.9b": (
        6_857_302_016,
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 50432,
            "tie_word_embeddings": False,
        },
    ),
    "starcoder2-3b": (
        3_030_371_328,
        {
            "architectures": ["Starcoder2ForCausalLM"],
            "model_type": "starcoder2",
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "vocab_size": 49152,
        },
    ),
    "command-r": (
        34_980_831_232,
        {
            "architectures": ["CohereForCausalLM"],
            "model_type": "cohere",
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "vocab_size": 256000,
        },
    ),
    "stablelm-2-1.6b": (
        1_644_515_328,
        {
            "architectures": ["StableLmForCausalLM"],
            "model_type": "stablelm",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100352,
            "use_qkv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "glm-4-9b-0414": (
        9_400_279_040,
        {
            "architectures": ["Glm4ForCausalLM"],
            "model_type": "glm4",
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 151552,
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "granite-3.1-8b": (
        8_170_848_256,
        {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "hidden_size": 4096,
            "intermediate_size": 12800,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 49155,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": (
        6_919_161_856,
        {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2.5-0.5b": (
        494_032_768,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
            "num_local_experts": 32,
            "tie_word_embeddings": False,
        },
    ),
    "granite-3.1-1b-a400m": (
        1_334_628_352,
        {
            "architectures": ["GraniteMoeForCausalLM"],
            "model_type": "granitemoe",
            "hidden_size": 1024,
            "intermediate_size": 512,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 49155,
            "num_local_experts": 32,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3-3b": (
        3_075_098_624,
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_config_implies_as_many_parameters_as_the_checkpoint_has(name: str) -> None:
    """To the parameter."""
    published, config = MODELS[name]

    assert sum(tensor.elements for tensor in implied_tensors(config)) == published


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [None]])
def test_a_config_without_an_architecture_is_refused(names: object) -> None:
    """By the key"s name."""
    with pytest.raises(PlanError, match="architectures is"):
        architecture({"architectures": names})


def test_the_first_key_that_is_there_counts() -> None:
    """Models give one size under several names."""
    assert whole({"n_embd": 768}, "hidden_size", "n_embd") == 768
    assert whole({}, "n_inner", default=3072) == 3072
    with pytest.raises(PlanError, match="hidden_size or n_embd is missing"):
        whole({}, "hidden_size", "n_embd")
