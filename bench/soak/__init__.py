"""The data plane under ordinary and hostile clients at once: `python -m bench.soak --minutes 30`."""
