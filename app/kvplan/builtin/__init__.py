"""A start planned from a config.json alone, without a vLLM: the commonest families, the newest tested version's defaults."""
