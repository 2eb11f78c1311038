"""The engine: every request to it, its capabilities, its lives and its state."""
