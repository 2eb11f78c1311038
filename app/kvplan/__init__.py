"""The KV cache by vLLM's rules: groups of layers, pool, tokens, concurrency, longest length; it imports none of ours."""
