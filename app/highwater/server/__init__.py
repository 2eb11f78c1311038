"""The sidecar's areas, each put together from its parts: ``main`` joins them, and tests use single ones."""
