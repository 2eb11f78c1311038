"""The engine's memory: read, accounted for, kept as history and as PyTorch's snapshots."""
