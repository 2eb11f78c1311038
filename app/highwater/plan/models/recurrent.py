"""Models with recurrent states: state spaces, gated delta nets, linear attention, short convolutions, and hybrids."""

from __future__ import annotations

from collections.abc import Callable

from highwater.plan.models.attention import head_size, kv_heads, latent_width
from highwater.plan.models.kept import (
    Attention,
    GatedDelta,
    Kept,
    KimiDelta,
    Latent,
    Linear,
    Mamba1,
    Mamba2,
    ShortConvolution,
    State,
    StateForm,
)
from highwater.plan.models.reading import Config, layer_types

ATTENTION_NAMES = frozenset({"attention", "full_attention", "*"})
STATE_NAMES = frozenset({"mamba", "linear_attention", "conv", "M"})
OTHER_NAMES = frozenset({"mlp", "moe", "-", "E"})


def mamba(config: Config) -> tuple[Kept, ...]:
    """A state space in every layer, no attention."""
    form = Mamba1(
        intermediate=config.optional("intermediate_size") or config.number("expand") * config.number("hidden_size"),
        state=config.number("state_size"),
        kernel=config.number("conv_kernel"),
    )
    return _states(config.number("num_hidden_layers"), form)


def mamba2(config: Config) -> tuple[Kept, ...]:
    """A state space with heads in every layer, no attention."""
    form = Mamba2(
        intermediate=config.number("expand") * config.number("hidden_size"),
        groups=config.number("n_groups"),
        heads=config.number("num_heads"),
        head_size=config.number("head_dim"),
        state=config.number("state_size"),
        kernel=config.number("conv_kernel"),
        counts_drafts=True,
    )
    return _states(config.number("num_hidden_layers"), form)


def jamba(config: Config) -> tuple[Kept, ...]:
    """Mamba, and attention in one layer of each period."""
    layers, period = config.number("num_hidden_layers"), config.number("attn_layer_period")
    offset = config.number("attn_layer_offset", 0)
    form = Mamba1(
        intermediate=config.number("mamba_expand") * config.number("hidden_size"),
        state=config.number("mamba_d_state"),
        kernel=config.number("mamba_d_conv"),
    )
    types = ["attention" if i % period == offset else "mamba" for i in range(layers)]
    return _mixed(config, types, form, plain_head_size(config))


def bamba(config: Config) -> tuple[Kept, ...]:
    """Mamba 2, and attention in the layers that are named."""
    named = config.get("attn_layer_indices") or []
    types = ["attention" if i in named else "mamba" for i in range(config.number("num_hidden_layers"))]
    return _mixed(config, types, _mamba2_of_d(config), plain_head_size(config))


def granite_hybrid(config: Config) -> tuple[Kept, ...]:
    """Mamba 2 or attention, layer by layer."""
    types = _named(config, ("layer_types", "layers_block_type"), default="mamba")
    return _mixed(config, types, _mamba2_of_d(config), plain_head_size(config))


def falcon_h1(config: Config) -> tuple[Kept, ...]:
    """Mamba 2 and attention side by side in every layer."""
    form = _mamba2_of_d(config, config.optional("mamba_d_ssm"))
    heads, size = kv_heads(config), head_size(config)
    kept: list[Kept] = []
    for i in range(config.number("num_hidden_layers")):
        kept.append(Attention(layer=i, name=f"model.layers.{i}.self_attn.attn", kv_heads=heads, head_size=size))
        kept.append(State(layer=i, name=f"model.layers.{i}.mamba", form=form))
    return tuple(kept)


def nemotron_h(config: Config) -> tuple[Kept, ...]:
    """Mamba 2, attention, or neither, by a pattern with one letter a layer."""
    pattern = config.get("hybrid_override_pattern")
    types = list(pattern) if isinstance(pattern, str) else list(_named(config, ("layers_block_type", "layer_types")))
    form = Mamba2(
        intermediate=config.number("mamba_num_heads") * config.number("mamba_head_dim"),
        groups=config.number("n_groups"),
        heads=config.number("mamba_num_heads"),
        head_size=config.number("mamba_head_dim"),
        state=config.number("ssm_state_size"),
        kernel=config.number("conv_kernel"),
        counts_drafts=True,
    )
    return _mixed(config, types, form, head_size(config))


def zamba2(config: Config) -> tuple[Kept, ...]:
    """Mamba 2 in every layer, and attention beside it in hybrid ones."""
    types = config.names("layers_block_type")
    if types is None:
        raise config.refused("layers_block_type", None, "a list of mamba and hybrid is needed")
    heads = config.number("num_attention_heads")
    size = config.optional("attention_head_dim") or 2 * config.number("hidden_size") // heads
    expanded = config.number("mamba_expand") * config.number("hidden_size")
    state_heads = config.number("n_mamba_heads")
    form = Mamba2(
        intermediate=expanded,
        groups=config.number("mamba_ngroups"),
        heads=state_heads,
        head_size=config.optional("mamba_headdim") or expanded // state_heads,
        state=config.number("mamba_d_state"),
        kernel=config.number("mamba_d_conv"),
    )
    kept: list[Kept] = []
    for i, each in enumerate(types):
        if each == "hybrid":
            kept.append(Attention(layer=i, name=f"model.layers.{i}.attn", kv_heads=kv_heads(config), head_size=size))
        kept.append(State(layer=i, name=f"model.layers.{i}.mamba", form=form))
    return tuple(kept)


def gated_delta(config: Config) -> tuple[Kept, ...]:
    """A gated delta net or attention, layer by layer (Qwen3-Next, Qwen3.5, OLMo hybrid)."""
    types = layer_types(config)
    if types is None:
        raise config.refused("layer_types", None, "linear_attention or full_attention is needed for each layer")
    form = GatedDelta(
        key_heads=config.number("linear_num_key_heads"),
        value_heads=config.number("linear_num_value_heads"),
        key_size=config.number("linear_key_head_dim"),
        value_size=config.number("linear_value_head_dim"),
        kernel=config.number("linear_conv_kernel_dim"),
    )
    return _mixed(config, types, form, head_size(config))


def lfm2(config: Config) -> tuple[Kept, ...]:
    """A short convolution or attention, layer by layer."""
    full = config.get("full_attn_idxs")
    types: tuple[str, ...]
    if config.get("layer_types") is None and isinstance(full, list):
        types = tuple("full_attention" if i in full else "conv" for i in range(config.number("num_hidden_layers")))
    else:
        types = _named(config, ("layer_types",))
    width = config.optional("conv_dim") or config.number("hidden_size")
    form = ShortConvolution(width=width, kernel=config.number("conv_L_cache"))
    return _mixed(config, types, form, plain_head_size(config))


def minimax(config: Config) -> tuple[Kept, ...]:
    """Lightning attention or full attention, layer by layer."""
    listed = config.get("attn_type_list")
    if isinstance(listed, list):
        types = tuple("attention" if each == 1 else "linear_attention" for each in listed)
    else:
        types = _named(config, ("layer_types",))
    form = Linear(heads=config.number("num_attention_heads"), head_size=head_size(config))
    return _mixed(config, types, form, head_size(config))


def kimi_linear(config: Config) -> tuple[Kept, ...]:
    """Kimi's delta attention, and MLA in the layers that are not named for it (numbered from 1)."""
    linear = config.mapping("linear_attn_config")
    named = linear.get("kda_layers")
    if not isinstance(named, list):
        raise config.refused("linear_attn_config.kda_layers", named, "a list of layers, from 1 on, is needed")
    try:
        form = KimiDelta(
            heads=int(linear["num_heads"]),
            head_size=int(linear["head_dim"]),
            kernel=int(linear["short_conv_kernel_size"]),
        )
    except (KeyError, TypeError, ValueError) as exc:
        right = "num_heads, head_dim and short_conv_kernel_size are needed"
        raise config.refused("linear_attn_config", dict(linear), right) from exc
    width = latent_width(config)
    return tuple(
        State(layer=i, name=f"model.layers.{i}.self_attn", form=form)
        if i + 1 in named
        else Latent(layer=i, name=f"model.layers.{i}.self_attn.mla_attn", width=width)
        for i in range(config.number("num_hidden_layers"))
    )


def plain_head_size(config: Config) -> int:
    """Return the head size of models that take no head_dim."""
    return config.number("hidden_size") // config.number("num_attention_heads")


def _mamba2_of_d(config: Config, intermediate: int | None = None) -> Mamba2:
    """Mamba 2 with Bamba's key names."""
    wide = intermediate or int(config.number("mamba_expand") * config.number("hidden_size"))
    heads = config.number("mamba_n_heads")
    size = wide // heads if config.get("mamba_d_head") == "auto" else config.number("mamba_d_head")
    return Mamba2(
        intermediate=wide,
        groups=config.number("mamba_n_groups"),
        heads=heads,
        head_size=size,
        state=config.number("mamba_d_state"),
        kernel=config.number("mamba_d_conv"),
    )


def _named(config: Config, keys: tuple[str, ...], default: str | None = None) -> tuple[str, ...]:
    for key in keys:
        types = config.names(key)
        if types is not None:
            return types
    if default is None:
        raise config.refused(keys[0], None, "one type for each layer is needed")
    return (default,) * config.number("num_hidden_layers")


def _mixed(config: Config, types: tuple[str, ...] | list[str], form: StateForm, size: int) -> tuple[Kept, ...]:
    layers = config.optional("num_hidden_layers")
    if layers is not None and len(types) != layers:
        raise config.refused("num_hidden_layers", layers, f"{len(types)} types of layers are listed")
    heads = kv_heads(config)
    kept: list[Kept] = []
    for i, each in enumerate(types):
        if each in ATTENTION_NAMES:
            kept.append(Attention(layer=i, name=f"model.layers.{i}.self_attn.attn", kv_heads=heads, head_size=size))
        elif each in STATE_NAMES:
            kept.append(State(layer=i, name=f"model.layers.{i}.mixer", form=form))
        elif each not in OTHER_NAMES:
            raise config.refused("layer_types", each, "this type of layer is not known")
    return tuple(kept)


def _states(layers: int, form: StateForm) -> tuple[Kept, ...]:
    return tuple(State(layer=i, name=f"backbone.layers.{i}.mixer", form=form) for i in range(layers))


Builder = Callable[[Config], tuple[Kept, ...]]
