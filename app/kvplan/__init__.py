"""A KV cache by vLLM's rules: groups of layers, pool, tokens, concurrency, longest length; a package of its own."""
