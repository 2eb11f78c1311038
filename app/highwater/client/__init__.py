"""Access to a sidecar for commands: the calls, the options that all share, the responses as values."""
