"""A config.json for each architecture that the built-in plans, with few layers, as real ones are shaped."""

from __future__ import annotations

from typing import Any, Final

_BASE: Final[dict[str, Any]] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: Final = {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
_DELTA: Final = {
    "head_dim": 256, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "partial_rotary_factor": 0.25,
}  # fmt: skip
_LATENT: Final = {
    "num_key_value_heads": 16, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 768, "first_k_dense_replace": 2, "moe_layer_freq": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
_SPARSE: Final = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 16}
_YARN: Final = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
_SHARED: Final = {"shared_expert_intermediate_size": 768}


def _model(name: str, model_type: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [name], "model_type": model_type, **_BASE, **keys}


def _wrapped(name: str, model_type: str, text_type: str, vision: dict[str, Any], **keys: Any) -> dict[str, Any]:
    text = {**_BASE, "model_type": text_type, **keys}
    return {"architectures": [name], "model_type": model_type, "text_config": text, "vision_config": vision}


_QWEN_VISION: Final = {
    "depth": 2, "hidden_size": 256, "intermediate_size": 512, "num_heads": 16, "patch_size": 16,
    "out_hidden_size": 2048,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304, "deepstack_visual_indexes": [],
}  # fmt: skip
_MROPE: Final = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
_DELTA_MROPE: Final = {
    "rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True, "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
}  # fmt: skip
_SIGLIP: Final = {
    "model_type": "siglip_vision_model", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 896,
}  # fmt: skip
_PIXTRAL: Final = {
    "model_type": "pixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 1540,
}  # fmt: skip
_SOFT: Final = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}

MODELS: Final = {
    "llama": _model("LlamaForCausalLM", "llama", rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}),
    "llama-linear": _model("LlamaForCausalLM", "llama", rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "mistral": _model("MistralForCausalLM", "mistral", sliding_window=4096),
    "mixtral": _model("MixtralForCausalLM", "mixtral", sliding_window=None, num_local_experts=8, num_experts_per_tok=2),
    "granite": _model("GraniteForCausalLM", "granite", embedding_multiplier=12.0, logits_scaling=8.0,
                      residual_multiplier=0.22, attention_multiplier=0.0156, num_key_value_heads=None),
    "phi3": _model("Phi3ForCausalLM", "phi3", num_key_value_heads=16, original_max_position_embeddings=4096,
                   max_position_embeddings=4096, sliding_window=2047, pad_token_id=0),
    "cohere": _model("CohereForCausalLM", "cohere", logit_scale=0.0625, layer_norm_eps=1e-5,
                     tie_word_embeddings=True),
    "cohere2": _model("Cohere2ForCausalLM", "cohere2", logit_scale=0.25, layer_norm_eps=1e-5, sliding_window=4096,
                      head_dim=128, tie_word_embeddings=True),
    "ernie": _model("Ernie4_5ForCausalLM", "ernie4_5", head_dim=128, use_bias=False),
    "gemma": _model("GemmaForCausalLM", "gemma", head_dim=256, tie_word_embeddings=True),
    "gemma2": _model("Gemma2ForCausalLM", "gemma2", head_dim=256, tie_word_embeddings=True, **_SOFT),
    "gemma3-text": _model("Gemma3ForCausalLM", "gemma3_text", head_dim=256, sliding_window=512,
                          rope_local_base_freq=10000.0, query_pre_attn_scalar=256),
    "gemma3": _wrapped("Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", _SIGLIP, head_dim=256,
                       num_hidden_layers=34, sliding_window=1024, rope_local_base_freq=10000.0,
                       rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "mistral3": _wrapped("Mistral3ForConditionalGeneration", "mistral3", "mistral", _PIXTRAL, head_dim=128,
                         sliding_window=None) | {"spatial_merge_size": 2, "image_token_index": 10,
                                                   "tie_word_embeddings": False},
    "glm4": _model("Glm4ForCausalLM", "glm4", num_key_value_heads=2, head_dim=128, partial_rotary_factor=0.5),
    "glm4-moe": _model("Glm4MoeForCausalLM", "glm4_moe", head_dim=128, n_routed_experts=16, n_shared_experts=1,
                       num_experts_per_tok=4, moe_intermediate_size=768, first_k_dense_replace=1, n_group=1,
                       topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=True, partial_rotary_factor=0.5,
                       use_qk_norm=True),
    "gpt-oss": _model("GptOssForCausalLM", "gpt_oss", hidden_size=2880, intermediate_size=2880, head_dim=64,
                      num_attention_heads=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
                      quantization_config={"quant_method": "mxfp4"}, max_position_embeddings=131072,
                      rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}),
    "minimax-m2": _model("MiniMaxM2ForCausalLM", "minimax_m2", head_dim=128, rotary_dim=64, num_local_experts=16,
                         num_experts_per_tok=4, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid",
                         use_routing_bias=True, intermediate_size=1536),
    "qwen2": _model("Qwen2ForCausalLM", "qwen2", num_attention_heads=28, hidden_size=3584, num_key_value_heads=4),
    "qwen2-yarn": _model("Qwen2ForCausalLM", "qwen2", sliding_window=131072, max_window_layers=12,
                         use_sliding_window=False, rope_scaling=_YARN),
    "qwen2-moe": _model("Qwen2MoeForCausalLM", "qwen2_moe", **{**_EXPERTS, "num_experts": 60}, **_SHARED),
    "qwen3": _model("Qwen3ForCausalLM", "qwen3", head_dim=128, layer_types=["full_attention"] * 12),
    "qwen3-moe": _model("Qwen3MoeForCausalLM", "qwen3_moe", head_dim=128, num_key_value_heads=4, **_EXPERTS),
    "qwen3-vl": _wrapped("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text", _QWEN_VISION, head_dim=128,
                         rope_scaling=_MROPE),
    "qwen3-vl-moe": _wrapped("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text", _QWEN_VISION,
                             head_dim=128, rope_scaling=_MROPE, **_EXPERTS),
    "qwen2.5-vl": _wrapped("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2_5_vl_text", {
        **_QWEN_VISION, "window_size": 112, "fullatt_block_indexes": [1], "hidden_act": "silu"},
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
    "deepseek-v2": _model("DeepseekV2ForCausalLM", "deepseek_v2", **{
        **_LATENT, "q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax"}),
    "deepseek-v3": _model("DeepseekV3ForCausalLM", "deepseek_v3", rope_scaling={
        "type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
        "mscale_all_dim": 1.0}, **_LATENT),
    "deepseek-v32": _model("DeepseekV32ForCausalLM", "deepseek_v32", **_LATENT, **_SPARSE),
    "glm-dsa": _model("GlmMoeDsaForCausalLM", "glm_moe_dsa", **_LATENT, **_SPARSE),
    "glm4-lite": _model("Glm4MoeLiteForCausalLM", "glm4_moe_lite", **{
        **_LATENT, "qk_nope_head_dim": 192, "v_head_dim": 256}),
    "qwen3-next": _model("Qwen3NextForCausalLM", "qwen3_next", **_DELTA, **_EXPERTS, **_SHARED),
    "qwen3.5-text": _model("Qwen3_5ForCausalLM", "qwen3_5_text", **_DELTA, mamba_ssm_dtype="float32"),
    "qwen3.5-moe-text": _model("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **_DELTA, **_EXPERTS, **_SHARED,
                               mamba_ssm_dtype="float32"),
    "qwen3.5": _wrapped("Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text", _QWEN_VISION, **_DELTA,
                        mamba_ssm_dtype="float32", rope_parameters=_DELTA_MROPE),
    "qwen3.5-moe": _wrapped("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text", _QWEN_VISION,
                            **_DELTA, **_EXPERTS, **_SHARED, mamba_ssm_dtype="float32", rope_parameters=_DELTA_MROPE),
}  # fmt: skip
