"""The sidecar's own process and its machine: file descriptors, allocator, log, internal errors, clocks and boot."""
