"""A start planned from a config.json alone: the commonest families, by the newest tested version's defaults."""
