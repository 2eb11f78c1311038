"""The number of tokens in a block: the sizes of the attention kernels, changed to hold a hybrid's states."""

from __future__ import annotations

import math
from dataclasses import dataclass

from highwater.plan import ascend
from highwater.plan.models.elements import Elements
from highwater.plan.models.kept import Model, RecurrentState
from highwater.units import ceil_div
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags
from kvplan.generations import Generation

CUDA_BLOCK = 16
CPU_BLOCK = 128
HOPPER, BLACKWELL = 9, 10
# The blocks of MLA's kernels, and the only `qk_nope_head_dim` that FlashInfer's takes.
FLASHINFER_BLOCK, FLASHMLA_BLOCK, CUTLASS_BLOCK = 32, 64, 128
FLASHINFER_HEAD_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    attention: int  # tokens a block of attention layers holds
    state: int  # tokens that one state of a recurrent layer stands for
    state_page_bytes: int | None = None  # the size that the states' pages are padded to; None: they are not


def block_sizes(
    model: Model,
    flags: EngineFlags,
    generation: Generation,
    elements: Elements,
    *,
    max_model_len: int,
    mamba_cache_mode: str,
    speculative: int,
) -> Blocks:
    """Return the block sizes that vLLM ends up with. Raises PlanError: a given size makes no sense."""
    start = _starting_size(model, flags, generation, elements)
    given_state = flags.mamba_block_size
    if given_state is not None and mamba_cache_mode == "none":
        raise PlanError(f"--mamba-block-size: {given_state}; vLLM takes it with prefix caching only")
    _check_platform(model, flags, generation)
    states = [part for part in model.kept if isinstance(part, RecurrentState)]
    if not states:
        return Blocks(attention=start, state=start)
    if not model.is_hybrid:
        return Blocks(attention=start, state=given_state or (max_model_len if mamba_cache_mode == "none" else start))
    token = _attention_token_bytes(model, flags, elements)
    shapes = states[0].form.shapes(flags.tensor_parallel_size, speculative)
    state_page = sum(
        math.prod(shape) * elements.role_bytes(role) for shape, role in zip(shapes, states[0].form.roles, strict=True)
    )
    unit = _alignment(model, flags, generation, start)
    if mamba_cache_mode == "all":
        # Whole chunks of the state kernel, and whole blocks of the attention kernel.
        chunk = math.lcm(given_state or model.state_chunk or 2048, unit)
        attention = chunk * ceil_div(ceil_div(state_page, token), chunk)
        state = attention
        attention = max(start, attention)
    else:
        attention = max(start, unit * ceil_div(state_page, unit * token))
        state = given_state or max_model_len
        if mamba_cache_mode == "align":
            state = attention
    page = attention * token
    return Blocks(attention=attention, state=state, state_page_bytes=page if page != state_page else None)


def _check_platform(model: Model, flags: EngineFlags, generation: Generation) -> None:
    release = generation.release
    if flags.platform == "ascend" and model.is_hybrid:
        ascend.check_hybrid(release[:2], model.model_type)
    if flags.platform == "cpu" and model.is_hybrid and (0, 18, 0) <= release < (0, 21, 0):
        raise PlanError(
            "--platform: 'cpu'; vLLM 0.18 to 0.20 do not align a hybrid's pages there: name another version"
        )
    if flags.platform == "cpu" and model.is_latent and release < (0, 28, 0):
        raise PlanError("--platform: 'cpu'; vLLM serves MLA there from 0.28 on: name a newer version")


def _starting_size(model: Model, flags: EngineFlags, generation: Generation, elements: Elements) -> int:
    if flags.platform == "cpu" and model.is_latent:
        return CUDA_BLOCK  # platforms/cpu.py: whatever is given, the reference kernel takes 16 only
    if flags.platform == "ascend":
        # Chunked prefill is on wherever there is one decoder; a hybrid's blocks are left as they are.
        reuses_blocks = not (model.is_encoder_decoder or model.is_hybrid)
        return ascend.block_size(flags.block_size, reuses_blocks=reuses_blocks)
    if flags.block_size is not None:
        return flags.block_size
    if flags.platform == "cpu":
        # Up to 0.17 the hybrid's rule comes first, and the platform's holds only where no size is set.
        return CUDA_BLOCK if model.is_hybrid and generation.release < (0, 18, 0) else CPU_BLOCK
    if not model.is_latent or (model.is_hybrid and generation.release < (0, 20, 0)):
        return CUDA_BLOCK
    return _latent_size(model, flags, generation, elements)


def _latent_size(model: Model, flags: EngineFlags, generation: Generation, elements: Elements) -> int:
    """The block of the MLA kernel that vLLM picks for a card (platforms/cuda.py)."""
    major = flags.compute_capability_major
    is_forced = generation.release < (0, 18, 0)  # check_and_update_config forces a kernel's size
    if model.is_sparse:
        return FLASHMLA_BLOCK
    if major == BLACKWELL:
        takes = model.unrotated_head_size == FLASHINFER_HEAD_SIZE and generation.release >= (0, 15, 0)
        return (FLASHMLA_BLOCK if is_forced else FLASHINFER_BLOCK) if takes else CUTLASS_BLOCK
    # FlashAttention's MLA takes 16 and no 8-bit cache; FlashMLA takes one.
    is_flashmla = major == HOPPER and (is_forced or elements.cache.startswith("fp8"))
    return FLASHMLA_BLOCK if is_flashmla else CUDA_BLOCK


def _alignment(model: Model, flags: EngineFlags, generation: Generation, start: int) -> int:
    """The unit in which a hybrid's block grows.

    Up to 0.19 HybridAttentionMambaModelConfig (models/config.py) has fixed units; later the attention kernel's smallest
    block or the block size so far, whichever is larger (platforms/interface.py, _align_hybrid_block_size).
    """
    if flags.platform == "ascend":
        return ascend.KERNEL_BLOCK
    if generation.release < (0, 20, 0):
        return 64 if model.is_latent else CUDA_BLOCK
    if model.is_latent and generation.release >= (0, 28, 0):
        return max(start, 128)
    return max(start, CUDA_BLOCK)


def _attention_token_bytes(model: Model, flags: EngineFlags, elements: Elements) -> int:
    """One token of one attention layer, by the head counts of vLLM's ModelConfig."""
    if model.is_latent:
        return model.head_size * elements.cache_bytes
    heads = max(1, model.kv_heads // flags.tensor_parallel_size)
    packed = elements.token_head_bytes(model.head_size)
    return heads * (2 * model.head_size * elements.cache_bytes if packed is None else packed)
