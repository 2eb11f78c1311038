"""One worker's device memory, part by part."""
