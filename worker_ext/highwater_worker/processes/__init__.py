"""Host memory of each of vLLM's processes, in a small file of its own. Touches neither torch nor the engine."""
