"""Element types: of the weights and the activations, of the KV cache, of recurrent states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from highwater.plan.models.kept import Model, Role
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags
from kvplan.generations import Generation
from kvplan.versions import Release

MODEL_BYTES: Final = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
# vllm/config/cache.py, CacheDType: the version that has each first (read at the first and last patch of each minor).
CACHE_TYPES: Final[dict[str, Release]] = {
    "auto": (0, 0, 0),
    "bfloat16": (0, 11, 0),
    "fp8": (0, 0, 0),
    "fp8_e4m3": (0, 0, 0),
    "fp8_e5m2": (0, 0, 0),
    "fp8_inc": (0, 0, 0),
    "fp8_ds_mla": (0, 11, 0),
    "float16": (0, 18, 0),
    "int8_per_token_head": (0, 20, 0),
    "fp8_per_token_head": (0, 20, 0),
    "nvfp4": (0, 20, 0),
}
_STATE_TYPES: Final[dict[str, Release]] = {
    "auto": (0, 0, 0),
    "float32": (0, 0, 0),
    "float16": (0, 13, 0),
    "bfloat16": (0, 22, 0),
}
# v1/kv_cache_interface.py: the packed latent vector of DeepSeek's sparse attention.
PACKED_LATENT_BYTES: Final = 656
SCALE_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    model: str  # of weights and activations
    cache: str  # of the KV cache, as vLLM names it once resolved; ``auto``: the model's
    convolution: str  # of the convolutions' states
    state: str  # of the recurrent states themselves

    @property
    def cache_bytes(self) -> int:
        """The bytes of one element of the KV cache; packed formats count in bytes."""
        return MODEL_BYTES.get(self.model if self.cache == "auto" else self.cache, 1)

    def token_head_bytes(self, head_size: int) -> int | None:
        """Return the bytes of one token and head where they are no product of element and head size."""
        match self.cache:
            case "nvfp4":  # 4-bit elements and an 8-bit scale for each 16 of them, for key and value
                return 2 * (head_size // 2 + head_size // 16)
            case "int8_per_token_head" | "fp8_per_token_head":  # a 32-bit scale each for key and value
                return 2 * head_size + 2 * SCALE_BYTES
            case _:
                return None

    def role_bytes(self, role: Role) -> int:
        """Return the bytes of one element of a state tensor."""
        if role == "float32":
            return MODEL_BYTES["float32"]
        return MODEL_BYTES[self.convolution if role == "conv" else self.state]


def resolve_elements(model: Model, generation: Generation, flags: EngineFlags) -> Elements:
    """Raises PlanError: the config names an unknown element type."""
    own = _model_type(model, flags.dtype)
    conv = _state_type("mamba_cache_dtype", flags.mamba_cache_dtype, generation)
    conv = own if conv == "auto" else conv
    given = _state_type("mamba_ssm_cache_dtype", flags.mamba_ssm_cache_dtype, generation)
    if given == "auto" and model.state_dtype is not None:
        given = model.state_dtype  # models/config.py: Nemotron-H and Qwen3.5 name it in their config.json
    if given != "auto" and given not in MODEL_BYTES:
        raise PlanError(f"mamba_ssm_dtype: {given!r}; one of {', '.join(MODEL_BYTES)} is needed")
    return Elements(
        model=own,
        cache=_cache_type(model, flags.kv_cache_dtype or "auto", generation),
        convolution=conv,
        state=conv if given == "auto" else given,
    )


def _model_type(model: Model, given: str | None) -> str:
    """Return the type of the flag, else the checkpoint's as vLLM serves it."""
    if given is not None and given != "auto":
        if given not in MODEL_BYTES:
            raise PlanError(f"--dtype: {given!r}; auto or one of {', '.join(MODEL_BYTES)} is needed")
        return given
    own = served_type(model.dtype or "")
    if own not in MODEL_BYTES:
        raise PlanError(f"dtype: {own!r}; one of {', '.join(MODEL_BYTES)} is needed")
    return own


def served_type(named: str) -> str:
    """Follow _resolve_auto_dtype: a float32 checkpoint, or one that names no type, is served in bfloat16."""
    return "bfloat16" if named in ("", "float32", "float") else named


def _state_type(key: str, given: str | None, generation: Generation) -> str:
    flag = "--" + key.replace("_", "-")
    since = _STATE_TYPES.get(given or "auto")
    if since is None or since > generation.release:
        known = ", ".join(name for name, first in _STATE_TYPES.items() if first <= generation.release)
        raise PlanError(f"{flag}: {given!r}; vLLM {generation.version} takes {known}")
    return given or "auto"


def _cache_type(model: Model, given: str, generation: Generation) -> str:
    since = CACHE_TYPES.get(given)
    if since is None or since > generation.release:
        known = ", ".join(name for name, first in CACHE_TYPES.items() if first <= generation.release)
        raise PlanError(f"--kv-cache-dtype: {given!r}; for vLLM {generation.version} these can be planned: {known}")
    if given == "auto":
        given = _checkpoint_type(model, generation)
    scheme = model.quantization.get("kv_cache_scheme")
    is_compressed = str(model.quantization.get("quant_method", "")).replace("_", "-") == "compressed-tensors"
    # layers/attention/attention.py: up to 0.22 the checkpoint's scheme wins even over the flag.
    if is_compressed and scheme and not model.is_latent and (given == "auto" or generation.release < (0, 23, 0)):
        given = "fp8"
    if model.is_sparse:
        if given == "bfloat16":  # models/config.py, DeepseekV32ForCausalLM
            return "auto"
        if given.startswith("fp8"):  # FlashMLA's sparse kernels pack it; FlashInfer's on Blackwell do not
            return "fp8_ds_mla"
    if given == "fp8_ds_mla" and not model.is_sparse:
        raise PlanError(f"--kv-cache-dtype: {given!r}; it is the format of models with sparse MLA, use fp8")
    return given


def _checkpoint_type(model: Model, generation: Generation) -> str:
    """The type that a ModelOpt checkpoint wants (utils/torch_utils.py, resolve_kv_cache_dtype_string, from 0.14)."""
    quantization = model.quantization
    if generation.release < (0, 14, 0) or not str(quantization.get("quant_method", "")).startswith("modelopt"):
        return "auto"
    inner = quantization.get("quantization", quantization)
    if not isinstance(inner, Mapping):
        raise PlanError(f"quantization_config.quantization: {inner!r}; an object is needed")
    wanted = None
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        wanted = wanted or inner.get(key) or quantization.get(key)
    if isinstance(wanted, Mapping):
        match wanted.get("type"), wanted.get("num_bits"):
            case "float", 8 if wanted.get("dynamic") is False:
                wanted = "fp8"
            case "float", 4:  # from 0.20 on, the version that has the type
                wanted = "nvfp4"
            case _:
                wanted = None
    match str(wanted).lower():
        case "fp8":
            return "fp8_e4m3"
        case "nvfp4" if generation.release >= CACHE_TYPES["nvfp4"]:
            return "nvfp4"
        case _:
            return "auto"
