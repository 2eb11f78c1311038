"""Models with recurrent states: state spaces, gated delta nets, linear attention, short convolutions, and hybrids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from highwater.plan.models.attention import head_size, kv_heads, latent_width, self_attention
from highwater.plan.models.kept import Kept, Latent, RecurrentState, Shapes, StateForm
from highwater.plan.models.reading import Config, layer_types
from kvplan.errors import PlanError

Builder = Callable[[Config], tuple[Kept, ...]]
ATTENTION_NAMES = frozenset({"attention", "full_attention", "*"})
STATE_NAMES = frozenset({"mamba", "linear_attention", "conv", "M"})
OTHER_NAMES = frozenset({"mlp", "moe", "-", "E"})


def _divided(what: str, number: int, ranks: int) -> int:
    """Return one rank's part, as vLLM's `divide` does."""
    if number % ranks:
        raise PlanError(f"--tensor-parallel-size: {ranks}; the {what} is {number}, and vLLM divides it evenly")
    return number // ranks


def _mamba1_form(intermediate: int, state: int, kernel: int) -> StateForm:
    def shapes(ranks: int, _drafts: int) -> Shapes:
        width = _divided("intermediate size", intermediate, ranks)
        return (kernel - 1, width), (width, state)

    return StateForm(shapes)


def _mamba2_form(intermediate: int, sizes: Iterable[int], *, counts_drafts: bool = False) -> StateForm:
    """Return the state of a state space with heads (Mamba 2, Bamba, Nemotron-H, Falcon-H1, Granite 4, Zamba 2).

    ``counts_drafts``: the convolution, whose kernel is the last size, keeps the tokens of a draft too.
    """
    groups, heads, head, state, kernel = sizes

    def shapes(ranks: int, drafts: int) -> Shapes:
        all_groups = ranks if groups % ranks else groups  # else each rank has the group of its heads
        width = _divided("convolution's width", intermediate + 2 * all_groups * state, ranks)
        rank_heads = _divided("number of state heads", heads, ranks)
        return (kernel - 1 + (drafts if counts_drafts else 0), width), (rank_heads, head, state)

    return StateForm(shapes, keeps_checkpoints=True)


def mamba(config: Config) -> tuple[Kept, ...]:
    """A state space in every layer, no attention."""
    wide = config.optional("intermediate_size") or config.number("expand") * config.number("hidden_size")
    return _states(config, _mamba1_form(wide, config.number("state_size"), config.number("conv_kernel")))


def mamba2(config: Config) -> tuple[Kept, ...]:
    """A state space with heads in every layer, no attention."""
    wide = config.number("expand") * config.number("hidden_size")
    sizes = map(config.number, ("n_groups", "num_heads", "head_dim", "state_size", "conv_kernel"))
    return _states(config, _mamba2_form(wide, sizes, counts_drafts=True))


def jamba(config: Config) -> tuple[Kept, ...]:
    """Mamba, and attention in one layer of each period."""
    layers, period = config.number("num_hidden_layers"), config.number("attn_layer_period")
    offset = config.number("attn_layer_offset", 0)
    wide = config.number("mamba_expand") * config.number("hidden_size")
    form = _mamba1_form(wide, config.number("mamba_d_state"), config.number("mamba_d_conv"))
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
        kept += [self_attention(i, heads, size), RecurrentState(layer=i, name=f"model.layers.{i}.mamba", form=form)]
    return tuple(kept)


def nemotron_h(config: Config) -> tuple[Kept, ...]:
    """Mamba 2, attention, or neither, by a pattern with one letter a layer."""
    pattern = config.get("hybrid_override_pattern")
    types = list(pattern) if isinstance(pattern, str) else list(_named(config, ("layers_block_type", "layer_types")))
    wide = config.number("mamba_num_heads") * config.number("mamba_head_dim")
    keys = ("n_groups", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel")
    form = _mamba2_form(wide, map(config.number, keys), counts_drafts=True)
    return _mixed(config, types, form, head_size(config))


def zamba2(config: Config) -> tuple[Kept, ...]:
    """Mamba 2 in every layer, and attention beside it in hybrid ones.

    Raises PlanError: ``layers_block_type`` is missing or has other types.
    """
    types = config.names("layers_block_type")
    if types is None:
        raise config.refused("layers_block_type", None, "a list of mamba and hybrid is needed")
    size = zamba2_head_size(config)
    expanded, heads = config.number("mamba_expand") * config.number("hidden_size"), config.number("n_mamba_heads")
    groups, head = config.number("mamba_ngroups"), config.optional("mamba_headdim") or expanded // heads
    form = _mamba2_form(expanded, (groups, heads, head, config.number("mamba_d_state"), config.number("mamba_d_conv")))
    kept: list[Kept] = []
    for i, each in enumerate(types):
        if each == "hybrid":
            kept.append(self_attention(i, kv_heads(config), size, name=f"model.layers.{i}.attn"))
        kept.append(RecurrentState(layer=i, name=f"model.layers.{i}.mamba", form=form))
    return tuple(kept)


def zamba2_head_size(config: Config) -> int:
    """Return the head size of Zamba 2's attention, twice the plain one where the file does not give it."""
    return config.optional("attention_head_dim") or 2 * config.number("hidden_size") // config.number(
        "num_attention_heads"
    )


def gated_delta(config: Config) -> tuple[Kept, ...]:
    """A gated delta net or attention, layer by layer (Qwen3-Next, Qwen3.5, OLMo hybrid).

    Raises PlanError: ``layer_types`` is missing or has other types.
    """
    types = layer_types(config)
    if types is None:
        raise config.refused("layer_types", None, "linear_attention or full_attention is needed for each layer")
    key_heads, value_heads = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
    key_size, value_size = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
    kernel = config.number("linear_conv_kernel_dim")

    def shapes(ranks: int, drafts: int) -> Shapes:
        width = _divided("convolution's width", key_size * key_heads * 2 + value_size * value_heads, ranks)
        heads = _divided("linear_num_value_heads", value_heads, ranks)
        return (kernel - 1 + drafts, width), (heads, value_size, key_size)

    form = StateForm(shapes)
    return _mixed(config, types, form, head_size(config))


def lfm2(config: Config) -> tuple[Kept, ...]:
    """A short convolution or attention, layer by layer."""
    full = config.get("full_attn_idxs")
    types: tuple[str, ...]
    if config.get("layer_types") is None and isinstance(full, list):
        types = tuple("full_attention" if i in full else "conv" for i in range(config.number("num_hidden_layers")))
    else:
        types = _named(config, ("layer_types",))
    width, kernel = config.optional("conv_dim") or config.number("hidden_size"), config.number("conv_L_cache")
    form = StateForm(lambda ranks, _drafts: ((kernel - 1, _divided("conv_dim", width, ranks)),), ("conv",))
    return _mixed(config, types, form, plain_head_size(config))


def minimax(config: Config) -> tuple[Kept, ...]:
    """Lightning attention or full attention, layer by layer."""
    listed = config.get("attn_type_list")
    if isinstance(listed, list):
        types = tuple("attention" if each == 1 else "linear_attention" for each in listed)
    else:
        types = _named(config, ("layer_types",))
    heads, size = config.number("num_attention_heads"), head_size(config)
    form = StateForm(lambda ranks, _drafts: ((heads // ranks, size, size),), ("conv",))
    return _mixed(config, types, form, size)


def kimi_linear(config: Config) -> tuple[Kept, ...]:
    """Kimi's delta attention, and MLA in the layers that are not named for it (numbered from 1).

    Raises PlanError: ``linear_attn_config`` is missing or invalid.
    """
    linear = config.mapping("linear_attn_config")
    named = linear.get("kda_layers")
    if not isinstance(named, list):
        raise config.refused("linear_attn_config.kda_layers", named, "a list of layers, from 1 on, is needed")
    try:
        heads, size, kernel = (int(linear[key]) for key in ("num_heads", "head_dim", "short_conv_kernel_size"))
    except (KeyError, TypeError, ValueError) as exc:
        right = "num_heads, head_dim and short_conv_kernel_size are needed"
        raise config.refused("linear_attn_config", dict(linear), right) from exc
    width = latent_width(config)

    def shapes(ranks: int, _drafts: int) -> Shapes:
        conv = (kernel - 1, _divided("projection", heads * size, ranks))
        return conv, conv, conv, (_divided("number of state heads", heads, ranks), size, size)

    form = StateForm(shapes, ("conv", "conv", "conv", "float32"))
    return tuple(
        RecurrentState(layer=i, name=f"model.layers.{i}.self_attn", form=form)
        if i + 1 in named
        else Latent(layer=i, name=f"model.layers.{i}.self_attn.mla_attn", width=width)
        for i in range(config.number("num_hidden_layers"))
    )


def plain_head_size(config: Config) -> int:
    return config.number("hidden_size") // config.number("num_attention_heads")


def _mamba2_of_d(config: Config, intermediate: int | None = None) -> StateForm:
    """Return a state of Mamba 2 by Bamba's key names."""
    wide = intermediate or int(config.number("mamba_expand") * config.number("hidden_size"))
    heads = config.number("mamba_n_heads")
    size = wide // heads if config.get("mamba_d_head") == "auto" else config.number("mamba_d_head")
    groups, state, kernel = map(config.number, ("mamba_n_groups", "mamba_d_state", "mamba_d_conv"))
    return _mamba2_form(wide, (groups, heads, size, state, kernel))


def _named(config: Config, keys: tuple[str, ...], default: str | None = None) -> tuple[str, ...]:
    for key in keys:
        types = config.names(key)
        if types is not None:
            return types
    if default is None:
        raise config.refused(keys[0], None, "one type for each layer is needed")
    return (default,) * config.number("num_hidden_layers")


def _mixed(config: Config, types: Sequence[str], form: StateForm, size: int) -> tuple[Kept, ...]:
    layers = config.optional("num_hidden_layers")
    if layers is not None and len(types) != layers:
        raise config.refused("num_hidden_layers", layers, f"{len(types)} types of layers are listed")
    heads = kv_heads(config)
    kept: list[Kept] = []
    for i, each in enumerate(types):
        if each in ATTENTION_NAMES:
            kept.append(self_attention(i, heads, size))
        elif each in STATE_NAMES:
            kept.append(RecurrentState(layer=i, name=f"model.layers.{i}.mixer", form=form))
        elif each not in OTHER_NAMES:
            raise config.refused("layer_types", each, "this type of layer is not known")
    return tuple(kept)


def _states(config: Config, form: StateForm) -> tuple[Kept, ...]:
    layers = range(config.number("num_hidden_layers"))
    return tuple(RecurrentState(layer=i, name=f"backbone.layers.{i}.mixer", form=form) for i in layers)
