"""A model of a device, an allocator and an engine's life that drives the real sidecar over the real wire."""
