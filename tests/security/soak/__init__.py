"""The data plane under ordinary and hostile clients at once: `python -m tests.security.soak --minutes 30`."""
