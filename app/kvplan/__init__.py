"""A KV cache by vLLM's rules: groups of layers, pool, tokens, concurrency, longest length. It imports none of ours."""
