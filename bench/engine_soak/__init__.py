"""A soak of a real engine: mixed images, text and videos through the sidecar, for as long as asked."""
