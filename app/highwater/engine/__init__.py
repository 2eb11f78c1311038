"""The engine: every request to it, its capabilities and its lives."""
