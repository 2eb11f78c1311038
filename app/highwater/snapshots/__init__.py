"""PyTorch memory snapshots in words: what is free in which segments, what pins them, and what grew between two."""
