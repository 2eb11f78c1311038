"""Tiny models of the shapes that vLLM sizes a KV cache for in ways of their own: nothing but a config.json each.

Their layers are few and narrow, and their positions many, so that a length can be asked for that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMMON: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024 * 1024,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # Every layer attends to every token: one group.
    "full": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "rope_theta": 1000000,
    },
    # Five layers with a window to each without: groups of two layers, one of them half empty.
    "sliding": {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 11,
        "layer_types": [
            "full_attention" if (index + 1) % 6 == 0 or index == 10 else "sliding_attention" for index in range(11)
        ],
        "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
    },
    # Every layer has attention and a Mamba 2 state side by side; a state is larger than a default block of keys.
    "mamba": {
        **_COMMON,
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 4,
        "rope_theta": 100000000000.0,
        "mamba_d_ssm": 512,
        "mamba_n_heads": 16,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 4,
        "mamba_chunk_size": 128,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mlp_bias": False,
        "projectors_bias": False,
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "mlp_multipliers": [1.0, 1.0],
    },
    # Three layers with the state of a gated delta net to each with attention.
    "linear": {
        **_COMMON,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
    },
    # One latent vector a token. vLLM's CPU build runs it from 0.32 on ("MLA is not supported on CPU" before).
    "mla": {
        **{key: value for key, value in _COMMON.items() if key != "head_dim"},
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 4,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "rope_theta": 10000,
    },
}
