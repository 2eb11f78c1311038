"""The activation peak of vLLM's profiling run: an estimate with wide bounds."""

from __future__ import annotations

from kvplan.builtin.defaults import MODEL_BYTES
from kvplan.builtin.model import Model
from kvplan.figure import MIB, Figure, estimated
from kvplan.flags import EngineFlags


def activation_of(model: Model, flags: EngineFlags) -> Figure:
    """Estimate the peak of a run of `max_num_batched_tokens` tokens that samples for `max_num_seqs` requests.

    Likely is what the second model runner, the newest version's default, holds on PyTorch's meta device; the upper
    bound is that of the first one, whose sampler keeps several copies of the logits. Raises PlanError: a key is
    missing, or makes no sense.
    """
    text, ranks = model.text, flags.tensor_parallel_size
    tokens, requests = flags.max_num_batched_tokens or 0, flags.max_num_seqs or 0
    element, hidden, chosen = MODEL_BYTES[flags.dtype or ""], text.number("hidden_size"), 0
    inner = experts = text.optional("moe_intermediate_size") or text.number("intermediate_size")
    if model.experts:
        inner, chosen = (
            text.optional("shared_expert_intermediate_size", 0) or 0,
            text.optional("num_experts_per_tok") or 1,
        )
    passing = tokens * element * (5 * hidden + max(3 * inner, 4 * _mixer_width(model)) // ranks)
    logits, state = min(requests, tokens) * text.number("vocab_size"), tokens * hidden * element
    # Two buffers of fused experts, in which each token is once for each of its experts.
    buffers = tokens * element * chosen * (max(2 * experts // ranks, hidden) + max(experts // ranks, hidden))
    likely = max(passing, 4 * logits + state) + buffers + 36 * MIB
    first_runner = round(15.3 * logits) + 3 * state + 128 * MIB + buffers
    high = max(round(1.3 * passing) + 128 * MIB + 2 * buffers, first_runner)
    why = f"a profiling run of {tokens} tokens that samples for {requests} requests"
    return estimated(round(0.65 * passing), likely, high, why)


def _mixer_width(model: Model) -> int:
    """Return the width of what one layer's attention or delta net projects a token to."""
    number = model.text.number
    match model.family.keeps:
        case "delta":
            keys = number("linear_num_key_heads") * number("linear_key_head_dim")
            return 2 * (keys + number("linear_num_value_heads") * number("linear_value_head_dim"))
        case "latent":
            return model.heads * (number("qk_nope_head_dim") + number("qk_rope_head_dim"))
        case "attention":
            return (model.heads + 2 * model.kv_heads) * model.head_size
