"""A checkpoint's tensors after quantization: the bits that a weight takes, and the scales that come with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from highwater.plan.checkpoint import Tensor, text_config, whole
from highwater.plan.json_file import ConfigJson
from highwater.units import ceil_div
from kvplan.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The form in which the weights of linear layers are stored."""

    name: str  # as people call it
    bits: int  # of one weight
    group: int = 0  # the weights of a row that share a scale; 0: the whole row; -1: the whole tensor
    rows: int = 1  # that share a scale (128 where scales are for square blocks)
    scale_bits: int = 32  # of one scale
    zero_bits: int = 0  # of one zero point; 0: the scheme has no zero points
    experts_only: bool = False  # only a mixture's experts are quantized
    ignored: tuple[str, ...] = ()  # modules that stay as they are, as the config names them
    slack: float = 0.01  # the share by which the device may hold more or less, as kernels pad and repack weights


_ONLINE = {"fp8": Quantization(name="fp8", bits=8, group=-1)}
_NVFP4 = Quantization(name="nvfp4", bits=4, group=16, scale_bits=8, slack=0.03)
_MXFP4 = Quantization(name="mxfp4", bits=4, group=32, scale_bits=8, experts_only=True, slack=0.02)
_SCHEMES = {
    "fbgemm_fp8": Quantization(name="fp8", bits=8),
    "bitsandbytes": Quantization(name="bitsandbytes", bits=8, slack=0.05),
    "mxfp4": _MXFP4,
}
_IGNORED_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")


def quantization_of(config: ConfigJson, flag: str | None) -> Quantization | None:
    """Return how a checkpoint is quantized, or vLLM does it at load by `--quantization`; None: not at all.

    Raises PlanError: the scheme is unknown.
    """
    described = config.get("quantization_config") or text_config(config).get("quantization_config")
    if not isinstance(described, Mapping):
        if flag is None:
            return None
        if flag not in _ONLINE:
            raise PlanError(
                f"--quantization is {flag!r}, but the config.json has no quantization_config: of weights in 16 bits"
                f" the size is known for {', '.join(sorted(_ONLINE))} only"
            )
        return _ONLINE[flag]
    method = str(described.get("quant_method", ""))
    if method.startswith("modelopt") and "quantization" in described:  # as ModelOpt's own file nests it
        described = described["quantization"]
        if not isinstance(described, Mapping):
            raise PlanError(
                f"quantization_config.quantization is {described!r} in the config.json: it should be an object"
            )
    ignored: list[str] = []
    for key in _IGNORED_KEYS:
        names = described.get(key)
        if names is not None and not isinstance(names, list | tuple):
            raise PlanError(
                f"quantization_config.{key} is {names!r} in the config.json: it should be a list of modules"
            )
        ignored += map(str, names or ())
    scheme = _scheme(method, described)
    if scheme is None:
        raise PlanError(
            f"quantization_config.quant_method is {method!r} in the config.json: the size of such weights cannot be"
            " derived from a config.json; give the folder that holds its safetensors files"
        )
    return replace(scheme, ignored=tuple(ignored))


def _scheme(method: str, described: ConfigJson) -> Quantization | None:
    match method:
        case "compressed-tensors":
            return _compressed_tensors(described)
        case "bitsandbytes" if described.get("load_in_4bit") or described.get("_load_in_4bit"):
            return Quantization(name=method, bits=4, group=64, slack=0.05)  # NF4: a scale for 64 weights
        case "fp8":
            return _fp8(described.get("weight_block_size"), -1)
        case "gptq" | "awq" | "gptq_marlin" | "awq_marlin":
            bits = whole(described, "bits", "w_bit", default=4)
            group = max(whole(described, "group_size", "q_group_size", default=128, least=-1), 0)
            return Quantization(name=method, bits=bits, group=group, scale_bits=16, zero_bits=bits, slack=0.03)
        case "modelopt" | "modelopt_fp4":
            algorithm = str(described.get("quant_algo", "NVFP4")).upper()
            return {"FP8": _ONLINE["fp8"], "NVFP4": _NVFP4}.get(algorithm)
    return _SCHEMES.get(method)


def _fp8(block: object, group: int) -> Quantization:
    """Return 8 bit floats with scales for square blocks, for rows (0) or for the whole tensor (-1)."""
    if isinstance(block, list | tuple) and len(block) == 2:  # noqa: PLR2004 - rows and columns
        named = dict(zip(("rows of a block", "columns of a block"), block, strict=True))
        rows, columns = (whole(named, key) for key in named)
        return Quantization(name="fp8", bits=8, group=columns, rows=rows)
    return Quantization(name="fp8", bits=8, group=group)


def _compressed_tensors(described: ConfigJson) -> Quantization | None:
    groups = described.get("config_groups")
    first: Any = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    bits = whole(weights, "num_bits", default=0, least=0)
    group = whole(weights, "group_size", default=0, least=-1)
    one_scale = -1 if str(weights.get("strategy")) == "tensor" else 0
    match weights.get("type"), bits:
        case "float", 8:
            return _fp8(weights.get("block_structure"), one_scale)
        case "float", 4:
            return _NVFP4
        case "int", 4 | 8 if group > 0:
            return Quantization(name=f"w{bits}a16", bits=bits, group=group, scale_bits=16, slack=0.03)
        case "int", 4 | 8:
            return Quantization(name=f"w{bits}a8", bits=bits, group=one_scale)
        case _:
            return None


# Parts that vLLM never quantizes, whatever the config says: they are no linear layers, or are made without a scheme.
_NEVER = re.compile(
    r"(embed|norm|lm_head|conv1d|patch_|positional|sinks|mlp\.gate\.|shared_expert_gate|in_proj_ba|A_log|dt_bias|"
    r"vision_|visual\.|multi_modal_projector)"
)


def quantized(tensor: Tensor, scheme: Quantization) -> Iterator[Tensor]:
    """Yield what is stored in place of a tensor."""
    matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight")  # noqa: PLR2004 - rows and columns
    if (
        not matrix
        or _NEVER.search(tensor.name)
        or (scheme.experts_only and ".experts." not in tensor.name)
        or is_ignored(tensor.name.removesuffix(".weight"), scheme.ignored)
    ):
        yield tensor
        return
    rows, columns = tensor.shape
    yield Tensor(tensor.name, (rows, columns), scheme.bits, floating=False)
    scales: tuple[int, ...] = (1,)
    if scheme.group >= 0:
        scales = ceil_div(rows, scheme.rows), ceil_div(columns, scheme.group) if scheme.group else 1
    yield Tensor(f"{tensor.name}_scale", scales, scheme.scale_bits, floating=False)
    if scheme.zero_bits:
        yield Tensor(f"{tensor.name}_zero_point", scales, scheme.zero_bits, floating=False)


def is_ignored(module: str, ignored: tuple[str, ...]) -> bool:
    """Return whether a config's list of unquantized modules names this one.

    Names may be whole, a leading or trailing part, or a pattern after ``re:``; a wildcard ends ModelOpt's.
    """
    for name in ignored:
        if name.startswith("re:"):
            try:
                if re.match(name[3:], module):
                    return True
            except re.error:
                continue
        elif module == name or module.startswith(name.rstrip("*.") + ".") or module.endswith("." + name):
            return True
    return False
