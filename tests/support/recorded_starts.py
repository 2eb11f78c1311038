"""Real starts of vLLM that public logs show part by part, with the geometry of their models.

From the accuracy logs of llm-d-incubation/llm-d-planner (vLLM 0.19.0 on an H100 of 79.19 GiB, 8,192 batched tokens,
1,024 sequences, utilization 0.95) and reports of other versions; sizes in GiB, as printed with two decimals. The keys
of each model are those of its public config.json that decide a size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStart:
    """One start; None: not printed."""

    name: str
    config: Config
    weights: float
    activation: float | None = None
    non_torch: float | None = None
    graphs: float | None = None
    kv: float | None = None
    tensor_parallel: int = 1
    quantization: str | None = None
    version: str = "0.19.0"

    def __str__(self) -> str:
        """Name the start in a test's id."""
        return f"{self.name}-tp{self.tensor_parallel}-{self.version}"


def _model(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16", **keys}


def _compressed(bits: int, kind: str, strategy: str, *ignored: str, **weights: int) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": kind, "strategy": strategy, **weights}
    return {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head", *ignored],
        "config_groups": {"group_0": {"weights": scheme}},
    }


FP8_DYNAMIC: Final = _compressed(8, "float", "channel")

LLAMA_8B: Final = _model(
    "LlamaForCausalLM", "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    tie_word_embeddings=False,
    rope_scaling={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
)  # fmt: skip
LLAMA_70B: Final = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                    "num_attention_heads": 64}  # fmt: skip
QWEN25_7B: Final = _model(
    "Qwen2ForCausalLM", "qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, max_position_embeddings=32768,
    tie_word_embeddings=False,
)  # fmt: skip
QWEN3_14B: Final = _model(
    "Qwen3ForCausalLM", "qwen3", hidden_size=5120, intermediate_size=17408, num_hidden_layers=40,
    num_attention_heads=40, num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
    tie_word_embeddings=False,
)  # fmt: skip
GEMMA2_2B: Final = _model(
    "Gemma2ForCausalLM", "gemma2", hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
    num_attention_heads=8, num_key_value_heads=4, head_dim=256, vocab_size=256000, max_position_embeddings=8192,
)  # fmt: skip
GRANITE_2B: Final = _model(
    "GraniteForCausalLM", "granite", hidden_size=2048, intermediate_size=8192, num_hidden_layers=40,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=49155, max_position_embeddings=131072,
    tie_word_embeddings=True,
)  # fmt: skip
PHI2: Final = _model(
    "PhiForCausalLM", "phi", hidden_size=2560, intermediate_size=10240, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, vocab_size=51200, max_position_embeddings=2048,
    partial_rotary_factor=0.4, tie_word_embeddings=False,
)  # fmt: skip
GPT_OSS_20B: Final = _model(
    "GptOssForCausalLM", "gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
    num_attention_heads=64, num_key_value_heads=8, head_dim=64, vocab_size=201088, max_position_embeddings=131072,
    num_local_experts=32, num_experts_per_tok=4, tie_word_embeddings=False,
    rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
QWEN15_MOE: Final = _model(
    "Qwen2MoeForCausalLM", "qwen2_moe", hidden_size=2048, intermediate_size=5632, moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24,
    num_attention_heads=16, num_key_value_heads=16, vocab_size=151936, max_position_embeddings=8192,
    decoder_sparse_step=1, tie_word_embeddings=False,
)  # fmt: skip
LLAMA4_SCOUT: Final = _model(
    "Llama4ForConditionalGeneration", "llama4",
    vision_config={
        "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
        "patch_size": 14, "image_size": 336, "projector_input_dim": 4096, "projector_output_dim": 4096,
        "vision_output_dim": 4096, "pixel_shuffle_ratio": 0.5,
    },
    text_config={
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 202048, "max_position_embeddings": 10485760, "num_local_experts": 16, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192},
    },
)  # fmt: skip
MISTRAL_SMALL_W8A8: Final = _model(
    "Mistral3ForConditionalGeneration", "mistral3", spatial_merge_size=2,
    quantization_config=_compressed(8, "int", "channel", "re:vision_tower.*", "re:multi_modal_projector.*"),
    vision_config={
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "patch_size": 14, "image_size": 1540,
    },
    text_config={
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
)  # fmt: skip
QWEN36_35B_NVFP4: Final = _model(
    "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", tie_word_embeddings=False,
    quantization_config=_compressed(
        4, "float", "tensor_group", "re:.*linear_attn.*", "re:.*mlp.gate$", "re:.*visual.*", group_size=16
    ),
    vision_config={
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304, "out_hidden_size": 2048,
    },
    text_config={
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "vocab_size": 248320,
        "max_position_embeddings": 262144, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
    },
)  # fmt: skip


def _gemma3(*sizes: int) -> Config:
    hidden, inner, layers, heads, kv_heads, width = sizes
    return _model(
        "Gemma3ForConditionalGeneration", "gemma3", mm_tokens_per_image=256,
        vision_config={
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "patch_size": 14, "image_size": 896,
        },
        text_config={
            "model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": width, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    )  # fmt: skip


def _start(name: str, config: Config, sizes: tuple[float | None, ...], **more: Any) -> RecordedStart:
    parts = ("weights", "activation", "non_torch", "graphs", "kv")
    return RecordedStart(name=name, config=config, **dict(zip(parts, sizes, strict=True)), **more)


def _quantized(config: Config, quantization: Config) -> Config:
    return {**config, "quantization_config": quantization}


# Weights, activation peak, non-torch, graphs, KV cache.
STARTS: Final = (
    _start("Llama-3.3-70B-FP8", _quantized(LLAMA_70B, FP8_DYNAMIC), (33.88, 1.96, 2.1, 1.79, 37.28), tensor_parallel=2),
    _start("Qwen2.5-7B-FP8", _quantized(QWEN25_7B, FP8_DYNAMIC), (8.14, 2.21, 0.24, 0.81, 64.64)),
    _start("gemma-2-2b", GEMMA2_2B, (4.9, 3.62, 0.24, 0.71, 66.47)),
    _start("gemma-3-12b", _gemma3(3840, 15360, 48, 16, 8, 256), (23.31, 3.94, 0.25, 0.94, 47.72)),
    _start("gemma-3-27b", _gemma3(5376, 21504, 62, 32, 16, 128), (51.45, 3.99, 0.26, 1.14, 19.53)),
    _start("gemma-3-4b", _gemma3(2560, 10240, 34, 8, 4, 256), (8.58, 3.89, 0.25, 0.67, 62.51)),
    _start("granite-3.1-2b", GRANITE_2B, (4.74, 0.75, 0.46, 0.84, 69.28)),
    _start("Llama-3.1-8B-online-fp8", LLAMA_8B, (8.49, 1.89, 0.25, 0.87, 64.61), quantization="fp8"),
    _start("Llama-3.1-8B", LLAMA_8B, (14.99, 1.89, 0.25, None, 58.11)),
    _start("Llama-4-Scout", LLAMA4_SCOUT, (53.12, 3.19, 2.17, 1.13, 16.75), tensor_parallel=4),
    _start("phi-2", PHI2, (5.19, 0.79, 0.24, 0.76, 69.0)),
    _start("Qwen1.5-MoE", QWEN15_MOE, (26.67, 2.47, 0.25, 1.1, 45.83)),
    _start("Mistral-Small-3.1-w8a8", MISTRAL_SMALL_W8A8, (12.11, 2.03, 2.07, 1.03, 59.02), tensor_parallel=2),
    _start("gpt-oss-20b", GPT_OSS_20B, (13.64, 2.87, 0.25, None, 58.47)),
    # This one ran with a utilization of 0.9: its KV cache is not compared.
    _start("gpt-oss-20b", GPT_OSS_20B, (7.01, 2.87, 2.07, 1.55, None), tensor_parallel=2),
    _start("Qwen2.5-7B", QWEN25_7B, (14.25, 2.21, 0.24, None, 58.53)),
    _start("Qwen3-14B", QWEN3_14B, (27.52, 5.64, 0.13, None, 41.94), version="0.15.0"),
    _start("Qwen3-14B", QWEN3_14B, (27.52, 2.23, 0.13, None, 45.34), version="0.17.0"),
    _start("Qwen3.6-35B-A3B-NVFP4", QWEN36_35B_NVFP4, (21.86, None, None, None, None), version="0.20.0"),
)
