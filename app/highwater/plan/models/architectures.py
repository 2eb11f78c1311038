"""The architectures whose KV cache can be planned, each with the rule of its layers.

The names are those of vLLM's registry (model_executor/models/registry.py). An architecture that is not here is refused
by name: a rule that was not read in vLLM's source is never guessed. `served.json` holds the first and the last version
whose registry has each, read in the wheels of every minor release from 0.11 to 0.32; a last version of null is the
newest that was read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from highwater.plan.models import attention, recurrent
from highwater.plan.models.recurrent import Builder
from kvplan.generations import Span
from kvplan.versions import Release


@cache
def served() -> Mapping[str, Span]:
    def span(since: str, last: str | None) -> Span:
        major, minor = map(int, last.split(".")) if last else (0, 0)
        return Span(tuple(map(int, since.split("."))), (major, minor + 1) if last else None)

    text = Path(__file__).with_name("served.json").read_text(encoding="utf-8")
    return MappingProxyType({name: span(*versions) for name, versions in json.loads(text).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    build: Builder
    hybrid: bool = False  # vLLM aligns its attention's blocks to its states (is_hybrid)
    states_only: bool = False  # it has no attention at all
    encoder_decoder: bool = False  # it keeps an encoder's output
    caches_states: bool = False  # it has the interface SupportsMambaPrefixCaching
    own_state_dtype: str | None = None  # the key that names its states' element type
    # The element type where that key is absent, each from a version on; nothing: that of the model.
    state_dtypes: tuple[tuple[Release, str], ...] = ()


# The architectures without recurrent states, by the rule of their layers.
_ATTENTION: Final = {
    attention.uniform: """
        AquilaForCausalLM AquilaModel BaiChuanForCausalLM BaichuanForCausalLM BloomForCausalLM
        ChatGLMForConditionalGeneration ChatGLMModel DbrxForCausalLM DeepseekForCausalLM Dots1ForCausalLM
        Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM ExaoneForCausalLM FalconForCausalLM GLM4VForCausalLM
        GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM GemmaForCausalLM Glm4ForCausalLM
        Glm4MoeForCausalLM Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmForCausalLM
        GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM HunYuanDenseV1ForCausalLM
        HunYuanMoEV1ForCausalLM InternLM2ForCausalLM MPTForCausalLM MiniCPMForCausalLM MiniMaxM2ForCausalLM
        MixtralForCausalLM MptForCausalLM NemotronForCausalLM OPTForCausalLM OlmoForCausalLM OlmoeForCausalLM
        OrionForCausalLM PersimmonForCausalLM Phi3VForCausalLM PhiForCausalLM PhiMoEForCausalLM QWenLMHeadModel
        Qwen2MoeForCausalLM Qwen3MoeForCausalLM Qwen3OmniMoeForConditionalGeneration
        Qwen3VLMoeForConditionalGeneration RWForCausalLM SolarForCausalLM StableLMEpochForCausalLM
        StableLmForCausalLM Starcoder2ForCausalLM XverseForCausalLM
    """,
    attention.qwen2: """
        Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2VLForConditionalGeneration
        Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM
        Qwen3VLForConditionalGeneration SeedOssForCausalLM MiMoForCausalLM
    """,
    attention.by_layer_type: """
        ApertusForCausalLM ArceeForCausalLM Cohere2ForCausalLM CohereForCausalLM CwmForCausalLM Exaone4ForCausalLM
        Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration InternLM3ForCausalLM InternLMForCausalLM
        LLaMAForCausalLM LlamaForCausalLM MistralForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM Phi3ForCausalLM
    """,
    attention.wrapped: """
        AyaVisionForConditionalGeneration Cohere2VisionForConditionalGeneration Idefics3ForConditionalGeneration
        InternVLChatModel InternVLForConditionalGeneration LlavaForConditionalGeneration
        LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration
        LlavaOnevisionForConditionalGeneration Mistral3ForConditionalGeneration PaliGemmaForConditionalGeneration
        SmolVLMForConditionalGeneration UltravoxModel VoxtralForConditionalGeneration
    """,
    attention.latent: """
        DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM Glm4MoeLiteForCausalLM
        GlmMoeDsaForCausalLM KimiK25ForConditionalGeneration KimiVLForConditionalGeneration
    """,
    attention.nemotron_nas: "DeciLMForCausalLM",
    attention.gemma3n: "Gemma3nForCausalLM Gemma3nForConditionalGeneration",
    attention.gemma4: "Gemma4ForCausalLM Gemma4ForConditionalGeneration",
    attention.alternating: "GptOssForCausalLM",
    attention.llama4: "Llama4ForCausalLM Llama4ForConditionalGeneration",
    attention.longcat: "LongcatFlashForCausalLM",
    attention.mimo_v2: "MiMoV2FlashForCausalLM",
}
_HYBRID: Final = partial(Architecture, hybrid=True)
_QWEN_STATE: Final = "mamba_ssm_dtype"
# models/config.py, NemotronHForCausalLMConfig: float16 up to 0.19.
_NEMOTRON_STATES: Final = (((0, 13, 0), "float16"), ((0, 20, 0), "float32"))

ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {name: Architecture(build=build) for build, names in _ATTENTION.items() for name in names.split()}
    | {
        "WhisperForConditionalGeneration": Architecture(build=attention.whisper, encoder_decoder=True),
        "FalconMambaForCausalLM": Architecture(build=recurrent.mamba, states_only=True, caches_states=True),
        "Mamba2ForCausalLM": Architecture(build=recurrent.mamba2, states_only=True, caches_states=True),
        "MambaForCausalLM": Architecture(build=recurrent.mamba, states_only=True, caches_states=True),
        "BambaForCausalLM": _HYBRID(build=recurrent.bamba, caches_states=True),
        "FalconH1ForCausalLM": _HYBRID(build=recurrent.falcon_h1, caches_states=True),
        "GraniteMoeHybridForCausalLM": _HYBRID(build=recurrent.granite_hybrid, caches_states=True),
        "JambaForCausalLM": _HYBRID(build=recurrent.jamba, caches_states=True),
        "KimiLinearForCausalLM": _HYBRID(build=recurrent.kimi_linear),
        "Lfm2ForCausalLM": _HYBRID(build=recurrent.lfm2),
        "Lfm2MoeForCausalLM": _HYBRID(build=recurrent.lfm2),
        "MiniMaxForCausalLM": _HYBRID(build=recurrent.minimax),
        "MiniMaxM1ForCausalLM": _HYBRID(build=recurrent.minimax),
        "MiniMaxText01ForCausalLM": _HYBRID(build=recurrent.minimax),
        "NemotronHForCausalLM": _HYBRID(
            build=recurrent.nemotron_h,
            caches_states=True,
            own_state_dtype="mamba_ssm_cache_dtype",
            state_dtypes=_NEMOTRON_STATES,
        ),
        "OlmoHybridForCausalLM": _HYBRID(build=recurrent.gated_delta),
        "Qwen3NextForCausalLM": _HYBRID(build=recurrent.gated_delta),
        "Qwen3_5ForConditionalGeneration": _HYBRID(build=recurrent.gated_delta, own_state_dtype=_QWEN_STATE),
        "Qwen3_5MoeForConditionalGeneration": _HYBRID(build=recurrent.gated_delta, own_state_dtype=_QWEN_STATE),
        "Zamba2ForCausalLM": _HYBRID(build=recurrent.zamba2, caches_states=True),
    }
)
