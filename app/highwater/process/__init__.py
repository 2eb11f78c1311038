"""The sidecar's own process: its file descriptors, its allocator, its log, its internal errors."""
