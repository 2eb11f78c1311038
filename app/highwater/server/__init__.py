"""The sidecar put together: its settings, the parts that they ask for, and what ``main`` makes of them."""
