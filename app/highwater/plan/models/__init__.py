"""A model's config.json read as vLLM reads it: what each layer keeps in the KV cache."""
