"""The sidecar put together: its settings, the parts that they ask for, and the application that ``main`` makes of them."""
