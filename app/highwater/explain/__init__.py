"""The memory budget explained, and the KV cache of another command line planned."""
