"""The activation peak of vLLM's profiling run: an estimate with wide bounds."""

from __future__ import annotations

from kvplan.builtin.defaults import MODEL_BYTES
from kvplan.builtin.model import Model
from kvplan.figure import MIB, Figure, estimated
from kvplan.flags import EngineFlags


def activation_of(model: Model, flags: EngineFlags) -> Figure:
    """Estimate the peak of a run of `max_num_batched_tokens` tokens that samples for `max_num_seqs` requests.

    Likely is what the second model runner, the newest version's default, holds on PyTorch's meta device; the upper
    bound is that of the first one, whose sampler keeps several copies of the logits. Raises PlanError: a key makes no
    sense.
    """
    text, ranks = model.text, flags.tensor_parallel_size
    tokens, requests = flags.max_num_batched_tokens or 0, flags.max_num_seqs or 0
    element, hidden = MODEL_BYTES[flags.dtype or ""], text.number("hidden_size")
    inner = (text.optional("shared_expert_intermediate_size", 0) or 0) if model.experts else 0
    inner = inner or (
        0 if text.get("moe_intermediate_size") is None and model.experts else text.number("intermediate_size")
    )
    passing = tokens * element * (5 * hidden + max(3 * inner, 4 * _mixer_width(model)) // ranks)
    logits, state = min(requests, tokens) * text.number("vocab_size"), tokens * hidden * element
    buffers = _expert_buffers(model, flags, tokens * element, hidden)
    likely = max(passing, 4 * logits + state) + buffers + 36 * MIB
    first_runner = round(15.3 * logits) + 3 * state + 128 * MIB + buffers
    high = max(round(1.3 * passing) + 128 * MIB + 2 * buffers, first_runner)
    why = f"a profiling run of {tokens} tokens that samples for {requests} requests"
    return estimated(round(0.65 * passing), likely, high, why)


def _mixer_width(model: Model) -> int:
    """Return the width of what one layer's attention or delta net projects a token to."""
    text = model.text
    match model.family.keeps:
        case "delta":
            keys = text.number("linear_num_key_heads") * text.number("linear_key_head_dim")
            return 2 * keys + 2 * text.number("linear_num_value_heads") * text.number("linear_value_head_dim")
        case "latent":
            return model.heads * (text.number("qk_nope_head_dim") + text.number("qk_rope_head_dim"))
        case "attention":
            return (model.heads + 2 * model.kv_heads) * model.head_size


def _expert_buffers(model: Model, flags: EngineFlags, rows: int, hidden: int) -> int:
    """Return two buffers of fused experts, in which each token is once for each of its experts."""
    if not model.experts:
        return 0
    inner = model.text.optional("moe_intermediate_size") or model.text.number("intermediate_size")
    inner //= flags.tensor_parallel_size
    chosen = model.text.optional("num_experts_per_tok") or 1
    return rows * chosen * (max(2 * inner, hidden) + max(inner, hidden))
